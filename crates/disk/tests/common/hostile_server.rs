//! Runs an NBD server that sends what a test has it send.
//! Source of the numbers: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

use kickless_disk::DiskSpec;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use tempfile::TempDir;

/// `NBDMAGIC`, `IHAVEOPT`, and that it knows options and sends no zeroes.
pub const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
/// There are flags; it can be asked to flush.
pub const EXPORT_FLAGS: u16 = 1 | 1 << 2;
/// Bytes of the export.
pub const SIZE: u64 = 65536;

/// An NBD server on a socket of its own. A panic of its thread fails the test.
pub struct HostileServer {
    dir: TempDir,
    thread: Option<JoinHandle<()>>,
}

impl HostileServer {
    /// One that talks with each of `connections` in turn, which are counted from 0, and then is not there any more.
    pub fn start(connections: usize, talk: impl FnMut(usize, &mut UnixStream) + Send + 'static) -> Self {
        let mut server = Self { dir: tempfile::tempdir().unwrap(), thread: None };
        server.start_again(connections, talk);
        server
    }

    /// Another at the same address, when the first is not there any more.
    pub fn start_again(
        &mut self,
        connections: usize,
        mut talk: impl FnMut(usize, &mut UnixStream) + Send + 'static,
    ) {
        self.end();
        let listener = UnixListener::bind(self.socket()).unwrap();
        self.thread = Some(thread::spawn(move || {
            for connection in 0..connections {
                let Ok((mut stream, _)) = listener.accept() else { return };
                talk(connection, &mut stream);
            }
        }));
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("sock")
    }

    /// Waits until it is not there any more.
    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
            let _ = std::fs::remove_file(self.socket());
        }
    }

    /// Its export of this name, and how many seconds requests wait for it.
    pub fn export(&self, name: &str, reconnect_delay: u64) -> DiskSpec {
        spec(name, &self.socket(), reconnect_delay)
    }

    /// Its only export; nothing waits for it.
    pub fn spec(&self) -> DiskSpec {
        self.export("", 0)
    }
}

fn spec(name: &str, socket: &Path, reconnect_delay: u64) -> DiskSpec {
    let (socket, delay) = (socket.display(), reconnect_delay);
    DiskSpec::Nbd(format!("nbd+unix:///{name}?socket={socket}&reconnect-delay={delay}").parse().unwrap())
}

impl Drop for HostileServer {
    fn drop(&mut self) {
        // Where the test has failed it may wait for a connection that will not come.
        if !thread::panicking() {
            self.end();
        }
    }
}

/// An answer to an option.
pub fn answer(option: u32, kind: u32, body: &[u8]) -> Vec<u8> {
    let (magic, len) = (0x0003_e889_0455_65a9_u64, body.len() as u32);
    [&magic.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), body].concat()
}

/// What an answer says of an export.
pub fn export_info(size: u64, flags: u16) -> Vec<u8> {
    [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// What a well-behaved server says until requests come.
pub fn hello(structured: bool) -> Vec<u8> {
    hello_of(structured, SIZE, EXPORT_FLAGS)
}

/// [`hello`], with another export.
pub fn hello_of(structured: bool, size: u64, flags: u16) -> Vec<u8> {
    let first = answer(8, if structured { 1 } else { 0x8000_0001 }, &[]);
    [GREETING, &first, &answer(7, 3, &export_info(size, flags)), &answer(7, 1, &[])].concat()
}

/// Reads what the client says until it asks for an export.
pub fn hear_handshake(stream: &mut UnixStream) {
    // Flags, one option without data, one with: an empty name and no questions.
    stream.read_exact(&mut [0; 4 + 16 + 16 + 6]).unwrap();
}

/// Both of them.
pub fn greet(stream: &mut UnixStream, hello: &[u8]) {
    stream.write_all(hello).unwrap();
    hear_handshake(stream);
}

/// A part of a structured reply.
pub fn chunk(flags: u16, kind: u16, cookie: u64, body: &[u8]) -> Vec<u8> {
    let magic = 0x668e_33ef_u32.to_be_bytes();
    let (flags, kind, len) = (flags.to_be_bytes(), kind.to_be_bytes(), (body.len() as u32).to_be_bytes());
    [&magic[..], &flags, &kind, &cookie.to_be_bytes(), &len, body].concat()
}

pub fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

/// A request, without the data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub at: u64,
    pub len: u32,
}

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const BYE: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const ZEROES: u16 = 6;

/// Hears the next request; `None` when the client has gone.
pub fn hear(stream: &mut UnixStream) -> Option<Asked> {
    let mut bytes = [0; 28];
    stream.read_exact(&mut bytes).ok()?;
    assert_eq!(bytes[..4], 0x2560_9513_u32.to_be_bytes());
    let asked = Asked {
        flags: u16::from_be_bytes(bytes[4..6].try_into().unwrap()),
        command: u16::from_be_bytes(bytes[6..8].try_into().unwrap()),
        cookie: u64::from_be_bytes(bytes[8..16].try_into().unwrap()),
        at: u64::from_be_bytes(bytes[16..24].try_into().unwrap()),
        len: u32::from_be_bytes(bytes[24..].try_into().unwrap()),
    };
    if asked.command == WRITE {
        stream.read_exact(&mut vec![0; asked.len as usize]).unwrap();
    }
    Some(asked)
}

/// Does all that it is asked, with simple replies, and data of this byte; what that was.
pub fn oblige(stream: &mut UnixStream, byte: u8) -> Vec<Asked> {
    let mut all = Vec::new();
    while let Some(asked) = hear(stream) {
        all.push(asked);
        let len = if asked.command == READ { asked.len as usize } else { 0 };
        // Who takes leave hears nothing any more.
        let _ = stream.write_all(&simple(0, asked.cookie, &vec![byte; len]));
    }
    all
}
