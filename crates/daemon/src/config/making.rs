//! The things that a kind makes a device with, and the error of a device that cannot be made.

use std::cell::RefCell;
use std::error::Error;
use std::fmt;

use kickless_device::Handed;
use kickless_opener::Descriptors;

/// The things with which a kind makes a device.
pub struct Making<'m> {
    /// The name of the device, if it has one.
    pub name: Option<&'m str>,
    /// The largest size of a queue.
    pub queue_size_max: u16,
    /// The descriptors that came with the call, by the names that options have for them.
    pub given: &'m Descriptors,
    /// The descriptors that the program inherited for devices ([`Kind::inherited`](crate::Kind::inherited)),
    /// by their numbers.
    pub inherited: &'m Descriptors,
    /// The device as the process gives it that this one takes over from. The kind takes it out. `None` for a
    /// device that is new.
    pub handed: RefCell<Option<Handed<'m>>>,
}

/// The error of a configuration that no device can be made from.
#[derive(Debug)]
pub struct MakeError {
    /// The option to change.
    pub option: &'static str,
    /// The reason.
    pub source: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for MakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for MakeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}
