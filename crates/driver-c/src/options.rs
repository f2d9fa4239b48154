//! What a disk is opened with, in C.
#![expect(unsafe_code, reason = "C's structure has a length of its own")]

use std::ffi::{CStr, OsStr, c_char};
use std::mem::{MaybeUninit, offset_of};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::time::Duration;

use driver::{Choice, Waiting};

use crate::error::Fault;
use crate::pointer;

/// The driver decides: a feature is used where the back-end offers it, in-order completion is not.
pub const KL_AUTO: u32 = 0;
/// The feature is insisted on: without it the disk cannot be opened.
pub const KL_ON: u32 = 1;
/// The feature is not used.
pub const KL_OFF: u32 = 2;

/// More than these structures will ever have: a length that was not set is found out.
const SIZE_MAX: usize = 4096;

/// How to reach a disk, and how to use it. Whatever is 0 has its default; so fill it like this:
///
///     kl_options options = {.size = sizeof options, .socket = path};
#[repr(C)]
pub struct Options {
    /// `sizeof(kl_options)`: with it a program and a library of different versions know what the other one has.
    pub size: usize,
    /// The back-end's unix socket.
    pub socket: *const c_char,
    /// Bytes of shared memory for kl_buffer_alloc and for copies. Default: 64 MiB. It costs nothing before it is used, except
    /// as huge pages.
    pub buffer_memory: u64,
    /// For how many milliseconds to go on trying when the back-end has closed the connection; -1 for not at all.
    /// Default: 30 s.
    pub reconnect_limit_ms: i64,
    /// For how many milliseconds to wait for somebody to listen on the socket. Default: not at all.
    pub connect_timeout_ms: i64,
    /// For how many milliseconds to wait for the answer to a message. Default: 10 s.
    pub reply_timeout_ms: i64,
    /// For how many microseconds a thread that waits looks at the ring before it sleeps; -1: it never sleeps. Default:
    /// for a few, as long as that pays, that is while the device mostly answers within them.
    pub spin_us: i64,
    /// Queues, never more than the back-end offers. Default: as many as the process has CPUs.
    pub queues: u32,
    /// Descriptors in each queue, a power of two up to 32768; the most requests in flight, for the most part. Default: 256.
    pub queue_size: u32,
    /// KL_AUTO, KL_ON or KL_OFF: the packed ring instead of the split one.
    pub packed: u32,
    /// KL_AUTO, KL_ON or KL_OFF: event indices.
    pub event_idx: u32,
    /// KL_AUTO, KL_ON or KL_OFF: indirect descriptors, so that each request takes one descriptor of the ring.
    pub indirect: u32,
    /// KL_AUTO, KL_ON or KL_OFF: requests complete in the order of their submission.
    pub in_order: u32,
    /// 1: share huge pages (2 MiB, which the system must have set aside).
    pub huge_pages: u32,
    /// 0.
    pub reserved: u32,
}

impl Options {
    /// Takes over what C has set.
    ///
    /// # Safety
    /// `options` is null or points to a structure that has as many bytes as its first member says, and its socket is null
    /// or a string.
    pub(crate) unsafe fn read(options: *const Self) -> Result<driver::Options, Fault> {
        // SAFETY: the first member is there, whatever version the caller has.
        let size = *unsafe { pointer::reference(options.cast::<usize>(), "options")? };
        if !(offset_of!(Self, buffer_memory)..=SIZE_MAX).contains(&size) {
            return Err(Fault::Argument("options.size is not sizeof(kl_options)"));
        }
        // SAFETY: as many bytes as the caller says it has.
        let bytes = unsafe { pointer::array(options.cast::<u8>(), size, "options")? };
        let known = bytes.len().min(size_of::<Self>());
        if bytes.iter().skip(known).any(|byte| *byte != 0) {
            return Err(Fault::TooNew);
        }
        let mut copy = MaybeUninit::<Self>::zeroed();
        // SAFETY:
        // * `known` bytes are in both.
        // * The copy is ours alone, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), copy.as_mut_ptr().cast(), known) };
        // SAFETY: numbers and a pointer, which any bytes are, and all of them were written.
        let copy = unsafe { copy.assume_init() };
        // SAFETY: the caller's promise.
        unsafe { copy.convert() }
    }

    /// # Safety
    /// The socket is null or a string.
    unsafe fn convert(&self) -> Result<driver::Options, Fault> {
        if self.socket.is_null() {
            return Err(Fault::Null("options.socket"));
        }
        // SAFETY: a string, by the caller's promise.
        let socket = unsafe { CStr::from_ptr(self.socket) };
        let defaults = driver::Options::new(OsStr::from_bytes(socket.to_bytes()));
        let number = |value: u32, default: u16| match value {
            0 => Ok(default),
            value => u16::try_from(value)
                .map_err(|_| Fault::Argument("options.queues or .queue_size is too large")),
        };
        if self.reserved != 0 || self.huge_pages > 1 {
            return Err(Fault::Argument(
                "options.huge_pages or .reserved is none of the values that it can have",
            ));
        }
        Ok(driver::Options {
            queues: number(self.queues, defaults.queues)?,
            queue_size: number(self.queue_size, defaults.queue_size)?,
            packed: choice(self.packed, defaults.packed)?,
            event_idx: choice(self.event_idx, defaults.event_idx)?,
            indirect: choice(self.indirect, defaults.indirect)?,
            in_order: choice(self.in_order, defaults.in_order)?,
            huge_pages: self.huge_pages == 1,
            buffer_memory: if self.buffer_memory == 0 { defaults.buffer_memory } else { self.buffer_memory },
            reconnect_limit: match self.reconnect_limit_ms {
                -1 => Duration::ZERO,
                limit => milliseconds(limit, defaults.reconnect_limit)?,
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

fn choice(value: u32, default: Choice) -> Result<Choice, Fault> {
    match value {
        KL_AUTO => Ok(default),
        KL_ON => Ok(Choice::On),
        KL_OFF => Ok(Choice::Off),
        _ => Err(Fault::Argument("a feature in the options is neither KL_AUTO nor KL_ON nor KL_OFF")),
    }
}

fn milliseconds(value: i64, default: Duration) -> Result<Duration, Fault> {
    if value == 0 { Ok(default) } else { Ok(Duration::from_millis(positive(value)?)) }
}

fn positive(value: i64) -> Result<u64, Fault> {
    u64::try_from(value).map_err(|_| Fault::Argument("a time in the options is negative"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Options {
        // SAFETY: numbers and a pointer, which zeroes are.
        let options: Options = unsafe { MaybeUninit::zeroed().assume_init() };
        Options { size: size_of::<Options>(), socket: c"/s".as_ptr(), ..options }
    }

    fn read(options: &Options) -> Result<driver::Options, Fault> {
        // SAFETY: as long as it says, or refused for what it says.
        unsafe { Options::read(options) }
    }

    #[test]
    fn zeroes_are_the_defaults() {
        let (read, defaults) = (read(&empty()).unwrap(), driver::Options::new("/s"));
        assert_eq!(format!("{read:?}"), format!("{defaults:?}"));
    }

    #[test]
    fn what_is_set_counts() {
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
    fn what_cannot_be_is_refused() {
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
        // A newer one has more.
        #[repr(C)]
        struct New {
            known: Options,
            more: [u64; 2],
        }
        let size = size_of::<New>();
        for (more, ok) in [([0, 0], true), ([0, 1], false)] {
            let new = New { known: Options { size, ..empty() }, more };
            // SAFETY: as long as it says.
            let read = unsafe { Options::read(ptr::from_ref(&new).cast()) };
            assert_eq!(read.is_ok(), ok);
            assert_eq!(matches!(read, Err(Fault::TooNew)), !ok);
        }
    }
}
