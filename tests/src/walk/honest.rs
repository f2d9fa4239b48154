//! Honest front-ends and clients, whose data must be right whatever the others do.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kickless_driver::{Card, Disk, Interest, Outgoing, QueuePair};
use kickless_testing::pattern;

use crate::daemon::Daemon;
use crate::frontend::LIMIT;
use crate::meter::victim::{connect_card, connect_disk};
use crate::walk::device_rings::Kind;

/// A disk and two cards that check their data.
pub struct Honest {
    disk: Disk,
    cards: [(Card, QueuePair); 2],
    version: u64,
}

impl Honest {
    /// Connects.
    ///
    /// # Errors
    /// The daemon refuses a message.
    pub fn connect(daemon: &Daemon) -> Result<Honest> {
        let card = |name| connect_card(&daemon.socket_of(name));
        let cards = [card("honest-a")?, card("honest-b")?];
        Ok(Honest { disk: connect_disk(&daemon.socket_of("honest"))?, cards, version: 0 })
    }

    /// Writes a block and reads it, and sends a frame from one card to the other. Others may fill the queue
    /// of the receiver, so the frame is sent until it comes.
    ///
    /// # Errors
    /// A request fails, data is wrong, or no frame comes.
    pub fn check(&mut self) -> Result<()> {
        self.version += 1;
        let (block, mut found) = (pattern(self.version, 4096), [0; 4096]);
        let at = self.version % 1024 * 4096;
        self.disk.write_at(&block, at)?;
        self.disk.read_at(&mut found, at)?;
        ensure!(found[..] == block, "block {at:#x} has other bytes");
        let addresses = [2, 0, 0, 0, 5, 2, 2, 0, 0, 0, 5, 1, 0x88, 0xb5];
        let frame = [&addresses[..], &pattern(self.version, 600)].concat();
        let [(_, from), (_, to)] = &mut self.cards;
        let start = Instant::now();
        let mut has_come = false;
        while !has_come {
            ensure!(start.elapsed() < LIMIT, "no frame comes through the switch");
            from.send(&[Outgoing::from(&frame[..])])?;
            from.receive(256, |_| {})?;
            to.wait(Interest::Receive, Some(Duration::from_millis(10)))?;
            to.receive(1024, |received| has_come |= received.to_vec() == frame)?;
        }
        Ok(())
    }
}

/// Checks that an honest front-end can use a device that was attacked.
///
/// # Errors
/// The device does not answer.
pub fn answers(kind: Kind, socket: &Path) -> Result<()> {
    match kind {
        Kind::Disk => {
            let id = connect_disk(socket)?.get_id()?;
            ensure!(!id.is_empty(), "a disk has no identity");
        }
        Kind::Card(_) => {
            let (_card, mut pair) = connect_card(socket)?;
            let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 6, 1], &[0x88, 0xb5], &[0; 50]].concat();
            pair.send(&[Outgoing::from(&frame[..])])?;
            ensure!(pair.flush(Some(LIMIT))?, "a card takes no frame");
        }
    }
    Ok(())
}

/// Asks the control socket for the state of the daemon. Returns its answer.
///
/// # Errors
/// It does not answer.
pub fn control(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.info\"}\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line)
}
