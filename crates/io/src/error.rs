//! What can be wrong with an engine.

use std::io;

/// Why an engine cannot be had, or cannot take a file. The host is to blame for each.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step of setting io_uring up, or of trying it.
    #[error("io_uring cannot be used: {step}: {source}")]
    Uring {
        /// Which step.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No thread could be started, or no eventfd made.
    #[error("the I/O threads cannot be started: {0}")]
    Threads(#[source] io::Error),
}
