//! The options of a disk, in C.
#![expect(unsafe_code, reason = "C's structure has a length of its own")]

use std::ffi::{CStr, OsStr, c_char};
use std::mem::{MaybeUninit, offset_of};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::time::Duration;

use driver::{Choice, Waiting};

use crate::error::Fault;
use crate::pointer;

/// Let the driver decide: it uses a feature that the back-end offers, except in-order completion.
pub const KL_AUTO: u32 = 0;
/// Require the feature: without it, the disk cannot be opened.
pub const KL_ON: u32 = 1;
/// Do not use the feature.
pub const KL_OFF: u32 = 2;

/// A length that these structures will never reach. It helps to detect a length that was not set.
const SIZE_MAX: usize = 4096;

/// The options for the connection to a disk and its use. A member that is 0 has its default, so fill it like
/// this:
///
///     kl_options options = {.size = sizeof options, .socket = path};
#[repr(C)]
pub struct Options {
    /// `sizeof(kl_options)`. It tells the library which members the program knows, if their versions differ.
    pub size: usize,
    /// The unix socket of the back-end.
    pub socket: *const c_char,
    /// The bytes of shared memory for kl_buffer_alloc and for copies. Default: 64 MiB. It costs nothing
    /// before its first use, except with huge pages.
    pub buffer_memory: u64,
    /// The milliseconds to try to reconnect after the back-end has closed the connection; -1 means not at
    /// all. Default: 30 s.
    pub reconnect_limit_ms: i64,
    /// The milliseconds to wait for a listener on the socket. Default: do not wait.
    pub connect_timeout_ms: i64,
    /// The milliseconds to wait for the reply to a message. Default: 10 s.
    pub reply_timeout_ms: i64,
    /// The microseconds that a waiting thread polls the ring before it sleeps; -1 means never to sleep.
    /// Default: a few, unless the device is mostly slower than that.
    pub spin_us: i64,
    /// The number of queues, at most as many as the back-end offers. Default: one for each CPU of the
    /// process.
    pub queues: u32,
    /// The number of descriptors in each queue, a power of two up to 32768. It usually is the largest number
    /// of requests in flight. Default: 256.
    pub queue_size: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use the packed ring instead of the split one.
    pub packed: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use event indices.
    pub event_idx: u32,
    /// KL_AUTO, KL_ON or KL_OFF: use indirect descriptors, so that each request takes one descriptor of the
    /// ring.
    pub indirect: u32,
    /// KL_AUTO, KL_ON or KL_OFF: complete requests in the order of their submission.
    pub in_order: u32,
    /// 1: use huge pages of 2 MiB, which must be reserved on the host.
    pub huge_pages: u32,
    /// Must be 0.
    pub reserved: u32,
}

impl Options {
    /// Copies the options from C.
    ///
    /// # Safety
    /// `options` is null, or points to a structure with as many bytes as its first member says. Its socket is
    /// null or a string.
    pub(crate) unsafe fn read(options: *const Self) -> Result<driver::Options, Fault> {
        // SAFETY: every version of the structure has the first member.
        let size = *unsafe { pointer::reference(options.cast::<usize>(), "options")? };
        if !(offset_of!(Self, buffer_memory)..=SIZE_MAX).contains(&size) {
            return Err(Fault::Argument("options.size is not sizeof(kl_options)"));
        }
        // SAFETY: the structure has as many bytes as the caller says.
        let bytes = unsafe { pointer::array(options.cast::<u8>(), size, "options")? };
        let known = bytes.len().min(size_of::<Self>());
        if bytes.iter().skip(known).any(|byte| *byte != 0) {
            return Err(Fault::TooNew);
        }
        // The members that the caller does not know are zero.
        let mut copy = MaybeUninit::<Self>::zeroed();
        // SAFETY:
        // * both have `known` bytes;
        // * the copy is a new object, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), copy.as_mut_ptr().cast(), known) };
        // SAFETY:
        // * all bytes were written, and the members are numbers and a pointer, for which any bytes are valid;
        // * the caller's promise.
        unsafe { copy.assume_init_ref().convert() }
    }

    /// Converts the options to those of the driver.
    ///
    /// # Safety
    /// The socket is null or a string.
    unsafe fn convert(&self) -> Result<driver::Options, Fault> {
        // SAFETY: the caller's promise. The path is copied before this function returns.
        let defaults = driver::Options::new(unsafe { socket(self.socket)? });
        Ok(driver::Options {
            queues: number(self.queues, defaults.queues)?,
            queue_size: number(self.queue_size, defaults.queue_size)?,
            packed: choice(self.packed, defaults.packed)?,
            event_idx: choice(self.event_idx, defaults.event_idx)?,
            indirect: choice(self.indirect, defaults.indirect)?,
            in_order: choice(self.in_order, defaults.in_order)?,
            huge_pages: huge_pages(self.huge_pages, self.reserved)?,
            buffer_memory: if self.buffer_memory == 0 { defaults.buffer_memory } else { self.buffer_memory },
            reconnect_limit: match self.reconnect_limit_ms {
                -1 => Duration::ZERO,
                time => milliseconds(time, defaults.reconnect_limit)?,
            },
            connect_timeout: milliseconds(self.connect_timeout_ms, defaults.connect_timeout)?,
            reply_timeout: milliseconds(self.reply_timeout_ms, defaults.reply_timeout)?,
            waiting: match self.spin_us {
                0 => defaults.waiting,
                -1 => Waiting::Spin(Duration::MAX),
                time => Waiting::Spin(Duration::from_micros(positive(time)?)),
            },
            ..defaults
        })
    }
}

/// Returns the path of the socket.
///
/// # Safety
/// `socket` is null, or a string that stays where and as it is for `'a`.
unsafe fn socket<'a>(socket: *const c_char) -> Result<&'a OsStr, Fault> {
    if socket.is_null() {
        return Err(Fault::Null("options.socket"));
    }
    // SAFETY: not null, so it is a string, which does not change for `'a`, by the caller's promise.
    Ok(OsStr::from_bytes(unsafe { CStr::from_ptr(socket) }.to_bytes()))
}

/// Returns a number of queues or descriptors.
fn number(value: u32, default: u16) -> Result<u16, Fault> {
    let too_large = |_| Fault::Argument("options.queues or .queue_size is too large");
    if value == 0 { Ok(default) } else { u16::try_from(value).map_err(too_large) }
}

/// Returns whether to use huge pages, and checks the reserved member behind.
fn huge_pages(value: u32, reserved: u32) -> Result<bool, Fault> {
    match (value, reserved) {
        (0 | 1, 0) => Ok(value == 1),
        _ => Err(Fault::Argument("options.huge_pages must be 0 or 1, and .reserved 0")),
    }
}

/// Returns the choice about a feature.
fn choice(value: u32, default: Choice) -> Result<Choice, Fault> {
    match value {
        KL_AUTO => Ok(default),
        KL_ON => Ok(Choice::On),
        KL_OFF => Ok(Choice::Off),
        _ => Err(Fault::Argument("a feature in the options is neither KL_AUTO nor KL_ON nor KL_OFF")),
    }
}

/// Returns a time of this many milliseconds, or the default for 0.
fn milliseconds(value: i64, default: Duration) -> Result<Duration, Fault> {
    if value == 0 { Ok(default) } else { Ok(Duration::from_millis(positive(value)?)) }
}

/// Checks that a time is not negative.
fn positive(value: i64) -> Result<u64, Fault> {
    u64::try_from(value).map_err(|_| Fault::Argument("a time in the options is negative"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Options {
        // SAFETY: the members are numbers and a pointer, for which zeroes are valid.
        let options: Options = unsafe { MaybeUninit::zeroed().assume_init() };
        Options { size: size_of::<Options>(), socket: c"/s".as_ptr(), ..options }
    }

    fn read(options: &Options) -> Result<driver::Options, Fault> {
        // SAFETY: the structure is as long as it says, or is refused for its length.
        unsafe { Options::read(options) }
    }

    #[test]
    fn zeroes_are_the_defaults() {
        let (read, defaults) = (read(&empty()).unwrap(), driver::Options::new("/s"));
        assert_eq!(format!("{read:?}"), format!("{defaults:?}"));
    }

    #[test]
    fn members_override_defaults() {
        let set = Options {
            queues: 3,
            queue_size: 64,
            packed: KL_OFF,
            in_order: KL_ON,
            reconnect_limit_ms: -1,
            reply_timeout_ms: 20,
            spin_us: -1,
            ..empty()
        };
        let read = read(&set).unwrap();
        assert_eq!((read.queues, read.queue_size), (3, 64));
        assert_eq!((read.packed, read.in_order, read.indirect), (Choice::Off, Choice::On, Choice::Auto));
        assert_eq!((read.reconnect_limit, read.reply_timeout), (Duration::ZERO, Duration::from_millis(20)));
        assert_eq!(read.waiting, Waiting::Spin(Duration::MAX));
    }

    #[test]
    fn invalid_members_are_refused() {
        for wrong in [
            Options { size: 0, ..empty() },
            Options { size: usize::MAX, ..empty() },
            Options { socket: ptr::null(), ..empty() },
            Options { queues: 65536, ..empty() },
            Options { packed: 3, ..empty() },
            Options { huge_pages: 2, ..empty() },
            Options { reserved: 1, ..empty() },
            Options { spin_us: -2, ..empty() },
            Options { connect_timeout_ms: -1, ..empty() },
        ] {
            assert!(read(&wrong).is_err());
        }
        // SAFETY: null.
        assert!(matches!(unsafe { Options::read(ptr::null()) }, Err(Fault::Null(_))));
    }

    #[test]
    fn versions_differ() {
        // An older program has fewer members.
        let old = Options { size: offset_of!(Options, queues), queues: 9, ..empty() };
        assert_eq!(read(&old).unwrap().queues, 0);
        // A newer program has more members.
        #[repr(C)]
        struct New {
            known: Options,
            more: [u64; 2],
        }
        let size = size_of::<New>();
        for (more, ok) in [([0, 0], true), ([0, 1], false)] {
            let new = New { known: Options { size, ..empty() }, more };
            // SAFETY: the structure is as long as it says.
            let read = unsafe { Options::read(ptr::from_ref(&new).cast()) };
            assert_eq!(read.is_ok(), ok);
            assert_eq!(matches!(read, Err(Fault::TooNew)), !ok);
        }
    }
}
