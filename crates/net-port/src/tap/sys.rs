//! The system calls of TAPs: ioctls, and transfers between a TAP and guest memory.
#![expect(unsafe_code, reason = "island: ioctls of TAPs, and lists of buffers for readv and writev")]

use kickless_memory::Iov;
use kickless_spec::net::Header;
use libc::{c_int, c_ulong, iovec};
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::without_provenance_mut;

/// The longest name of an interface, without the byte that ends it.
pub const NAME_MAX: usize = libc::IFNAMSIZ - 1;
/// The most buffers that the kernel takes in one call (`UIO_MAXIOV`).
const PIECES_MAX: usize = 1024;
/// The most segments of credit in one call: all but the header and the rest.
pub(super) const CREDIT_PIECES_MAX: usize = PIECES_MAX - 2;

/// Returns the name and the flags of the interface whose queue `fd` is.
pub(super) fn interface(fd: BorrowedFd<'_>) -> io::Result<(String, c_int)> {
    let mut request = request(0);
    // SAFETY: TUNGETIFF writes an `ifreq`.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF as _, &raw mut request) })?;
    let name = request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8);
    let name = String::from_utf8_lossy(&name.collect::<Vec<u8>>()).into_owned();
    // SAFETY: TUNGETIFF writes the flags, and any bits are flags. The kernel's are unsigned.
    let flags = unsafe { request.ifr_ifru.ifru_flags } as u16;
    Ok((name, flags.into()))
}

/// Returns whether frames have four bytes of packet information in front of their header (no IFF_NO_PI).
///
/// TUNGETIFF does not tell: it reports IFF_NOFILTER as the same bit. So this writes 12 bytes, of which only
/// the first 4 can be read. The kernel reads a header of at least 10 bytes and fails (EFAULT), or it reads 4
/// bytes of packet information and finds no room for a header (EINVAL). No frame comes into being.
pub(super) fn has_packet_information(fd: BorrowedFd<'_>) -> io::Result<bool> {
    /// The length of the packet information.
    const INFORMATION: usize = 4;
    /// An address in the first page, which no process has mapped.
    const NOWHERE: usize = 8;
    let mut readable = [0; INFORMATION];
    let pieces = [
        piece(readable.as_mut_ptr(), INFORMATION),
        piece(without_provenance_mut(NOWHERE), size_of::<Header>() - INFORMATION),
    ];
    // SAFETY: the kernel only reads the buffers, and checks the address of the second one itself.
    let written = unsafe { libc::writev(fd.as_raw_fd(), pieces.as_ptr(), pieces.len() as c_int) };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EFAULT) if written < 0 => Ok(false),
        Some(libc::EINVAL) if written < 0 => Ok(true),
        _ => Err(error),
    }
}

/// Attaches or detaches the queue `fd`.
pub(super) fn attach(fd: BorrowedFd<'_>, is_attached: bool) -> io::Result<()> {
    let mut request = request(if is_attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE });
    // SAFETY: TUNSETQUEUE reads an `ifreq`.
    check_change(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETQUEUE as _, &raw mut request) })
}

/// Chooses the offloads that the readers of this TAP take.
pub(super) fn set_offloads(fd: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes a number.
    check_change(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD as _, c_ulong::from(offloads)) })
}

/// Sets a property of a TAP that is a number, such as TUNSETSNDBUF.
pub(super) fn set_number(fd: BorrowedFd<'_>, property: libc::Ioctl, mut number: c_int) -> io::Result<()> {
    debug_assert!([libc::TUNSETSNDBUF, libc::TUNSETVNETHDRSZ, libc::TUNSETVNETLE].contains(&property));
    // SAFETY: each of these reads an int.
    check_change(unsafe { libc::ioctl(fd.as_raw_fd(), property as _, &raw mut number) })
}

fn request(flags: c_int) -> libc::ifreq {
    // SAFETY: `ifreq` is an array of bytes and a union of plain data, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { zeroed() };
    // The flags of TAPs fit into 16 bits.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    request
}

#[cfg(test)]
thread_local! {
    static CHANGES: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Returns the number of calls of this thread that change a TAP or a queue.
#[cfg(test)]
pub(super) fn changes() -> u32 {
    CHANGES.get()
}

fn check_change(result: c_int) -> io::Result<()> {
    #[cfg(test)]
    CHANGES.set(CHANGES.get() + 1);
    check(result)
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A list of buffers for one system call. Empty between calls, so that no call allocates.
#[derive(Debug)]
pub(super) struct Pieces(Vec<iovec>);

impl Pieces {
    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(PIECES_MAX))
    }

    /// Returns whether a header and this frame are too many pieces for one call.
    pub(super) fn is_too_long(frame: &Iov) -> bool {
        frame.segments().len() >= PIECES_MAX
    }

    /// Writes `header` and then `frame`. Returns the number of bytes.
    ///
    /// # Errors
    /// The kernel refuses the call, also because there are too many pieces ([`Pieces::is_too_long`]).
    pub(super) fn write(&mut self, fd: BorrowedFd<'_>, header: &[u8], frame: Frame<'_>) -> io::Result<usize> {
        self.0.push(piece(header.as_ptr().cast_mut(), header.len()));
        match frame {
            Frame::Guest(iov) if Self::is_too_long(iov) => {
                self.0.clear();
                return Err(io::ErrorKind::InvalidInput.into());
            }
            Frame::Guest(iov) => self.0.extend_from_slice(iov.segments()),
            Frame::Copy(bytes) => self.0.push(piece(bytes.as_ptr().cast_mut(), bytes.len())),
        }
        // SAFETY:
        // - The list has at most `PIECES_MAX` entries, so its length is an int.
        // - The kernel only reads the buffers. `header` and a copy are borrowed for the call, and `iov` keeps
        //   its segments mapped.
        let written = unsafe { libc::writev(fd.as_raw_fd(), self.0.as_ptr(), self.0.len() as c_int) };
        self.0.clear();
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    /// Reads into `header`, then into `credit`, then into `rest`. Returns the number of bytes.
    ///
    /// # Errors
    /// The kernel refuses the call, also because there are too many pieces. With an error other than EAGAIN,
    /// it may have written to `credit`.
    pub(super) fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        header: &mut [u8],
        credit: &mut Iov,
        rest: &mut [u8],
    ) -> io::Result<usize> {
        self.0.push(piece(header.as_mut_ptr(), header.len()));
        if credit.segments().len() > CREDIT_PIECES_MAX {
            self.0.clear();
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.0.extend_from_slice(credit.segments_to_fill());
        self.0.push(piece(rest.as_mut_ptr(), rest.len()));
        // SAFETY:
        // - The list has at most `PIECES_MAX` entries, so its length is an int.
        // - `header` and `rest` are borrowed mutably for the call. `credit` keeps its segments mapped, and
        //   they are shared memory that is only accessed by copies.
        let read = unsafe { libc::readv(fd.as_raw_fd(), self.0.as_ptr(), self.0.len() as c_int) };
        self.0.clear();
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }
}

/// The bytes of a transmitted frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum Frame<'a> {
    /// They are in guest memory.
    Guest(&'a Iov),
    /// They are in memory of the card.
    Copy(&'a [u8]),
}

fn piece(start: *mut u8, len: usize) -> iovec {
    iovec { iov_base: start.cast(), iov_len: len }
}

// SAFETY: the list is empty between calls, so no pointer moves to another thread.
unsafe impl Send for Pieces {}
