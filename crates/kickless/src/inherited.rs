//! The inherited socket of `--fd`.

use std::fs;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use kickless_daemon::Endpoint;
use rustix::io::{FdFlags, fcntl_setfd};

/// Takes ownership of the inherited socket with the number `fd`. Must be called before the process opens any
/// other descriptor.
///
/// # Errors
/// The descriptor is not a socket for front-ends. The error is one sentence that names the option.
pub(crate) fn endpoint(fd: i32) -> Result<Endpoint> {
    let inherited = adopt(fd).and_then(|socket| Ok(Endpoint::inherited(socket)?));
    inherited.with_context(|| format!("--fd={fd}"))
}

/// Takes ownership of the inherited descriptor with the number `fd`.
#[expect(unsafe_code, reason = "only the command line tells who owns the number")]
fn adopt(fd: i32) -> Result<OwnedFd> {
    ensure!(
        fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok(),
        "the program inherited no descriptor with that number"
    );
    // SAFETY:
    // - The descriptor is open: the check above found it, and the only other running thread, that of the log,
    //   closes nothing.
    // - It has no other owner: the parent process passed it under this number. This function is called once,
    //   before this program opens a descriptor that it keeps.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl_setfd(socket.as_fd(), FdFlags::CLOEXEC)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_not_inherited_is_refused() {
        let refused = endpoint(999_999).unwrap_err();
        assert!(format!("{refused:#}").contains("--fd=999999"));
    }
}
