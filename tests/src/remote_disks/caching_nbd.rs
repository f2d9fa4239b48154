//! Serves an export over NBD with a cache for each connection, as a server with several hosts behind it may.
//! Each cache is as bad as the protocol allows. The numbers are from
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use kickless_testing::eventually;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

const SECTOR: usize = 512;
/// `NBDMAGIC`, `IHAVEOPT`, and the flags for fixed newstyle options and no zeroes.
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPT_ABORT: u32 = 2;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_UNSUPPORTED: u32 = 0x8000_0001;
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISC: u16 = 2;
const CMD_FLUSH: u16 = 3;
const CMD_TRIM: u16 = 4;
const CMD_ZERO: u16 = 6;
const CMD_FLAG_FUA: u16 = 1;
/// Flags are present; flush, FUA, trim and zeroes are supported.
const EXPORT_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;
/// Each connection sees what another one has flushed.
const CAN_MULTI_CONN: u16 = 1 << 8;
const EINVAL: u32 = 22;
/// The longest option and write.
const LEN_MAX: usize = 1 << 20;

/// A running server. Dropping it ends all connections.
pub struct CachingNbd {
    export: Arc<Export>,
    dir: TempDir,
}

struct Export {
    size: usize,
    can_multi_conn: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The contents after a crash.
    stable: Vec<u8>,
    /// The contents that a new connection sees.
    current: Vec<u8>,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    is_over: bool,
}

/// The caches of a connection.
struct Connection {
    socket: UnixStream,
    /// The contents that this client sees. It read all of them when it connected.
    view: Vec<u8>,
    /// Sectors in its write cache.
    dirty: BTreeSet<usize>,
    /// They have a write or zeroes, and not only discards.
    has_unflushed: bool,
}

impl CachingNbd {
    /// Starts a server of an export of zeroes.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(size: usize, can_multi_conn: bool) -> Result<CachingNbd> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let listener = UnixListener::bind(dir.path().join("sock"))?;
        let state = State { stable: vec![0; size], current: vec![0; size], ..State::default() };
        let export = Arc::new(Export { size, can_multi_conn, state: Mutex::new(state) });
        let served = Arc::clone(&export);
        thread::Builder::new().name("nbd".into()).spawn(move || {
            while let Ok((socket, _)) = listener.accept()
                && !served.lock().is_over
            {
                let served = Arc::clone(&served);
                thread::spawn(move || served.serve(socket));
            }
        })?;
        Ok(CachingNbd { export, dir })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    /// Returns the URI of the export. Requests wait ten seconds for a lost server.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}&reconnect-delay=10", self.socket().display())
    }

    /// Loses all caches, and ends all connections. Returns whether a client loses a write that was answered
    /// and not flushed. A lost discard does not count.
    pub fn crash(&self) -> bool {
        let mut state = self.export.lock();
        let loses = state.connections.values().any(|connection| connection.has_unflushed);
        state.current = state.stable.clone();
        // The threads find their connections gone.
        for connection in std::mem::take(&mut state.connections).into_values() {
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
        loses
    }

    /// Waits until the server has noticed the end of each connection whose client has ended. The server then
    /// has the writes of that connection.
    pub fn settle(&self) {
        let is_open = |connection: &Connection| {
            let mut socket = [PollFd::new(&connection.socket, PollFlags::RDHUP)];
            poll(&mut socket, Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
        };
        eventually("a connection does not end", || self.export.lock().connections.values().all(is_open));
    }
}

impl Drop for CachingNbd {
    fn drop(&mut self) {
        self.export.lock().is_over = true;
        self.crash();
        // Wakes the thread that accepts.
        let _ = UnixStream::connect(self.socket());
    }
}

impl Export {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, mut socket: UnixStream) {
        let Ok(true) = self.negotiate(&mut socket) else { return };
        let Ok(clone) = socket.try_clone() else { return };
        let number = {
            let mut state = self.lock();
            let connection = Connection {
                socket: clone,
                view: state.current.clone(),
                dirty: BTreeSet::new(),
                has_unflushed: false,
            };
            state.next += 1;
            let number = state.next;
            state.connections.insert(number, connection);
            number
        };
        while let Ok(true) = self.exchange(number, &mut socket) {}
        // The server's own cache gets the writes of a connection that ends.
        let mut state = self.lock();
        state.write_cache_of(number);
        state.connections.remove(&number);
    }

    /// Answers options. Returns whether the client has chosen the export.
    fn negotiate(&self, socket: &mut UnixStream) -> Result<bool> {
        socket.write_all(GREETING)?;
        read::<4>(socket)?;
        loop {
            read::<8>(socket)?;
            let option = u32::from_be_bytes(read(socket)?);
            let len = u32::from_be_bytes(read(socket)?) as usize;
            anyhow::ensure!(len <= LEN_MAX, "an option of {len} bytes");
            socket.read_exact(&mut vec![0; len])?;
            match option {
                OPT_GO | OPT_INFO => {
                    let multi = if self.can_multi_conn { CAN_MULTI_CONN } else { 0 };
                    let flags = (EXPORT_FLAGS | multi).to_be_bytes();
                    let info = [&[0, 0][..], &(self.size as u64).to_be_bytes(), &flags].concat();
                    socket.write_all(&answer(option, REP_INFO, &info))?;
                    socket.write_all(&answer(option, REP_ACK, &[]))?;
                    if option == OPT_GO {
                        return Ok(true);
                    }
                }
                OPT_ABORT => return Ok(false),
                _ => socket.write_all(&answer(option, REP_UNSUPPORTED, &[]))?,
            }
        }
    }

    /// Answers a request. Returns whether the connection goes on.
    fn exchange(&self, number: u64, socket: &mut UnixStream) -> Result<bool> {
        let magic = u32::from_be_bytes(read(socket)?);
        anyhow::ensure!(magic == REQUEST_MAGIC, "no request: {magic:#x}");
        let flags = u16::from_be_bytes(read(socket)?);
        let command = u16::from_be_bytes(read(socket)?);
        let cookie: [u8; 8] = read(socket)?;
        let at = usize::try_from(u64::from_be_bytes(read(socket)?))?;
        let len = u32::from_be_bytes(read(socket)?) as usize;
        anyhow::ensure!(len <= LEN_MAX, "a request for {len} bytes");
        let mut data = vec![0; if matches!(command, CMD_READ | CMD_WRITE) { len } else { 0 }];
        if command == CMD_WRITE {
            socket.read_exact(&mut data)?;
        }
        if command == CMD_DISC {
            return Ok(false);
        }
        let mut state = self.lock();
        let sectors = at / SECTOR..(at + len) / SECTOR;
        let is_valid = at.checked_add(len).is_some_and(|end| end <= self.size)
            && at.is_multiple_of(SECTOR)
            && len.is_multiple_of(SECTOR);
        let State { stable, current, connections, .. } = &mut *state;
        let connection = connections.get_mut(&number).context("the server has crashed")?;
        let mut error = 0;
        match command {
            _ if !is_valid => error = EINVAL,
            CMD_READ => data.copy_from_slice(&connection.view[at..at + len]),
            CMD_WRITE | CMD_ZERO | CMD_TRIM => {
                let zeroes = vec![0; len];
                let bytes = if command == CMD_WRITE { &data } else { &zeroes };
                connection.view[at..at + len].copy_from_slice(bytes);
                if flags & CMD_FLAG_FUA == 0 {
                    connection.dirty.extend(sectors);
                    connection.has_unflushed |= command != CMD_TRIM;
                } else {
                    current[at..at + len].copy_from_slice(bytes);
                    stable[at..at + len].copy_from_slice(bytes);
                    connection.dirty.retain(|sector| !sectors.contains(sector));
                    if self.can_multi_conn {
                        state.show(&sectors.collect());
                    }
                }
            }
            CMD_FLUSH => {
                let written = state.write_cache_of(number);
                state.stable = state.current.clone();
                if self.can_multi_conn {
                    state.show(&written);
                }
            }
            _ => error = EINVAL,
        }
        drop(state);
        if command != CMD_READ || error != 0 {
            data.clear();
        }
        socket.write_all(&[&REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie, &data].concat())?;
        Ok(true)
    }
}

impl State {
    /// Writes the write cache of a connection to the contents that new connections see. Returns its sectors.
    fn write_cache_of(&mut self, number: u64) -> BTreeSet<usize> {
        let Some(connection) = self.connections.get_mut(&number) else { return BTreeSet::new() };
        let dirty = std::mem::take(&mut connection.dirty);
        connection.has_unflushed = false;
        for sector in &dirty {
            let bytes = sector * SECTOR..(sector + 1) * SECTOR;
            self.current[bytes.clone()].copy_from_slice(&connection.view[bytes]);
        }
        dirty
    }

    /// Shows these sectors to all connections that have not written to them.
    fn show(&mut self, sectors: &BTreeSet<usize>) {
        for connection in self.connections.values_mut() {
            for sector in sectors.difference(&connection.dirty) {
                let bytes = sector * SECTOR..(sector + 1) * SECTOR;
                connection.view[bytes.clone()].copy_from_slice(&self.current[bytes]);
            }
        }
    }
}

fn read<const N: usize>(socket: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Returns the answer to an option.
fn answer(option: u32, kind: u32, body: &[u8]) -> Vec<u8> {
    let (magic, len) = (OPTION_REPLY_MAGIC, body.len() as u32);
    [&magic.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), body].concat()
}
