//! The errors of a capture.

use std::io;
use std::path::PathBuf;

/// The reason for which a capture does not begin or end. Each is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file cannot be created.
    #[error("{} cannot be written", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The path is that of something else than a file.
    #[error("{} is no regular file", path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
    },
    /// The path is that of a symbolic link. A capture does not follow it.
    #[error("{} is a symbolic link: name the file itself", path.display())]
    Link {
        /// The path.
        path: PathBuf,
    },
    /// The file has other contents.
    #[error("{} exists and is no earlier capture: choose another name", path.display())]
    Other {
        /// The file.
        path: PathBuf,
    },
    /// Another capture writes the file.
    #[error("{} belongs to another capture that is running", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The process cannot have another thread.
    #[error("no thread can be started to write the file")]
    Thread(#[source] io::Error),
    /// The thread of the file is in a write, while the capture is to pass to another process.
    #[error("the capture file is still being written: try again later, or end the capture")]
    Unfinished,
    /// The state of the other process is not valid.
    #[error("the capture cannot be taken over: {0}")]
    Given(#[source] kickless_handover::Error),
    /// The thread of the earlier file is in a write.
    #[error("the file before is still being written: try again later")]
    Busy,
}
