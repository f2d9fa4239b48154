//! Speaks QMP, the QEMU machine protocol: sends commands to a running QEMU and receives its events.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::transcript::Transcript;

/// Time limit for an answer.
const LIMIT: Duration = Duration::from_secs(60);

/// One QMP connection.
pub struct Qmp {
    stream: UnixStream,
    messages: Transcript,
    next_id: u64,
}

impl Qmp {
    /// Wraps a connection and completes the negotiation of capabilities.
    ///
    /// # Errors
    /// QEMU does not answer as expected.
    pub fn new(stream: UnixStream) -> Result<Qmp> {
        let messages = Transcript::of("QMP", stream.try_clone()?);
        let mut qmp = Qmp { stream, messages, next_id: 0 };
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    ///
    /// # Errors
    /// QEMU refuses the command, or has ended.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.next_id += 1;
        let id = self.next_id;
        let start = self.messages.len();
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        self.stream.write_all(line.as_bytes()).with_context(|| format!("sending {command}"))?;
        let mut answer = self.messages.wait_from(start, &format!("answer to {command}"), LIMIT, |line| {
            serde_json::from_str::<Value>(line).ok().filter(|message| message["id"] == id)
        })?;
        if !answer["error"].is_null() {
            bail!("{command}: {}", answer["error"]);
        }
        Ok(answer["return"].take())
    }

    /// Returns the position of the next event. Call it before the action that causes the event.
    pub fn mark(&self) -> usize {
        self.messages.len()
    }

    /// Waits for an event after `mark` whose data `wanted` accepts. Returns the data.
    ///
    /// # Errors
    /// The event does not come in time, or QEMU has ended.
    pub fn event(&self, mark: usize, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        self.messages.wait_from(mark, &format!("event {name}"), LIMIT, |line| {
            let mut message = serde_json::from_str::<Value>(line).ok()?;
            (message["event"] == name && wanted(&message["data"])).then(|| message["data"].take())
        })
    }
}
