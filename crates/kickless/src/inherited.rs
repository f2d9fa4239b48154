//! Inherited descriptors: the socket of `--fd`, sockets of the service manager (LISTEN_FDS), and those that
//! options of devices name by their numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{env, fs, process};

use anyhow::{Context, Result, anyhow, bail, ensure};
use kickless_daemon::{Endpoint, PassedListener, sentence};
use kickless_opener::Descriptors;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

use crate::service::{InheritedSocket, Service};
use crate::wrong_use::WrongUse;

/// The first number after standard error.
pub(crate) const FIRST: i32 = 3;
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

/// Returns the number of descriptors that the service manager has passed to this process, the first of them
/// with the number [`FIRST`].
pub(crate) fn passed_count() -> usize {
    let variable = |name| env::var(name).unwrap_or_default();
    match variable("LISTEN_PID").parse() == Ok(process::id()) {
        true => variable("LISTEN_FDS").parse().unwrap_or_default(),
        false => 0,
    }
}

/// The numbers and the names of descriptors that the service manager has passed.
pub(crate) type Passed = Vec<(i32, String)>;

/// Returns the descriptors that the service manager has passed. All of them must still be open.
///
/// # Errors
/// There are more numbers than descriptors, or than names. The error is one sentence.
pub(crate) fn passed(noted: &Noted) -> Result<Passed> {
    let count = passed_count();
    let numbers: Vec<i32> = (FIRST..).take(count.min(noted.0.len() + 1)).collect();
    if let Some(missing) = numbers.iter().find(|number| !noted.0.contains(number)) {
        bail!("LISTEN_FDS={count}: the program inherited no descriptor {missing}");
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<_> = names.split(':').filter(|_| count > 0).map(str::to_owned).collect();
    ensure!(names.len() == count, "LISTEN_FDNAMES: it has {} names, and LISTEN_FDS={count}", names.len());
    Ok(numbers.into_iter().zip(names).collect())
}

/// Takes ownership of the descriptors of this name that the service manager has passed. They are not
/// inherited any more.
pub(crate) fn of_manager(noted: &mut Noted, passed: &Passed, name: &str) -> Vec<OwnedFd> {
    let numbers = passed.iter().filter(|(_, passed)| passed == name).map(|(fd, _)| *fd);
    numbers.filter_map(|fd| take(noted, fd).ok()).collect()
}

/// Takes ownership of the sockets that the service manager has passed for devices of a configuration file, by
/// the names of the devices. Leaves out descriptors of the name `others`. They are not inherited any more.
///
/// # Errors
/// A descriptor is no socket for front-ends, or no device can have it. The error is one sentence.
pub(crate) fn sockets(
    noted: &mut Noted,
    passed: &Passed,
    service: &Service,
    others: &str,
) -> Result<BTreeMap<String, PassedListener>> {
    let mut sockets = BTreeMap::new();
    for (fd, name) in passed.iter().filter(|(_, name)| name != others) {
        let about = || format!("LISTEN_FDNAMES: {name:?}");
        let device = service.devices.iter().find(|device| device.name() == Some(name));
        let device = device.context(
            "no device of the file has this name: give FileDescriptorName= of the socket unit the name of a device",
        );
        let device = device.with_context(about)?;
        ensure!(!sockets.contains_key(name), "{}: two sockets have this name, and a device has one", about());
        let socket = PassedListener::passed(take(noted, *fd)?).with_context(about)?;
        if let Some(path) = &device.serve.socket_path
            && !socket.has_path(path)
        {
            let own = socket.path().map_or("without a name".into(), |path| path.display().to_string());
            let option = service.place(device.name(), "socket-path");
            bail!(
                "{option}: the service manager passes the socket {own} for it: write that, or leave it out"
            );
        }
        sockets.insert(name.clone(), socket);
    }
    Ok(sockets)
}

/// Takes ownership of an inherited descriptor, which is not inherited any more.
fn take(noted: &mut Noted, fd: i32) -> Result<OwnedFd> {
    let owned = adopt(noted, fd)?;
    noted.0.remove(&fd);
    Ok(owned)
}

/// Takes ownership of an inherited socket.
///
/// # Errors
/// The descriptor is not a socket for front-ends. The error is one sentence that names the option.
pub(crate) fn endpoint(noted: &Noted, of: InheritedSocket) -> Result<Endpoint> {
    let inherited = adopt(noted, of.number()).and_then(|socket| Ok(Endpoint::inherited(socket)?));
    let inherited = inherited.with_context(|| of.to_string());
    inherited.map_err(|error| match of {
        InheritedSocket::Fd(_) => WrongUse::of(sentence(&*error)),
        InheritedSocket::OfManager(_) => error,
    })
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
        let adopted = adopted.with_context(|| format!("--fd={name}={fd}"));
        given.push((name.clone(), adopted.map_err(|error| WrongUse::of(sentence(&*error)))?));
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
            let is_taken = service.fd.is_some_and(|of| of.number() == fd) || fds.contains_key(&fd);
            let adopted =
                if is_taken { Err(anyhow!("descriptor {fd} is named twice")) } else { adopt(noted, fd) };
            fds.insert(
                fd,
                adopted.map_err(|error| service.mistake(device.name(), option, &sentence(&*error)))?,
            );
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
        let refused = endpoint(&note(), InheritedSocket::Fd(999_999)).unwrap_err();
        assert!(format!("{refused:#}").contains("--fd=999999"));
    }
}
