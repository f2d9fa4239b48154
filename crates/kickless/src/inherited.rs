//! The inherited socket of `--fd`, and the descriptors that options of devices name by their numbers.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, anyhow, ensure};
use kickless_daemon::Endpoint;
use kickless_opener::Descriptors;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::service::Service;

/// Takes ownership of the inherited socket with the number `fd`. Must be called before the process opens any
/// other descriptor.
///
/// # Errors
/// The descriptor is not a socket for front-ends. The error is one sentence that names the option.
pub(crate) fn endpoint(fd: i32) -> Result<Endpoint> {
    let inherited = adopt(fd).and_then(|socket| Ok(Endpoint::inherited(socket)?));
    inherited.with_context(|| format!("--fd={fd}"))
}

/// Takes ownership of the inherited descriptors that are sent with a call, by their names. Must be called
/// before the process opens any other descriptor.
///
/// # Errors
/// A number was not inherited, or is named twice. The error is one sentence that names the option.
pub(crate) fn given(fds: &[(String, i32)]) -> Result<Vec<(String, OwnedFd)>> {
    let mut given: Vec<(String, OwnedFd)> = Vec::new();
    for (at, (name, fd)) in fds.iter().enumerate() {
        let is_taken = fds[..at].iter().any(|(other, number)| other == name || number == fd);
        let adopted = if is_taken { Err(anyhow!("it is given twice")) } else { adopt(*fd) };
        given.push((name.clone(), adopted.with_context(|| format!("--fd={name}={fd}"))?));
    }
    Ok(given)
}

/// Takes ownership of the descriptors that the options of devices name by their numbers. Must be called
/// before the process opens any other descriptor, except for [`endpoint`].
///
/// # Errors
/// A number was not inherited, or is named twice. The error is one sentence that names the option.
pub(crate) fn of_devices(service: &Service) -> Result<Descriptors> {
    let mut fds: BTreeMap<i32, OwnedFd> = BTreeMap::new();
    for device in &service.devices {
        for (option, fd) in device.kind.inherited() {
            let is_taken = service.fd == Some(fd) || fds.contains_key(&fd);
            let adopted = if is_taken { Err(anyhow!("descriptor {fd} is named twice")) } else { adopt(fd) };
            fds.insert(fd, adopted.with_context(|| device.option(service.notation, option))?);
        }
    }
    Ok(fds.into_iter().map(|(number, fd)| (number.to_string(), fd)).collect())
}

/// Takes ownership of the inherited descriptor with the number `fd`.
#[expect(unsafe_code, reason = "only the command line tells who owns the number")]
#[expect(clippy::disallowed_methods, reason = "a number belongs to this process")]
fn adopt(fd: i32) -> Result<OwnedFd> {
    ensure!(
        fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok(),
        "the program inherited no descriptor {fd}"
    );
    // SAFETY:
    // - The descriptor is open: the check above found it, and the only other running thread, that of the log,
    //   closes nothing.
    // - It has no other owner: the parent process passed it under this number. This function is called once
    //   for each number, before this program opens a descriptor that it keeps.
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
