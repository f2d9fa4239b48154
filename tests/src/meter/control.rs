//! Behaviours of a client of the control sockets.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::frontend::LIMIT;
use crate::meter::behaviour::{Behaviour, Bound, Deed, Stage, Step, memory_disk};

/// The behaviours.
pub const TABLE: &[Behaviour] = &[
    Behaviour {
        name: "snapshots that are not read, from 32 clients",
        devices: memory_disk,
        start: |stage| unread(stage, "control", "daemon.snapshot"),
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "counters that are not read, from 32 read-only clients",
        devices: memory_disk,
        start: |stage| unread(stage, "control-read-only", "stats.get"),
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "counters without end, for a read-only client",
        devices: memory_disk,
        start: |stage| asking(stage, "control-read-only", r#"{"jsonrpc":"2.0","id":1,"method":"stats.get"}"#),
        pause: Duration::from_millis(5),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "long lines of nonsense",
        devices: memory_disk,
        start: nonsense,
        pause: Duration::from_millis(5),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "limits that change",
        devices: memory_disk,
        start: |stage| {
            let limits =
                r#"{"jsonrpc":"2.0","id":1,"method":"device.set","params":{"name":"attacker","iops":5000}}"#;
            asking(stage, "control", limits)
        },
        pause: Duration::from_millis(5),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "disks that come and go",
        devices: memory_disk,
        start: disks,
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
];

fn connect(stage: &Stage<'_>, socket: &str) -> Result<UnixStream> {
    UnixStream::connect(stage.socket(socket)).with_context(|| socket.to_owned())
}

/// Sends as many calls as each client's socket takes, in each step. The clients read nothing, and one of them
/// is replaced in each step.
fn unread(stage: &Stage<'_>, socket: &'static str, method: &str) -> Result<Step> {
    let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{method}\"}}\n");
    let lines = line.repeat(64);
    let path = stage.socket(socket);
    let connect = move || -> Result<UnixStream> {
        let stream = UnixStream::connect(&path)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    };
    let mut clients = (0..32).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    let mut at = 0;
    Ok(Box::new(move || {
        let mut bytes = 0;
        for client in &mut clients {
            match client.write(lines.as_bytes()) {
                Ok(written) => bytes += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        clients[at] = connect()?;
        at = (at + 1) % clients.len();
        Ok(Deed::of((bytes / line.len()) as u64))
    }))
}

/// A client that reads its answers.
struct Client {
    stream: UnixStream,
    answers: BufReader<UnixStream>,
}

impl Client {
    fn connect(stage: &Stage<'_>, socket: &str) -> Result<Client> {
        let stream = connect(stage, socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Client { answers: BufReader::new(stream.try_clone()?), stream })
    }

    fn call(&mut self, line: &str) -> Result<String> {
        self.stream.write_all(line.as_bytes())?;
        self.stream.write_all(b"\n")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        Ok(answer)
    }
}

/// Makes a call eight times in each step.
fn asking(stage: &Stage<'_>, socket: &str, line: &'static str) -> Result<Step> {
    let mut client = Client::connect(stage, socket)?;
    Ok(Box::new(move || {
        for _ in 0..8 {
            let answer = client.call(line)?;
            ensure!(answer.contains("\"result\""), "{line} is answered by {answer}");
        }
        Ok(Deed::of(8))
    }))
}

/// Sends a long line that is no call.
fn nonsense(stage: &Stage<'_>) -> Result<Step> {
    let mut client = Client::connect(stage, "control-read-only")?;
    let line = format!("{{\"jsonrpc\": {}", "[".repeat(60 << 10));
    Ok(Box::new(move || {
        let answer = client.call(&line)?;
        ensure!(answer.contains("\"error\""), "nonsense is answered by {answer}");
        Ok(Deed::of(1))
    }))
}

/// Adds a disk and removes it.
fn disks(stage: &Stage<'_>) -> Result<Step> {
    let mut client = Client::connect(stage, "control")?;
    let socket = stage.socket("guest");
    let line = |method: &str, params: String| {
        format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{method}\",\"params\":{params}}}")
    };
    let params =
        format!("{{\"name\":\"guest\",\"socket-path\":\"{}\",\"blk-file\":\"mem:16M\"}}", socket.display());
    let (add, remove) = (line("device.add", params), line("device.remove", "{\"name\":\"guest\"}".into()));
    Ok(Box::new(move || {
        for line in [&add, &remove] {
            let answer = client.call(line)?;
            ensure!(answer.contains("\"result\""), "{line} is answered by {answer}");
        }
        Ok(Deed::of(2))
    }))
}
