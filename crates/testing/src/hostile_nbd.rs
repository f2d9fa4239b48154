//! Runs an NBD server that sends the bytes that a test chooses. The numbers are from
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use tempfile::TempDir;

/// `NBDMAGIC`, `IHAVEOPT`, and the flags for fixed newstyle options and no zeroes.
pub const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
/// The flags of the export: flags are present, and it supports flushes.
pub const EXPORT_FLAGS: u16 = 1 | 1 << 2;
/// Bytes of the export.
pub const SIZE: u64 = 65536;

/// An NBD server on a socket of its own. A panic of its thread fails the test.
pub struct HostileNbd {
    dir: TempDir,
    thread: Option<JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
}

impl HostileNbd {
    /// Starts a server that accepts up to `connections` connections, one after the other, and closes. `talk`
    /// gets the number of the connection, from 0.
    pub fn start(connections: usize, talk: impl FnMut(usize, &mut UnixStream) + Send + 'static) -> Self {
        let mut server = Self { dir: tempfile::tempdir().unwrap(), thread: None, is_over: Arc::default() };
        server.start_again(connections, talk);
        server
    }

    /// Starts another server at the same address after the first has closed.
    pub fn start_again(
        &mut self,
        connections: usize,
        mut talk: impl FnMut(usize, &mut UnixStream) + Send + 'static,
    ) {
        self.end();
        let listener = UnixListener::bind(self.socket()).unwrap();
        self.is_over = Arc::default();
        let is_over = self.is_over.clone();
        self.thread = Some(thread::spawn(move || {
            for connection in 0..connections {
                let Ok((mut stream, _)) = listener.accept() else { return };
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                talk(connection, &mut stream);
            }
        }));
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    /// Ends the wait for further connections, and waits until the server has closed.
    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.is_over.store(true, Ordering::Relaxed);
            drop(UnixStream::connect(self.socket()));
            thread.join().unwrap();
            let _ = std::fs::remove_file(self.socket());
        }
    }

    /// Returns the URI of the export with this name. Requests wait `reconnect_delay` seconds for a lost
    /// server.
    pub fn export(&self, name: &str, reconnect_delay: u64) -> String {
        format!("nbd+unix:///{name}?socket={}&reconnect-delay={reconnect_delay}", self.socket().display())
    }

    /// Returns the URI of the nameless export. Requests do not wait for a lost server.
    pub fn uri(&self) -> String {
        self.export("", 0)
    }
}

impl Drop for HostileNbd {
    fn drop(&mut self) {
        // After a failure of the test, the server may wait for a connection that never comes.
        if !thread::panicking() {
            self.end();
        }
    }
}

/// Returns the answer to an option.
pub fn answer(option: u32, kind: u32, body: &[u8]) -> Vec<u8> {
    let (magic, len) = (0x0003_e889_0455_65a9_u64, body.len() as u32);
    [&magic.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), body].concat()
}

/// Returns the body of an answer that describes an export.
pub fn export_info(size: u64, flags: u16) -> Vec<u8> {
    [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// Returns the handshake of an honest server up to the first request. `structured` tells whether the server
/// agrees to structured replies.
pub fn hello(structured: bool) -> Vec<u8> {
    hello_of(structured, SIZE, EXPORT_FLAGS)
}

/// Returns the same handshake for an export of `size` bytes with the transmission flags `flags`.
pub fn hello_of(structured: bool, size: u64, flags: u16) -> Vec<u8> {
    let first = answer(8, if structured { 1 } else { 0x8000_0001 }, &[]);
    [GREETING, &first, &answer(7, 3, &export_info(size, flags)), &answer(7, 1, &[])].concat()
}

/// Reads the client's part of the handshake, up to its choice of an export.
pub fn read_handshake(stream: &mut UnixStream) -> io::Result<()> {
    // The client sends flags, one option without data, and one option with an empty name and a request for
    // block sizes.
    stream.read_exact(&mut [0; 4 + 16 + 16 + 8])
}

/// Sends a handshake and reads the client's part.
pub fn greet(stream: &mut UnixStream, hello: &[u8]) {
    try_greet(stream, hello).unwrap();
}

/// Does the same with a client that may give the connection up meanwhile, such as one that is reloaded.
pub fn try_greet(stream: &mut UnixStream, hello: &[u8]) -> io::Result<()> {
    stream.write_all(hello)?;
    read_handshake(stream)
}

/// Returns a chunk of a structured reply.
pub fn chunk(flags: u16, kind: u16, cookie: u64, body: &[u8]) -> Vec<u8> {
    let magic = 0x668e_33ef_u32.to_be_bytes();
    let (flags, kind, len) = (flags.to_be_bytes(), kind.to_be_bytes(), (body.len() as u32).to_be_bytes());
    [&magic[..], &flags, &kind, &cookie.to_be_bytes(), &len, body].concat()
}

/// Returns a simple reply.
pub fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

/// A received request, without the data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// Command flags.
    pub flags: u16,
    /// Command, such as [`READ`].
    pub command: u16,
    /// Identifies the request.
    pub cookie: u64,
    /// Offset in bytes.
    pub at: u64,
    /// Length in bytes.
    pub len: u32,
}

/// NBD_CMD_READ.
pub const READ: u16 = 0;
/// NBD_CMD_WRITE.
pub const WRITE: u16 = 1;
/// NBD_CMD_DISC.
pub const DISCONNECT: u16 = 2;
/// NBD_CMD_FLUSH.
pub const FLUSH: u16 = 3;
/// NBD_CMD_TRIM.
pub const TRIM: u16 = 4;
/// NBD_CMD_WRITE_ZEROES.
pub const ZEROES: u16 = 6;

/// Reads the next request. Returns `None` when the client has closed the connection.
pub fn read_request(stream: &mut UnixStream) -> Option<ReceivedRequest> {
    let mut bytes = [0; 28];
    stream.read_exact(&mut bytes).ok()?;
    assert_eq!(bytes[..4], 0x2560_9513_u32.to_be_bytes());
    let request = ReceivedRequest {
        flags: u16::from_be_bytes(bytes[4..6].try_into().unwrap()),
        command: u16::from_be_bytes(bytes[6..8].try_into().unwrap()),
        cookie: u64::from_be_bytes(bytes[8..16].try_into().unwrap()),
        at: u64::from_be_bytes(bytes[16..24].try_into().unwrap()),
        len: u32::from_be_bytes(bytes[24..].try_into().unwrap()),
    };
    if request.command == WRITE {
        stream.read_exact(&mut vec![0; request.len as usize]).unwrap();
    }
    Some(request)
}

/// Answers all requests with simple replies, whose data repeats `byte`. Returns the requests.
pub fn serve_requests(stream: &mut UnixStream, byte: u8) -> Vec<ReceivedRequest> {
    let mut all = Vec::new();
    while let Some(request) = read_request(stream) {
        all.push(request);
        let len = if request.command == READ { request.len as usize } else { 0 };
        // A client that disconnects does not read the reply.
        let _ = stream.write_all(&simple(0, request.cookie, &vec![byte; len]));
    }
    all
}
