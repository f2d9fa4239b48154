//! A client of a control socket.

use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kickless_opener::{Want, explained};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Map, Value};

use super::inbox::{DESCRIPTORS_MAX, LostDescriptors};
use super::rpc::{Request, RpcError};

/// The longest answer that the client takes. A daemon with 512 devices of 64 queues sends some 20 MiB.
const ANSWER_BYTES_MAX: u64 = 256 << 20;

/// A connection to the control socket of a daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    next_id: u64,
}

/// The error of a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The connection failed.
    #[error("the control socket cannot be used")]
    Io(#[source] io::Error),
    /// The daemon does not answer in time.
    #[error("the daemon does not answer: look at its log, and try again")]
    Silent,
    /// The daemon has closed the connection.
    #[error("the daemon has closed the connection")]
    Closed,
    /// The answer is not one of JSON-RPC 2.0.
    #[error("the daemon's answer cannot be read: {0}")]
    Answer(String),
    /// The daemon refused the call, or the call failed.
    #[error(transparent)]
    Call(#[from] RpcError),
}

/// Returns the connection.
impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Io(error),
        }
    }
}

/// Returns the reason why there is no daemon at a path.
fn not_connected(path: &Path, error: io::Error) -> io::Error {
    let why = match error.kind() {
        io::ErrorKind::NotFound => {
            "no daemon listens there: start it with kickless serve --control=PATH, or correct the path"
        }
        // A file that is no socket refuses connections too.
        io::ErrorKind::ConnectionRefused if is_socket(path) => {
            "the daemon of this socket has ended: start it again, or correct the path"
        }
        _ => return explained(path, Want::Connect, error),
    };
    io::Error::new(error.kind(), why)
}

#[expect(clippy::disallowed_methods, reason = "a client is no daemon")]
fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_socket())
}

impl Client {
    /// Connects to the control socket with this path.
    ///
    /// # Errors
    /// No daemon listens there. The error is the end of a sentence that begins with the path.
    #[expect(clippy::disallowed_methods, reason = "a client is no daemon")]
    pub fn connect(path: &Path) -> io::Result<Self> {
        UnixStream::connect(path).map(Self::of).map_err(|error| not_connected(path, error))
    }

    /// Makes calls on a connection to a control socket.
    pub fn of(stream: UnixStream) -> Self {
        Self { stream: BufReader::new(stream), next_id: 0 }
    }

    /// Bounds the time of each read and write. A call fails if the daemon is silent for longer.
    ///
    /// # Errors
    /// The time is zero.
    pub fn within(self, time: Duration) -> io::Result<Self> {
        self.stream.get_ref().set_read_timeout(Some(time))?;
        self.stream.get_ref().set_write_timeout(Some(time))?;
        Ok(self)
    }

    /// Makes a call and waits for its result.
    ///
    /// # Errors
    /// The call failed, or the connection did.
    pub fn call(&mut self, method: &str, params: Map<String, Value>) -> Result<Value, ClientError> {
        self.call_given(method, params, &[])
    }

    /// Makes a call as [`Client::call`] does. Sends these descriptors with it, each with its name.
    ///
    /// # Errors
    /// The call failed, or the connection did.
    pub fn call_given(
        &mut self,
        method: &str,
        params: Map<String, Value>,
        given: &[(String, BorrowedFd<'_>)],
    ) -> Result<Value, ClientError> {
        let id = Value::from(self.next_id);
        self.next_id += 1;
        let (fds, descriptors): (_, Vec<_>) = given.iter().cloned().unzip();
        let request = Request { id: Some(id.clone()), method: method.to_owned(), params, fds };
        // A daemon that refuses this client answers without reading. So the answer counts, if there is one.
        let written = self.write(request.line().as_bytes(), &descriptors);
        let mut answer = loop {
            match self.read() {
                Err(ClientError::Io(_) | ClientError::Closed) if written.is_err() => {
                    return Err(ClientError::Closed);
                }
                // A notification of an earlier subscription.
                Ok(line) if line.get("method").is_some() => {}
                answer => break answer?,
            }
        };
        if let Some(error) = answer.get_mut("error").map(Value::take) {
            let code = error["code"].as_i64().unwrap_or_default();
            let message = error["message"].as_str().unwrap_or("no reason").to_owned();
            return Err(RpcError { code, message }.into());
        }
        if answer["id"] != id {
            return Err(ClientError::Answer("it is for another request".into()));
        }
        answer
            .get_mut("result")
            .map(Value::take)
            .ok_or_else(|| ClientError::Answer("it has no result".into()))
    }

    /// Writes a line. Its descriptors come with its first bytes.
    fn write(&mut self, line: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let stream = self.stream.get_mut();
        let mut sent = 0;
        if !descriptors.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(io::Error::other(LostDescriptors::TooMany));
            }
            let line = [IoSlice::new(line)];
            sent = sendmsg(&*stream, &line, &mut control, SendFlags::NOSIGNAL)?;
        }
        stream.write_all(&line[sent..])
    }

    /// Waits for the next notification of a subscription. Returns its parameters.
    ///
    /// # Errors
    /// The connection failed.
    pub fn next_notification(&mut self) -> Result<Value, ClientError> {
        loop {
            let mut line = self.read()?;
            if line.get("method").is_some() {
                return Ok(line["params"].take());
            }
        }
    }

    /// Reads one line.
    fn read(&mut self) -> Result<Value, ClientError> {
        let mut line = Vec::new();
        self.stream.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(ClientError::Closed);
        }
        serde_json::from_slice(&line).map_err(|error| ClientError::Answer(error.to_string()))
    }
}
