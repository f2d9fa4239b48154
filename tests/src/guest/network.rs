//! Makes the host's end of the networks of guests, in the network namespace of a test: bridges with TAPs,
//! echo servers, and the end of iperf3 that receives.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

use anyhow::{Context, Result};
use kickless_testing::ip;

use crate::guest::qemu::LIMIT;
use crate::transcript::Transcript;

/// Makes the bridge of network `number`, with TAPs at it, and starts its echo server.
///
/// # Errors
/// The port of the server is not free.
pub fn network(number: usize, taps: &[&str], queues: &str) -> Result<()> {
    ip(&format!("link add br{number} type bridge forward_delay 0"));
    ip(&format!("addr add 10.77.{number}.1/24 dev br{number}"));
    ip(&format!("link set br{number} up"));
    for tap in taps {
        ip(&format!("tuntap add dev {tap} mode tap {queues}"));
        ip(&format!("link set {tap} up master br{number}"));
    }
    serve_echo(&format!("10.77.{number}.1"))
}

/// Starts an echo server at an address. Its threads end with the program.
///
/// # Errors
/// The port is not free.
pub fn serve_echo(address: &str) -> Result<()> {
    let listener = TcpListener::bind((address, 7))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || echo(stream));
        }
    });
    Ok(())
}

/// Returns all that comes. A guest that was reset leaves its connections open.
fn echo(mut stream: TcpStream) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(len @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..len]).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}

/// The end of iperf3 that receives. Dropping it ends the process.
pub struct Iperf {
    server: Child,
    output: Transcript,
}

impl Iperf {
    /// Starts it at an address of the host, and waits until it listens.
    ///
    /// # Errors
    /// There is no iperf3, or it does not listen.
    pub fn start(address: &str) -> Result<Iperf> {
        let mut command = Command::new("iperf3");
        command.args(["--server", "--forceflush", "--interval", "0.2", "--bind", address]);
        let mut server = command.stdout(Stdio::piped()).spawn().context("cannot run iperf3")?;
        let output = Transcript::of("iperf3", server.stdout.take().context("no pipe")?);
        let iperf = Iperf { server, output };
        let listens = |line: &str| line.contains("listening").then_some(());
        iperf.output.wait_for("an iperf3 that listens", LIMIT, listens)?;
        Ok(iperf)
    }

    /// Waits until data has come in two intervals from now on. The first one may have begun before.
    ///
    /// # Errors
    /// No data comes in time.
    pub fn wait_for_data(&self) -> Result<()> {
        let mut intervals = 0;
        let twice = |line: &str| {
            intervals += u32::from(line.contains("bits/sec") && !line.contains(" 0.00 bits/sec"));
            (intervals == 2).then_some(())
        };
        self.output.wait_from(self.output.len(), "data of iperf3", LIMIT, twice)
    }

    /// Returns the number of clients so far.
    pub fn connections(&self) -> usize {
        self.output.lines().iter().filter(|line| line.contains("Accepted")).count()
    }
}

impl Drop for Iperf {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
