//! Errors of engines.

use std::io;

use kickless_opener::io_uring_disabled;

/// The step that other rules than those of this program can forbid.
pub(crate) const SETUP: &str = "io_uring_setup";

/// The reason for which an engine is not available, or cannot take a file. Each is a fault of the host.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step of setting io_uring up, or of trying it.
    #[error("io_uring cannot be used: {step}: {source}{}", forbidden(step, source))]
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

/// Returns who forbids io_uring, and how to allow it, if something does.
fn forbidden(step: &str, source: &io::Error) -> String {
    const PROFILE: &str = "the seccomp profile of the container or the unit must allow io_uring_setup, io_uring_enter and io_uring_register";
    match (source.kind(), io_uring_disabled()) {
        _ if step != SETUP => String::new(),
        (io::ErrorKind::PermissionDenied, Some(1)) => {
            " (kernel.io_uring_disabled is 1: set it to 0 with sysctl, or make this user a member of \
             kernel.io_uring_group)"
                .into()
        }
        (io::ErrorKind::PermissionDenied, Some(2..)) => {
            " (kernel.io_uring_disabled is 2: set it to 0 with sysctl)".into()
        }
        (io::ErrorKind::PermissionDenied, _) => format!(" ({PROFILE})"),
        (io::ErrorKind::Unsupported, _) => format!(" (this kernel has none, or {PROFILE})"),
        _ => String::new(),
    }
}

/// Returns an explanation that the kernel's error lacks.
fn limit(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::WouldBlock => " (the system has no more AIO contexts; fs.aio-max-nr is the limit)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_profile_that_forbids_io_uring_is_named() {
        let error = |step, errno: Errno| Error::Uring { step, source: errno.into() }.to_string();
        let hidden = error(SETUP, Errno::NOSYS);
        assert!(hidden.contains("this kernel has none, or the seccomp profile of the container"), "{hidden}");
        let forbidden = error(SETUP, Errno::PERM);
        assert!(
            forbidden.contains("must allow io_uring_setup")
                || forbidden.contains("kernel.io_uring_disabled is"),
            "{forbidden}"
        );
        assert!(!error("epoll", Errno::PERM).contains("seccomp"));
    }
}
