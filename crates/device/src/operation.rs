//! Parameters and results of the operations of a device.

use std::path::Path;

/// The file to which a device writes its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureTo<'a> {
    /// The path of the file.
    pub path: &'a Path,
    /// The name of the device in the file.
    pub device: &'a str,
    /// The most bytes of a frame that the file has.
    pub len_max: u32,
}

/// The error for which a device has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoppedOnError {
    /// The first error, as a part of a sentence.
    pub error: String,
    /// The number of failed requests that the device keeps.
    pub requests: u64,
}

/// The error of something that this kind of device cannot do. It is the end of a sentence that begins with
/// the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub &'static str);
