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
    /// The kernel refused a step of setting Linux AIO up, or of trying it. "Resource temporarily unavailable" from `io_setup`
    /// is the limit of the whole system.
    #[error("Linux AIO cannot be used: {step}: {source}{}", limit(source))]
    Aio {
        /// Which step.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Two engines cannot be had.
    #[error("{0}; {1}")]
    Neither(Box<Error>, Box<Error>),
    /// No thread could be started, or no eventfd made.
    #[error("the I/O threads cannot be started: {0}")]
    Threads(#[source] io::Error),
}

/// What the kernel does not say.
fn limit(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::WouldBlock => " (the system has no more AIO contexts; fs.aio-max-nr is the limit)",
        _ => "",
    }
}
