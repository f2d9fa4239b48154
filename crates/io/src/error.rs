//! Errors of engines.

use std::io;

/// The reason for which an engine is not available, or cannot take a file. Each is a fault of the host.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step of setting io_uring up, or of trying it.
    #[error("io_uring cannot be used: {step}: {source}")]
    Uring {
        /// The step.
        step: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a step of setting Linux AIO up, or of trying it. "Resource temporarily unavailable"
    /// from `io_setup` is the limit of the whole system.
    #[error("Linux AIO cannot be used: {step}: {source}{}", limit(source))]
    Aio {
        /// The step.
        step: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Neither of two engines is available.
    #[error("{0}; {1}")]
    Neither(Box<Error>, Box<Error>),
    /// No thread could be started, or no eventfd made.
    #[error("the I/O threads cannot be started: {0}")]
    Threads(#[source] io::Error),
}

/// Returns an explanation that the kernel's error lacks.
fn limit(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::WouldBlock => " (the system has no more AIO contexts; fs.aio-max-nr is the limit)",
        _ => "",
    }
}
