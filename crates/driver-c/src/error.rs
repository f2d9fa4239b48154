//! Errors as C sees them.
#![expect(unsafe_code, reason = "a function that C calls by its name")]

use std::cell::Cell;
use std::error::Error as _;
use std::ffi::c_char;
use std::fmt::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use driver::{Error, Failure, Invalid};
use kickless_opener::errno_of;
use rustix::io::Errno;

/// The largest length of a sentence in bytes, with its terminating zero.
const SENTENCE_MAX: usize = 512;

thread_local! {
    /// The result of `kl_last_error`. It needs no constructor and no destructor, so it is valid as long as
    /// its thread runs.
    static LAST: Cell<[u8; SENTENCE_MAX]> = const { Cell::new([0; SENTENCE_MAX]) };
}

/// The error of a call.
#[derive(Debug)]
pub enum Fault {
    /// The named pointer is null.
    Null(&'static str),
    /// The named pointer is not aligned for its type.
    Unaligned(&'static str),
    /// An argument is invalid.
    Argument(&'static str),
    /// A structure sets members that this library does not know.
    TooNew,
    /// A number does not fit into the result of the function.
    Overflow(&'static str),
    /// An error of the driver.
    Driver(Error),
}

impl Fault {
    fn errno(&self) -> Errno {
        match self {
            Self::Null(_) | Self::Unaligned(_) | Self::Argument(_) => Errno::INVAL,
            Self::TooNew => Errno::TOOBIG,
            Self::Overflow(_) => Errno::OVERFLOW,
            Self::Driver(error) => errno(error),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null(name) => write!(f, "{name} is null"),
            Self::Unaligned(name) => write!(f, "{name} is not aligned"),
            Self::Argument(what) => f.write_str(what),
            Self::TooNew => {
                f.write_str("the options set a member that this version of the library does not know")
            }
            Self::Overflow(what) => write!(f, "{what} does not fit into the result"),
            Self::Driver(error) => {
                write!(f, "{error}")?;
                let mut next = error.source();
                while let Some(source) = next {
                    write!(f, ": {source}")?;
                    next = source.source();
                }
                Ok(())
            }
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Driver(error)
    }
}

fn errno(error: &Error) -> Errno {
    match error {
        Error::Connect { source, .. } | Error::Os { source, .. } => {
            errno_of(source).map_or(Errno::IO, Errno::from_raw_os_error)
        }
        Error::Memory(kickless_memory::Error::Mmap { source, .. }) => {
            Errno::from_io_error(source).unwrap_or(Errno::NOMEM)
        }
        Error::Memory(_) => Errno::INVAL,
        Error::NoMemory { .. } => Errno::NOMEM,
        Error::Protocol { .. }
        | Error::WrongAnswer { .. }
        | Error::ConfigTooShort { .. }
        | Error::ConfigField { .. }
        | Error::InvalidUsed { .. }
        | Error::Unpublished { .. }
        | Error::FrameTooShort { .. }
        | Error::FrameBuffers { .. }
        | Error::CommandAnswer { .. }
        | Error::RingError
        | Error::Incompatible { .. } => Errno::PROTO,
        Error::NoAnswer { .. } | Error::CommandTimeout { .. } | Error::Gone { .. } => Errno::TIMEDOUT,
        Error::Refused { .. } | Error::CommandRefused => Errno::REMOTEIO,
        Error::Closed => Errno::CONNRESET,
        Error::OtherDevice { .. } => Errno::PROTOTYPE,
        Error::NotOffered { .. } => Errno::OPNOTSUPP,
        Error::QueueSize { .. } => Errno::INVAL,
        Error::Unplugged | Error::Dead(_) => Errno::NODEV,
        Error::Invalid(Invalid::ReadOnly) => Errno::ROFS,
        Error::Invalid(Invalid::NotOffered { .. }) => Errno::OPNOTSUPP,
        Error::Invalid(_) => Errno::INVAL,
        Error::Full => Errno::AGAIN,
        Error::InCallback => Errno::DEADLK,
        Error::TooManyRegions { .. } => Errno::NOSPC,
        Error::Busy => Errno::BUSY,
        Error::Failed(failure) => failure_errno(*failure),
    }
}

/// Returns the error number of a failed request, for its completion.
pub(crate) fn failure_errno(failure: Failure) -> Errno {
    match failure {
        Failure::Io => Errno::IO,
        Failure::Unsupported => Errno::OPNOTSUPP,
        Failure::NoStatus | Failure::Status(_) => Errno::PROTO,
        Failure::Dead => Errno::NODEV,
    }
}

/// A type that a C function returns.
pub(crate) trait FromErrno {
    fn from_errno(negative: i32) -> Self;
}

impl FromErrno for i32 {
    fn from_errno(negative: i32) -> Self {
        negative
    }
}

impl FromErrno for i64 {
    fn from_errno(negative: i32) -> Self {
        negative.into()
    }
}

/// A function without a result cannot report an error.
impl FromErrno for () {
    fn from_errno(_: i32) -> Self {}
}

/// Runs the body of a C function. Turns errors and panics into a number.
#[inline]
pub(crate) fn guard<T: FromErrno>(body: impl FnOnce() -> Result<T, Fault>) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(fault)) => T::from_errno(tell(&fault, fault.errno())),
        Err(payload) => {
            // Dropping the payload could panic again.
            std::mem::forget(payload);
            T::from_errno(tell(&"the driver failed; its message on standard error says where", Errno::IO))
        }
    }
}

/// Stores the sentence for `kl_last_error`.
#[cold]
fn tell(what: &dyn fmt::Display, errno: Errno) -> i32 {
    let mut sentence = Sentence { bytes: [0; SENTENCE_MAX], len: 0 };
    // A sentence that is too long is cut.
    let _ = write!(sentence, "{what}");
    LAST.set(sentence.bytes);
    -errno.raw_os_error()
}

struct Sentence {
    bytes: [u8; SENTENCE_MAX],
    len: usize,
}

impl Write for Sentence {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The last byte stays zero.
        let room = SENTENCE_MAX - 1 - self.len;
        let len = text.floor_char_boundary(room);
        if let Some(place) = self.bytes.get_mut(self.len..self.len + len) {
            place.copy_from_slice(text.as_bytes().get(..len).unwrap_or_default());
            self.len += len;
        }
        if len < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Returns the error of the calling thread's last failed call, as a sentence without a full stop.
///
/// The string is empty if no call has failed. It is valid until the next failed call of this thread.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub extern "C" fn kl_last_error() -> *const c_char {
    LAST.with(Cell::as_ptr).cast_const().cast()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: a valid string, which is copied before it can change.
        unsafe { CStr::from_ptr(kl_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn every_result_is_a_number() {
        assert_eq!(last(), "");
        assert_eq!(guard(|| Ok(7)), 7);
        let null: i64 = guard(|| Err(Fault::Null("disk")));
        assert_eq!((null, last().as_str()), (-22, "disk is null"));
        let dead = || Error::Dead(std::sync::Arc::new(Error::Unplugged)).into();
        let result: i32 = guard(|| Err(dead()));
        assert_eq!((result, last().as_str()), (-19, "the device is dead: the device was closed"));
        let panicked: i32 = guard(|| panic!("on purpose"));
        assert_eq!(panicked, -5);
        assert!(last().starts_with("the driver failed"));
        let full: i32 = guard(|| Err(Error::Full.into()));
        assert_eq!(full, -11);
        // Another thread has its own sentence.
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
    }

    #[test]
    fn a_long_sentence_is_cut() {
        let path = "ä".repeat(SENTENCE_MAX).into();
        let source = std::io::Error::from_raw_os_error(2);
        let result: i32 = guard(|| Err(Error::Connect { path, source }.into()));
        assert_eq!(result, -2);
        assert!(last().len() >= SENTENCE_MAX - 2 && last().ends_with('ä'));
    }
}
