//! Descriptors of every kind, for the messages that take one.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::Result;
use kickless_testing::Random;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use rustix::pipe::pipe;

/// Returns a descriptor of a random kind. `own` is the socket of the session: a back-end that writes to it
/// sends messages to itself.
///
/// # Errors
/// The process is out of descriptors.
pub fn any(random: &mut Random, own: &UnixStream) -> Result<OwnedFd> {
    if random.one_in(16) { Ok(own.try_clone()?.into()) } else { other(random) }
}

/// Returns a descriptor of a random kind that is not the socket of the session. A back-end that reads from
/// that one takes its own answers away, and the walk could not tell that from a hang.
///
/// # Errors
/// The process is out of descriptors.
pub fn other(random: &mut Random) -> Result<OwnedFd> {
    Ok(match random.below(15) {
        0..4 => event()?,
        4 => memfd(4096, None)?,
        5 => memfd(0, None)?,
        6 => memfd(1 << 40, None)?,
        7 => memfd(1 << 20, Some(SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL))?,
        8 => match memfd_create("walk-huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) {
            Ok(file) => {
                let _ = ftruncate(&file, 2 << 20);
                file
            }
            // The kernel has no huge pages.
            Err(_) => event()?,
        },
        9 => pipe()?.0,
        10 => pipe()?.1,
        11 => UnixStream::pair()?.0.into(),
        12 => File::options().read(true).write(true).open("/dev/zero")?.into(),
        13 => File::options().read(true).write(true).open("/dev/null")?.into(),
        _ => match random.below(3) {
            0 => open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
            1 => open("/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?,
            _ => epoll::create(epoll::CreateFlags::CLOEXEC)?,
        },
    })
}

/// Returns an eventfd, mostly one that does not block.
///
/// # Errors
/// The process is out of descriptors.
pub fn event() -> Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn memfd(len: u64, seals: Option<SealFlags>) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("walk", flags)?;
    ftruncate(&file, len)?;
    if let Some(seals) = seals {
        fcntl_add_seals(&file, seals)?;
    }
    Ok(file)
}
