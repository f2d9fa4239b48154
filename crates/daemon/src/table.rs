//! The table of the devices: their names, their sockets, and the phase of each.
//!
//! The functions of the table do not block and do not close devices. The entry of a device stays until its
//! session thread has closed it, so that the name and the socket stay in use until then.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::DeviceConfig;
use super::error::{AddError, RemoveError, ServeError};
use super::sentence::sentence;

/// The entries of devices of the type `D`.
pub(crate) struct Table<D> {
    /// Entries in the order in which devices were added. A device that replaces an ended one takes over its
    /// entry.
    pub(crate) entries: Vec<Entry<D>>,
    next_id: u64,
    pub(crate) is_stopping: bool,
}

pub(crate) struct Entry<D> {
    /// Stays the same as long as the session thread of the device.
    pub(crate) id: u64,
    /// Empty for a device without a name.
    pub(crate) name: String,
    pub(crate) config: DeviceConfig,
    /// The path of its socket, as [`real_path`](kickless_opener::real_path) returns it, or the identity of
    /// a socket that came as a descriptor.
    socket: Option<PathBuf>,
    /// The front-ends, or what is behind the device, come from descriptors.
    pub(crate) is_inherited: bool,
    pub(crate) phase: Phase<D>,
    /// The entry is removed as soon as the device is closed.
    pub(crate) is_removing: bool,
    /// The number of references to the device beside those of the table and of the session thread.
    references: usize,
}

pub(crate) enum Phase<D> {
    /// The device is being opened. Contains the closed device that it replaces.
    Opening(Option<Box<Replaced>>),
    /// The session thread serves the device.
    Running(Arc<D>),
    /// The device is no longer served. Its session thread waits for a request to close it.
    Ended(Arc<D>, Outcome),
    /// The session thread closes the device as soon as there are no references.
    Closing(Outcome),
    /// The session thread has closed the device, which no other device could replace.
    Closed(Outcome),
}

/// The result of a session thread.
pub(crate) type Outcome = Result<(), ServeError>;

/// The contents of an entry before a new device replaced them. They return to the entry if the new device
/// cannot be opened.
pub(crate) struct Replaced {
    id: u64,
    config: DeviceConfig,
    socket: Option<PathBuf>,
    is_inherited: bool,
    outcome: Outcome,
}

/// The name and the socket that a new device asks for.
pub(crate) struct Wanted<'a> {
    pub(crate) config: &'a DeviceConfig,
    /// The path of its socket, as [`real_path`](kickless_opener::real_path) returns it. The caller resolves
    /// it without the lock, because the file system may not answer. For a socket that came as a descriptor,
    /// this is its identity.
    pub(crate) socket: Option<&'a Path>,
    /// The front-ends, or what is behind the device, come from descriptors.
    pub(crate) is_inherited: bool,
    pub(crate) devices_max: usize,
}

/// The result of [`Table::reserve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reserved {
    /// The name and the socket are reserved for the new device with this number.
    New(u64),
    /// An identical device is already served.
    Identical,
    /// An ended device with this number has the name. The caller must have it closed first.
    Ended(u64),
}

impl<D> Default for Table<D> {
    fn default() -> Self {
        Self { entries: Vec::new(), next_id: 0, is_stopping: false }
    }
}

impl<D> Entry<D> {
    pub(crate) fn device(&self) -> Option<&Arc<D>> {
        match &self.phase {
            Phase::Running(device) | Phase::Ended(device, _) => Some(device),
            Phase::Opening(_) | Phase::Closing(_) | Phase::Closed(_) => None,
        }
    }

    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        match &self.phase {
            Phase::Ended(_, outcome) | Phase::Closing(outcome) | Phase::Closed(outcome) => Some(outcome),
            Phase::Opening(_) | Phase::Running(_) => None,
        }
    }

    /// Returns the error of a removal if the device keeps its disk, although it is no longer served.
    pub(crate) fn keeps_disk(&self) -> Option<RemoveError> {
        match &self.phase {
            Phase::Ended(_, Err(error)) if !self.is_removing && error.keeps_disk() => {
                let error = error.source().map_or_else(|| error.to_string(), sentence);
                Some(RemoveError::KeepsDisk { name: self.name.clone(), error })
            }
            _ => None,
        }
    }

    /// Returns whether the session thread closes the device now.
    pub(crate) fn is_being_closed(&self) -> bool {
        matches!(self.phase, Phase::Closing(_)) && self.references == 0
    }

    /// Requests that the session thread closes the device, if it is no longer served.
    pub(crate) fn close(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Opening(None)) {
            // The session thread has a reference too, so this drops no device under the lock.
            Phase::Ended(_, outcome) => self.phase = Phase::Closing(outcome),
            other => self.phase = other,
        }
    }

    /// Requests the removal of the device. If it is served, `stop` stops it, and returns whether it did.
    pub(crate) fn remove(&mut self, stop: impl FnOnce(&D) -> bool) -> Result<(), RemoveError> {
        match &self.phase {
            Phase::Opening(_) => return Err(RemoveError::BeingAdded { name: self.name.clone() }),
            Phase::Running(device) if !stop(device) => {
                return Err(RemoveError::InUse { name: self.name.clone() });
            }
            Phase::Running(_) | Phase::Ended(..) | Phase::Closing(_) | Phase::Closed(_) => {}
        }
        self.is_removing = true;
        self.close();
        Ok(())
    }
}

impl<D> Table<D> {
    /// Returns the names of all devices.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    pub(crate) fn find(&mut self, id: u64) -> Option<&mut Entry<D>> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// Returns whether no device is served or being closed, and no device that is being opened will be
    /// served. A device that the registry would close, but to which there are references, does not count: a
    /// call on its disk may never return.
    pub(crate) fn is_idle(&self) -> bool {
        self.entries.iter().all(|entry| match entry.phase {
            Phase::Opening(_) => self.is_stopping,
            Phase::Running(_) => false,
            Phase::Closing(_) => !entry.is_being_closed(),
            Phase::Ended(..) | Phase::Closed(_) => true,
        })
    }

    /// Reserves the name and the socket of a device, unless another device has the name.
    pub(crate) fn reserve(&mut self, wanted: &Wanted<'_>) -> Result<Reserved, AddError> {
        let &Wanted { config, socket, is_inherited, devices_max } = wanted;
        if self.is_stopping {
            return Err(AddError::Stopping);
        }
        let name = config.name().unwrap_or_default().to_owned();
        let same = self.entries.iter().position(|entry| entry.name == name);
        if let Some(entry) = same.map(|at| &self.entries[at]) {
            let busy = |doing| AddError::Busy { name: name.clone(), doing };
            match (&entry.phase, entry.is_removing) {
                (_, true) => return Err(busy("removed")),
                (Phase::Closing(_), _) => return Err(busy("closed")),
                (Phase::Opening(_), _) => return Err(busy("added")),
                (Phase::Running(_), _) if is_inherited => return Err(AddError::NotComparable { name }),
                (Phase::Running(_), _) if entry.config == *config => return Ok(Reserved::Identical),
                (Phase::Running(_), _) => return Err(AddError::Different { name }),
                (Phase::Ended(..) | Phase::Closed(_), _) => {}
            }
            if entry.keeps_disk().is_some() {
                return Err(AddError::KeepsDisk { name });
            }
        }
        if socket.is_none() && !is_inherited {
            return Err(AddError::NoSocket);
        }
        if let Some(path) = socket
            && let Some(other) =
                self.entries.iter().find(|entry| entry.socket.as_deref() == Some(path) && entry.name != name)
        {
            return Err(AddError::SocketTaken { name: other.name.clone(), path: path.to_owned() });
        }
        if same.is_none() && self.entries.len() >= devices_max {
            return Err(AddError::Full { max: devices_max });
        }
        Ok(self.insert(same, name, wanted))
    }

    /// Gives a new entry, or that of the closed device with the same name, to a device that is being opened.
    fn insert(&mut self, same: Option<usize>, name: String, wanted: &Wanted<'_>) -> Reserved {
        let (id, is_inherited) = (self.next_id, wanted.is_inherited);
        let (config, socket) = (wanted.config.clone(), wanted.socket.map(Path::to_owned));
        let Some(entry) = same.map(|at| &mut self.entries[at]) else {
            let phase = Phase::Opening(None);
            let is_removing = false;
            self.entries.push(Entry {
                id,
                name,
                config,
                socket,
                is_inherited,
                phase,
                is_removing,
                references: 0,
            });
            self.next_id += 1;
            return Reserved::New(id);
        };
        match std::mem::replace(&mut entry.phase, Phase::Opening(None)) {
            Phase::Closed(outcome) => {
                let replaced = Replaced {
                    id: std::mem::replace(&mut entry.id, id),
                    config: std::mem::replace(&mut entry.config, config),
                    socket: std::mem::replace(&mut entry.socket, socket),
                    is_inherited: std::mem::replace(&mut entry.is_inherited, is_inherited),
                    outcome,
                };
                entry.phase = Phase::Opening(Some(Box::new(replaced)));
                self.next_id += 1;
                Reserved::New(id)
            }
            other => {
                entry.phase = other;
                Reserved::Ended(entry.id)
            }
        }
    }

    /// Cancels the opening of a device. Removes its entry, or returns the entry to the device that it would
    /// have replaced. Returns whether the device was being opened.
    pub(crate) fn cancel_opening(&mut self, id: u64) -> bool {
        let Some(entry) = self.find(id) else { return false };
        let Phase::Opening(replaced) = &mut entry.phase else { return false };
        match replaced.take().map(|replaced| *replaced) {
            Some(Replaced { id, config, socket, is_inherited, outcome }) => {
                (entry.id, entry.config, entry.socket) = (id, config, socket);
                entry.is_inherited = is_inherited;
                entry.phase = Phase::Closed(outcome);
            }
            None => self.entries.retain(|entry| entry.id != id),
        }
        true
    }

    /// Records that these devices are served from now on. Returns `false`, and changes nothing, if they must
    /// not be served, because the daemon is stopping.
    pub(crate) fn set_running(&mut self, devices: impl Iterator<Item = (u64, Arc<D>)>) -> bool {
        if self.is_stopping {
            return false;
        }
        for (id, device) in devices {
            if let Some(entry) = self.find(id) {
                entry.phase = Phase::Running(device);
            }
        }
        true
    }

    /// Records that a device is no longer served, and requests its removal if `is_leaving`. Returns whether
    /// nothing else had requested it.
    pub(crate) fn set_ended(&mut self, id: u64, outcome: Outcome, is_leaving: bool) -> bool {
        let Some(entry) = self.find(id) else { return false };
        // A device that keeps its disk stays. Removing it again gives the disk up.
        let keeps_disk = outcome.as_ref().err().is_some_and(ServeError::keeps_disk);
        let was_removing = entry.is_removing;
        entry.is_removing = !keeps_disk && (was_removing || is_leaving);
        let has_left = entry.is_removing && !was_removing;
        match std::mem::replace(&mut entry.phase, Phase::Opening(None)) {
            Phase::Running(device) => entry.phase = Phase::Ended(device, outcome),
            other => entry.phase = other,
        }
        if entry.is_removing {
            entry.close();
        }
        has_left
    }

    /// Records that a device is closed. Removes its entry if that was requested.
    pub(crate) fn set_closed(&mut self, id: u64) {
        let Some(entry) = self.find(id) else { return };
        if entry.is_removing {
            self.entries.retain(|entry| entry.id != id);
            return;
        }
        match std::mem::replace(&mut entry.phase, Phase::Opening(None)) {
            Phase::Closing(outcome) => entry.phase = Phase::Closed(outcome),
            other => entry.phase = other,
        }
    }

    /// Requests that the devices that have ended are closed and removed. Returns their numbers, and the
    /// configuration and the error of each that failed. Leaves those that another caller removes.
    pub(crate) fn take_ended(&mut self) -> (Vec<u64>, Vec<(DeviceConfig, ServeError)>) {
        let (mut ids, mut failed) = (Vec::new(), Vec::new());
        for entry in self.entries.iter_mut().filter(|entry| !entry.is_removing) {
            entry.close();
            if let Phase::Closing(outcome) | Phase::Closed(outcome) = &mut entry.phase {
                let outcome = std::mem::replace(outcome, Ok(()));
                failed.extend(outcome.err().map(|error| (entry.config.clone(), error)));
                entry.is_removing = true;
                ids.push(entry.id);
            }
        }
        self.remove_closed();
        (ids, failed)
    }

    /// Removes the entries of closed devices whose removal was requested.
    pub(crate) fn remove_closed(&mut self) {
        self.entries.retain(|entry| !(entry.is_removing && matches!(entry.phase, Phase::Closed(_))));
    }

    /// Returns a device, and counts a reference to it.
    pub(crate) fn add_reference(&mut self, id: u64) -> Option<Arc<D>> {
        let entry = self.find(id)?;
        let device = entry.device()?.clone();
        entry.references += 1;
        Some(device)
    }

    /// Counts a reference less, after the caller has dropped it. Returns whether the session thread closes
    /// the device now.
    pub(crate) fn return_reference(&mut self, id: u64) -> bool {
        let Some(entry) = self.find(id) else { return false };
        entry.references -= 1;
        entry.is_being_closed()
    }
}
