//! The inherited socket of `--fd`, and the descriptors that options of devices name by their numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{env, fs, process};

use anyhow::{Context, Result, anyhow, ensure};
use kickless_daemon::Endpoint;
use kickless_opener::Descriptors;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

use crate::service::Service;

/// The first number after standard error.
const FIRST: i32 = 3;
/// The numbers that are looked at without /proc: the usual soft limit of descriptors.
const NUMBERS_WITHOUT_PROC: i32 = 1024;

/// The numbers of this process's descriptors at its start, without those of standard input, output and error.
pub(crate) struct Noted(BTreeSet<i32>);

/// Notes the inherited descriptors. Must be called before the process opens any other descriptor.
#[expect(unsafe_code, reason = "a number may be no descriptor")]
#[expect(clippy::disallowed_methods, reason = "numbers belong to this process")]
pub(crate) fn note() -> Noted {
    let listed = fs::read_dir("/proc/self/fd").map(|entries| {
        let names = entries.flatten().map(|entry| entry.file_name());
        names.filter_map(|name| name.to_str()?.parse().ok()).collect::<BTreeSet<i32>>()
    });
    // Without /proc, those that a shell or a service manager passes.
    let listed = listed.unwrap_or_else(|_| (FIRST..NUMBERS_WITHOUT_PROC).collect());
    // SAFETY: the number is not -1. A number that is no descriptor gets an error, and nothing else uses it.
    let is_open = |fd: i32| fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok();
    Noted(listed.into_iter().filter(|&fd| fd >= FIRST && is_open(fd)).collect())
}

impl Noted {
    /// Returns the inherited descriptors. All of them must still be open.
    #[expect(unsafe_code, reason = "only the command line tells who owns a number")]
    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'static>> {
        // SAFETY: the descriptor was open at the start of the process. Nothing has closed it, because the
        // functions below take it only after the helpers are made.
        self.0.iter().map(|&fd| unsafe { BorrowedFd::borrow_raw(fd) }).collect()
    }
}

/// Takes ownership of the descriptors that the service manager has passed, and that `is_wanted` wants by
/// their names. They are not inherited any more.
pub(crate) fn of_manager(noted: &mut Noted, is_wanted: impl Fn(&str) -> bool) -> Vec<OwnedFd> {
    let variable = |name| env::var(name).unwrap_or_default();
    if variable("LISTEN_PID").parse() != Ok(process::id()) {
        return Vec::new();
    }
    let count = variable("LISTEN_FDS").parse().unwrap_or_default();
    let names = variable("LISTEN_FDNAMES");
    let wanted = (FIRST..).zip(names.split(':')).take(count).filter(|(_, name)| is_wanted(name));
    let fds: Vec<_> = wanted.filter_map(|(fd, _)| adopt(noted, fd).ok().map(|owned| (fd, owned))).collect();
    fds.into_iter()
        .map(|(fd, owned)| {
            noted.0.remove(&fd);
            owned
        })
        .collect()
}

/// Takes ownership of the inherited socket with the number `fd`.
///
/// # Errors
/// The descriptor is not a socket for front-ends. The error is one sentence that names the option.
pub(crate) fn endpoint(noted: &Noted, fd: i32) -> Result<Endpoint> {
    let inherited = adopt(noted, fd).and_then(|socket| Ok(Endpoint::inherited(socket)?));
    inherited.with_context(|| format!("--fd={fd}"))
}

/// Takes ownership of the inherited descriptors that are sent with a call, by their names.
///
/// # Errors
/// A number was not inherited, or is named twice. The error is one sentence that names the option.
pub(crate) fn given(noted: &Noted, fds: &[(String, i32)]) -> Result<Vec<(String, OwnedFd)>> {
    let mut given: Vec<(String, OwnedFd)> = Vec::new();
    for (at, (name, fd)) in fds.iter().enumerate() {
        let is_taken = fds[..at].iter().any(|(other, number)| other == name || number == fd);
        let adopted = if is_taken { Err(anyhow!("it is given twice")) } else { adopt(noted, *fd) };
        given.push((name.clone(), adopted.with_context(|| format!("--fd={name}={fd}"))?));
    }
    Ok(given)
}

/// Takes ownership of the descriptors that the options of devices name by their numbers.
///
/// # Errors
/// A number was not inherited, or is named twice. The error is one sentence that names the option.
pub(crate) fn of_devices(noted: &Noted, service: &Service) -> Result<Descriptors> {
    let mut fds: BTreeMap<i32, OwnedFd> = BTreeMap::new();
    for device in &service.devices {
        for (option, fd) in device.kind.inherited() {
            let is_taken = service.fd == Some(fd) || fds.contains_key(&fd);
            let adopted =
                if is_taken { Err(anyhow!("descriptor {fd} is named twice")) } else { adopt(noted, fd) };
            fds.insert(fd, adopted.with_context(|| device.option(service.notation, option))?);
        }
    }
    Ok(fds.into_iter().map(|(number, fd)| (number.to_string(), fd)).collect())
}

/// Takes ownership of the inherited descriptor with the number `fd`.
#[expect(unsafe_code, reason = "only the command line tells who owns the number")]
fn adopt(noted: &Noted, fd: i32) -> Result<OwnedFd> {
    ensure!(noted.0.contains(&fd), "the program inherited no descriptor {fd}");
    // SAFETY:
    // - The descriptor is open: it was at the start of the process, and only its owner closes it.
    // - It has no other owner: the parent process passed it under this number, and this function is called
    //   once for each number.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl_setfd(socket.as_fd(), FdFlags::CLOEXEC)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_not_inherited_is_refused() {
        let refused = endpoint(&note(), 999_999).unwrap_err();
        assert!(format!("{refused:#}").contains("--fd=999999"));
    }
}
