//! Tries operations of a ring that engines do not use, for tests. Release builds do not have this module.
#![expect(unsafe_code, reason = "island: operations that no engine makes")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;

use io_uring::register::Restriction;
use io_uring::{opcode, squeue, types};
use rustix::event::epoll;
use rustix::fs::{MemfdFlags, memfd_create};

use super::Uring;
use crate::{EngineKind, EngineOptions, Error};

#[cfg(not(debug_assertions))]
compile_error!("only tests make these operations");

/// A ring as each worker has one. It belongs to the thread that makes the first try.
#[derive(Debug)]
pub struct Ring {
    of_engine: Uring,
    /// An empty file in memory.
    file: OwnedFd,
}

/// An operation.
type MakeEntry = fn(types::Fd) -> squeue::Entry;
/// A call of `io_uring_register`.
type Register = fn(&Ring, RawFd) -> io::Result<()>;

/// Operations that an engine makes, and others. None has memory.
const OPERATIONS: &[(&str, MakeEntry)] = &[
    ("ring:read", |file| opcode::Read::new(file, ptr::null_mut(), 0).build()),
    ("ring:nop", |_| opcode::Nop::new().build()),
    ("ring:openat", |_| opcode::OpenAt::new(HERE, PATH).flags(libc::O_RDONLY).build()),
    ("ring:openat2", |_| opcode::OpenAt2::new(HERE, PATH, ptr::null()).build()),
    ("ring:statx", |_| opcode::Statx::new(HERE, PATH, ptr::null_mut()).build()),
    ("ring:unlinkat", |_| opcode::UnlinkAt::new(HERE, PATH).build()),
    ("ring:renameat", |_| opcode::RenameAt::new(HERE, PATH, HERE, PATH).build()),
    ("ring:mkdirat", |_| opcode::MkDirAt::new(HERE, PATH).build()),
    ("ring:socket", |_| opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build()),
    ("ring:connect", |file| opcode::Connect::new(file, ptr::null(), 0).build()),
    ("ring:accept", |file| opcode::Accept::new(file, ptr::null_mut(), ptr::null_mut()).build()),
    ("ring:sendmsg", |file| opcode::SendMsg::new(file, ptr::null()).build()),
    ("ring:recvmsg", |file| opcode::RecvMsg::new(file, ptr::null_mut()).build()),
    ("ring:close", |_| opcode::Close::new(types::Fd(-1)).build()),
    ("ring:splice", |file| opcode::Splice::new(file, -1, file, -1, 0).build()),
    ("ring:epoll-ctl", |file| opcode::EpollCtl::new(file, file, 0, ptr::null()).build()),
    ("ring:message", |file| opcode::MsgRingData::new(file, 0, 0, None).build()),
    ("ring:command", |file| opcode::UringCmd16::new(file, 0).build()),
    ("ring:provide-buffers", |_| opcode::ProvideBuffers::new(ptr::null_mut(), 0, 1, 0, 0).build()),
    ("ring:files-update", |_| opcode::FilesUpdate::new(ptr::null(), 0).build()),
    ("ring:linked-read", |file| {
        opcode::Read::new(file, ptr::null_mut(), 0).build().flags(squeue::Flags::IO_LINK)
    }),
    ("ring:async-read", |file| {
        opcode::Read::new(file, ptr::null_mut(), 0).build().flags(squeue::Flags::ASYNC)
    }),
];

/// Resources and rights that a ring can get.
const REGISTERS: &[(&str, Register)] = &[
    ("ring:register-files", |ring, fd| ring.of_engine.ring.submitter().register_files(&[fd])),
    ("ring:register-eventfd", |ring, fd| ring.of_engine.ring.submitter().register_eventfd(fd)),
    ("ring:register-personality", |ring, _| ring.of_engine.ring.submitter().register_personality().map(drop)),
    ("ring:register-restrictions", |ring, _| {
        let mut more = [Restriction::sqe_op(opcode::OpenAt::CODE)];
        ring.of_engine.ring.submitter().register_restrictions(&mut more)
    }),
    // SAFETY: there is no buffer.
    ("ring:register-buffers", |ring, _| unsafe { ring.of_engine.ring.submitter().register_buffers(&[]) }),
    ("ring:update-files", |ring, fd| {
        ring.of_engine.ring.submitter().register_files_update(0, &[fd]).map(drop)
    }),
];

const HERE: types::Fd = types::Fd(libc::AT_FDCWD);
const PATH: *const libc::c_char = c"/dev/null".as_ptr();

impl Ring {
    /// Makes a ring.
    ///
    /// # Errors
    /// The host has no io_uring, or refuses it.
    pub fn new() -> Result<Self, Error> {
        let failed = |source: rustix::io::Errno| Error::Uring { step: "descriptors", source: source.into() };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let of_engine = Uring::open(&EngineOptions::new(EngineKind::Uring, 8), &epoll)?;
        let file = memfd_create("attack", MemfdFlags::CLOEXEC).map_err(failed)?;
        Ok(Self { of_engine, file })
    }

    /// Makes the operation with this name. Returns its result or its error number, or `None` if there is no
    /// such operation.
    pub fn attempt(&mut self, name: &str) -> Option<Result<i64, i32>> {
        let number = |error: io::Error| error.raw_os_error().unwrap_or(0);
        if !self.of_engine.enabled {
            // Only a disabled ring can be enabled.
            let enabled = self.of_engine.ring.submitter().register_enable_rings();
            self.of_engine.enabled = enabled.is_ok();
        }
        let fd = self.file.as_raw_fd();
        if let Some((_, register)) = REGISTERS.iter().find(|(known, _)| *known == name) {
            return Some(register(self, fd).map(|()| 0).map_err(number));
        }
        let (_, entry) = OPERATIONS.iter().find(|(known, _)| *known == name)?;
        Some(self.result(&entry(types::Fd(fd))).map_err(number))
    }

    fn result(&mut self, entry: &squeue::Entry) -> io::Result<i64> {
        let ring = &mut self.of_engine.ring;
        // SAFETY: no operation has memory, and its path is there as long as the process.
        // SAFETY: the descriptor is open as long as the ring.
        let pushed = unsafe { ring.submission().push(entry) };
        pushed.map_err(|_| io::Error::from(io::ErrorKind::StorageFull))?;
        ring.submit_and_wait(1)?;
        let done = ring.completion().next().ok_or(io::ErrorKind::UnexpectedEof)?;
        match done.result() {
            errno @ ..0 => Err(io::Error::from_raw_os_error(-errno)),
            result => Ok(result.into()),
        }
    }
}

/// Returns the names of all operations.
pub fn names() -> impl Iterator<Item = &'static str> {
    OPERATIONS.iter().map(|(name, _)| *name).chain(REGISTERS.iter().map(|(name, _)| *name))
}
