//! The socket that `--fd` names.

use std::fs;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use kickless_daemon::Endpoint;
use rustix::io::{FdFlags, fcntl_setfd};

/// Takes over the socket that was inherited under the number `fd`. Must be called before any other descriptor is opened.
///
/// # Errors
/// It is no socket that front-ends could come from; one sentence that names the option.
pub(crate) fn endpoint(fd: i32) -> Result<Endpoint> {
    let inherited = take_over(fd).and_then(|socket| Ok(Endpoint::inherited(socket)?));
    inherited.with_context(|| format!("--fd={fd}"))
}

/// Takes possession of a descriptor that was inherited under the number `fd`.
#[expect(unsafe_code, reason = "only the command line knows whose the number is")]
fn take_over(fd: i32) -> Result<OwnedFd> {
    ensure!(
        fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok(),
        "no descriptor with that number was passed on to us"
    );
    // SAFETY:
    // - open: it was a moment ago, and the only other thread that runs yet, the log's, closes nothing;
    // - ours alone: whoever started us gave it to us by this number, and called once, before this program has opened a
    //   descriptor that it keeps, no other owner of the number exists.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl_setfd(socket.as_fd(), FdFlags::CLOEXEC)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_not_passed_on() {
        let refused = endpoint(999_999).unwrap_err();
        assert!(format!("{refused:#}").contains("--fd=999999"));
    }
}
