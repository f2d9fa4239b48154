//! Decides which requests are allowed.
//!
//! Nothing here asks the host, so each decision is a function of the things that the operator named, of the
//! entries, and of the request. The sender of the requests may lie in each field.
//!
//! An *entry* has the things that one device needs. A thing gets into an entry if the start or the
//! configuration file names it, or if calls may name it. A request is allowed if an entry has its thing. It
//! belongs to that entry, and each entry has a share of the requests that are carried out at a time. So a
//! file system that never answers holds the share of its own device.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::directory::directory_of;
use crate::grant::{Authority, Calls, PathUse, Target, is_narrow, is_same};
use crate::passt::can_be_in_calls;
use crate::tap::may_have;
use crate::wire::Request;

/// The entry of the control sockets. No request changes it.
const CONTROL: u64 = 0;
/// Twice the devices of a process, because a replacement is entered before the old device leaves, and room.
const ENTRIES_MAX: usize = 1100;
/// The things of one entry.
const TARGETS_MAX: usize = 8;
/// The requests of one entry that are carried out at a time. A device has a few threads that ask; the rest is
/// room for calls.
const SHARE: usize = 16;
/// The requests of all entries that are carried out at a time, beyond one for each entry.
const BEYOND_MAX: usize = 256;
/// The requests without an entry that are carried out at a time.
const COMMON_MAX: usize = 64;
/// All requests that are carried out at a time.
pub(crate) const REQUESTS_MAX: usize = ENTRIES_MAX + BEYOND_MAX + COMMON_MAX;

/// The authority of this process, and its entries.
#[derive(Debug)]
pub(crate) struct State {
    authority: Authority,
    /// The things that the last valid configuration file names.
    file: Vec<Target>,
    entries: BTreeMap<u64, Entry>,
    /// The children, each with the entry that started it.
    children: BTreeMap<u64, u64>,
    /// The requests of entries that are carried out, beyond one for each entry.
    beyond: usize,
    /// The requests without an entry that are carried out.
    common: usize,
}

/// The things that one device needs.
#[derive(Debug)]
struct Entry {
    grants: Vec<Granted>,
    /// The addresses of its servers.
    addresses: Vec<(String, u16, SocketAddr)>,
    /// Its requests that are carried out.
    in_flight: usize,
    /// It is gone when these are over.
    has_left: bool,
}

impl Entry {
    fn of(grants: Vec<Granted>) -> Self {
        Self { grants, addresses: Vec::new(), in_flight: 0, has_left: false }
    }
}

/// A thing of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    target: Target,
    /// The start or the configuration file names it. Otherwise a call does.
    is_named: bool,
    /// The canonical directory of an image that was opened, if it can name backing images.
    directory: Option<PathBuf>,
}

impl Granted {
    fn named(target: Target) -> Self {
        Self { target, is_named: true, directory: None }
    }

    /// Returns a thing that a call names.
    pub(crate) fn by_call(target: Target) -> Self {
        Self { target, is_named: false, directory: None }
    }
}

/// The permission for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Permit {
    /// The entry that the request belongs to.
    pub(crate) entry: Option<u64>,
    /// The directories in which its file may be.
    pub(crate) within: Within,
    /// The permissions and the group of its socket.
    pub(crate) mode: Option<u32>,
    pub(crate) group: Option<String>,
}

/// The directories in which a file may be, after all links are resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Within {
    /// All roots.
    Roots,
    /// The roots for calls.
    CallRoots,
    /// The roots for calls, and these directories, which have images.
    Beside(Vec<PathBuf>),
}

/// The reason for which a request is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// No entry has its thing.
    NotGranted,
    /// The share is used up.
    Busy,
}

/// The reason for which a thing does not get into an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotEntered {
    NotNamed,
    PasstOption,
    Library(String),
}

/// The answer to the question whether a thing may get into an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It may.
    Granted(Granted),
    /// It may, if this path is below a root for calls and this use.
    IfBelow(PathUse, PathBuf),
}

impl State {
    pub(crate) fn new(authority: Authority) -> Self {
        let grants = authority.control.iter().cloned().map(Granted::named).collect();
        let entries = BTreeMap::from([(CONTROL, Entry::of(grants))]);
        Self { authority, file: Vec::new(), entries, children: BTreeMap::new(), beyond: 0, common: 0 }
    }

    /// Takes the things that the configuration file names now.
    pub(crate) fn set_file(&mut self, named: Vec<Target>) {
        self.file = named;
    }

    /// Returns whether a thing may get into an entry.
    ///
    /// # Errors
    /// It may not.
    pub(crate) fn admit(&self, target: &Target) -> Result<Admission, NotEntered> {
        let named = || Ok(Admission::Granted(Granted::named(target.clone())));
        if let Target::Library { name, .. } = target {
            let has_room = self.authority.libraries.contains(name);
            return if has_room { named() } else { Err(NotEntered::Library(name.clone())) };
        }
        if self.authority.named.iter().chain(&self.file).any(|named| named.includes(target)) {
            return named();
        }
        let below = |usage, path: &Path| Ok(Admission::IfBelow(usage, path.to_owned()));
        match (self.authority.calls, target) {
            (Calls::Nothing, _) => Err(NotEntered::NotNamed),
            (_, Target::Image { path, .. }) => below(PathUse::Image, path),
            (_, Target::Capture { path }) => below(PathUse::Capture, path),
            (_, Target::Socket { path, .. }) => below(PathUse::Socket, path),
            (_, Target::Backing) => Ok(Admission::Granted(Granted::by_call(Target::Backing))),
            (Calls::Files, _) => Err(NotEntered::NotNamed),
            (Calls::All, Target::Passt { arguments }) if !can_be_in_calls(arguments) => {
                Err(NotEntered::PasstOption)
            }
            // Servers of the host listen on others, which trust all that may connect.
            (Calls::All, Target::Unix { path }) => below(PathUse::Socket, path),
            (Calls::All, _) => Ok(Admission::Granted(Granted::by_call(target.clone()))),
        }
    }

    /// Records an entry, in place of the one with this number. The addresses of servers that it keeps stay.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) fn enter(&mut self, number: u64, grants: Vec<Granted>) -> Result<(), Denied> {
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.addresses.retain(|(host, port, _)| {
                let server = Target::Tcp { host: host.clone(), port: *port };
                grants.iter().any(|granted| granted.target == server)
            });
            (entry.grants, entry.has_left) = (grants, false);
            return Ok(());
        }
        if self.entries.len() >= ENTRIES_MAX {
            return Err(Denied::Busy);
        }
        self.entries.insert(number, Entry::of(grants));
        Ok(())
    }

    /// Forgets an entry. Its requests that are carried out count until they are over.
    pub(crate) fn leave(&mut self, number: u64) {
        if let Some(entry) = self.entries.get_mut(&number) {
            (entry.grants, entry.addresses, entry.has_left) = (Vec::new(), Vec::new(), true);
        }
        self.forget(number);
    }

    /// Removes an entry that has left, when its requests are over.
    fn forget(&mut self, number: u64) {
        if self.entries.get(&number).is_some_and(|entry| entry.has_left && entry.in_flight == 0) {
            self.entries.remove(&number);
        }
    }

    /// Records the addresses of a server.
    pub(crate) fn resolved(&mut self, host: &str, port: u16, found: &[SocketAddr]) {
        let server = Target::Tcp { host: host.into(), port };
        let has_server = |entry: &&mut Entry| entry.grants.iter().any(|granted| granted.target == server);
        for entry in self.entries.values_mut().filter(has_server) {
            entry.addresses.retain(|(known, at, _)| (known.as_str(), *at) != (host, port));
            entry.addresses.extend(found.iter().map(|address| (host.to_owned(), port, *address)));
        }
    }

    /// Records where the image of a request is, because its backing images may be beside it.
    pub(crate) fn found(&mut self, permit: &Permit, path: &Path, real: &Path) {
        let Some(entry) = permit.entry.and_then(|number| self.entries.get_mut(&number)) else { return };
        for granted in &mut entry.grants {
            if matches!(&granted.target, Target::Image { path: image, chain: true, .. } if is_same(image, path))
            {
                granted.directory =
                    real.parent().filter(|directory| is_narrow(directory)).map(Path::to_owned);
            }
        }
    }

    /// Records a child, which the request with this permission started.
    pub(crate) fn started(&mut self, child: u64, permit: &Permit) {
        self.children.insert(child, permit.entry.unwrap_or(CONTROL));
    }

    /// Forgets a child. Returns whether there was one.
    pub(crate) fn ended(&mut self, child: u64) -> bool {
        self.children.remove(&child).is_some()
    }

    /// Returns the permission for a request.
    ///
    /// # Errors
    /// It is not allowed.
    pub(crate) fn decide(&self, request: &Request) -> Result<Permit, Denied> {
        match request {
            Request::Enter { entry, targets } => {
                let is_allowed = *entry != CONTROL && (1..=TARGETS_MAX).contains(&targets.len());
                if is_allowed { self.common() } else { Err(Denied::NotGranted) }
            }
            Request::Leave { entry } if *entry == CONTROL => Err(Denied::NotGranted),
            // It asks nothing of the host.
            Request::Leave { .. } => Ok(Permit::of(None, Within::Roots)),
            Request::Status { path } => self.image(path, false),
            Request::Image { path, writes, .. } => self.image(path, *writes),
            Request::Capture { path } => self.granted(
                |target| matches!(target, Target::Capture { path: granted } if is_same(granted, path)),
            ),
            Request::CheckSocket { path } | Request::Listen { path, .. } | Request::Unlink { path, .. } => {
                self.granted(|target| is_socket(target, path))
            }
            Request::RealPath { path } => match self.granted(|target| is_socket(target, path)) {
                // The sockets of a configuration file are compared before they are entered.
                Err(Denied::NotGranted) if self.names_socket(path) => self.common(),
                decided => decided,
            },
            Request::ConnectUnix { path } => self
                .granted(|target| matches!(target, Target::Unix { path: granted } if is_same(granted, path))),
            Request::Resolve { host, port } => self.granted(|target| is_server(target, host, *port)),
            Request::ConnectTcp { address } => self.granted_in(
                |entry| entry.addresses.iter().any(|(_, _, known)| known == address),
                |target| matches!(target, Target::Tcp { .. }),
            ),
            Request::Tap { name, flags } if may_have(*flags) => {
                self.granted(|target| matches!(target, Target::Tap { name: granted } if granted == name))
            }
            Request::FindPasst {} => self.granted(|target| matches!(target, Target::Passt { .. })),
            Request::StartPasst { arguments } => self.granted(
                |target| matches!(target, Target::Passt { arguments: granted } if granted == arguments),
            ),
            Request::EndPasst { child, .. } => match self.children.get(child) {
                Some(entry) => self.share_of(*entry).unwrap_or_else(|| self.common()),
                None => Err(Denied::NotGranted),
            },
            Request::Reopen { .. }
            | Request::BlockFacts { .. }
            | Request::CharSubsystem { .. }
            | Request::ReadConfig {} => self.common(),
            Request::Tap { .. } | Request::Group { .. } => Err(Denied::NotGranted),
        }
    }

    /// Returns the permission to read an image, or to write it. Without an entry for it, it may be a backing
    /// image.
    fn image(&self, path: &Path, writes: bool) -> Result<Permit, Denied> {
        let wanted = Target::Image { path: path.to_owned(), writes, chain: false };
        match self.granted(|target| target.includes(&wanted)) {
            Err(Denied::NotGranted) if !writes => {}
            decided => return decided,
        }
        let grants = self.entries.values().flat_map(|entry| &entry.grants);
        let within = Within::Beside(grants.filter_map(|granted| granted.directory.clone()).collect());
        // The device is not known. A share of one with its image beside this one is the best guess.
        let is_beside = |target: &Target| matches!(target, Target::Image { path: image, chain: true, .. } if directory_of(image) == directory_of(path));
        let permit = match self.granted(is_beside) {
            Err(_) => {
                self.granted(|target| matches!(target, Target::Image { chain: true, .. } | Target::Backing))
            }
            found => found,
        };
        Ok(Permit { within, ..permit? })
    }

    /// Returns the permission for a thing that an entry has.
    fn granted(&self, is_it: impl Fn(&Target) -> bool) -> Result<Permit, Denied> {
        self.granted_in(|_| true, is_it)
    }

    /// Returns the permission for a thing that such an entry has.
    fn granted_in(
        &self,
        can_be: impl Fn(&Entry) -> bool,
        is_it: impl Fn(&Target) -> bool,
    ) -> Result<Permit, Denied> {
        let mut denied = Denied::NotGranted;
        for (number, entry) in self.entries.iter().filter(|(_, entry)| can_be(entry)) {
            let Some(granted) = entry.grants.iter().find(|granted| is_it(&granted.target)) else { continue };
            if !self.has_room(entry) {
                denied = Denied::Busy;
                continue;
            }
            let within = if granted.is_named { Within::Roots } else { Within::CallRoots };
            let mut permit = Permit::of(Some(*number), within);
            if let Target::Socket { mode, group, .. } = &granted.target {
                (permit.mode, permit.group) = (*mode, group.clone());
            }
            return Ok(permit);
        }
        Err(denied)
    }

    fn has_room(&self, entry: &Entry) -> bool {
        entry.in_flight == 0 || (entry.in_flight < SHARE && self.beyond < BEYOND_MAX)
    }

    /// Returns the permission for a request of an entry, if the entry is still there.
    fn share_of(&self, number: u64) -> Option<Result<Permit, Denied>> {
        let entry = self.entries.get(&number)?;
        let permit = || Permit::of(Some(number), Within::Roots);
        Some(self.has_room(entry).then(permit).ok_or(Denied::Busy))
    }

    /// Returns the permission for a request without an entry.
    fn common(&self) -> Result<Permit, Denied> {
        match self.common < COMMON_MAX {
            true => Ok(Permit::of(None, Within::Roots)),
            false => Err(Denied::Busy),
        }
    }

    fn names_socket(&self, path: &Path) -> bool {
        self.authority.named.iter().chain(&self.file).any(|target| is_socket(target, path))
    }

    /// Notes that a request is carried out from now on.
    pub(crate) fn begin(&mut self, permit: &Permit) {
        match permit.entry.and_then(|number| self.entries.get_mut(&number)) {
            Some(entry) => {
                entry.in_flight += 1;
                self.beyond += usize::from(entry.in_flight > 1);
            }
            None => self.common += 1,
        }
    }

    /// Notes that a request is over.
    pub(crate) fn finish(&mut self, permit: &Permit) {
        match permit.entry.and_then(|number| self.entries.get_mut(&number)) {
            Some(entry) => {
                self.beyond -= usize::from(entry.in_flight > 1);
                entry.in_flight -= 1;
                permit.entry.into_iter().for_each(|number| self.forget(number));
            }
            None => self.common -= 1,
        }
    }

    /// Returns whether a file with this canonical path is in these directories.
    pub(crate) fn is_within(&self, within: &Within, usage: PathUse, real: &Path) -> bool {
        let is_below = |for_calls_only: bool| {
            let roots = self.authority.roots.iter();
            let mut such = roots.filter(|root| root.for_calls || !for_calls_only);
            such.any(|root| root.uses.contains(&usage) && real.starts_with(&root.directory))
        };
        match within {
            Within::Roots => is_below(false),
            Within::CallRoots => is_below(true),
            Within::Beside(directories) => {
                is_below(true) || directories.iter().any(|directory| real.starts_with(directory))
            }
        }
    }
}

impl Permit {
    fn of(entry: Option<u64>, within: Within) -> Self {
        Self { entry, within, mode: None, group: None }
    }
}

fn is_socket(target: &Target, path: &Path) -> bool {
    matches!(target, Target::Socket { path: granted, .. } if is_same(granted, path))
}

fn is_server(target: &Target, host: &str, port: u16) -> bool {
    matches!(target, Target::Tcp { host: granted, port: at } if granted == host && *at == port)
}

#[cfg(test)]
mod tests;
