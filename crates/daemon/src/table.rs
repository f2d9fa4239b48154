//! The table of the devices: their names, their sockets, and the phase of each.
//!
//! The functions of the table do not block and do not close devices. A function that takes a device out of
//! its entry returns the device, and the caller drops it without the lock of the table. The entry stays until
//! then, so that the name and the socket stay in use until the device is closed.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::config::DeviceConfig;
use super::error::{AddError, ServeError};
use super::sentence::sentence;
use super::served::Served;

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// The device is being opened.
    Opening,
    /// The device waits for a front-end.
    Free,
    /// A front-end is connected.
    Connected,
    /// The device takes no new requests, and is removed when the last one in flight ends.
    Removing,
    /// The device is no longer served. [`Listed::error`](crate::Listed::error) and the log tell the reason.
    Ended,
}

#[derive(Default)]
pub(crate) struct Table {
    /// Entries in the order in which devices were added. A device that replaces an ended one takes over its
    /// entry.
    pub(crate) entries: Vec<Entry>,
    next_id: u64,
    pub(crate) is_stopping: bool,
}

pub(crate) struct Entry {
    pub(crate) id: u64,
    /// Empty for a device without a name.
    pub(crate) name: String,
    pub(crate) config: DeviceConfig,
    /// The path of its socket, as [`real_path`](crate::real_path) returns it.
    socket: Option<PathBuf>,
    pub(crate) phase: Phase,
    pub(crate) is_removing: bool,
    /// The number of callers that wait for the end of the device. One of them closes it.
    pub(crate) waiters: usize,
}

pub(crate) enum Phase {
    /// The device is being opened. Contains the ended device that it replaces.
    Opening(Option<Box<Replaced>>),
    Running(Running),
    /// The session thread has ended. The device is `None` if it is closed: another device could not replace
    /// it.
    Ended(Option<Running>, Outcome),
    /// A thread closes the device without the lock, and then removes the entry.
    Closing,
}

/// The result of a session thread.
type Outcome = Result<(), ServeError>;

/// A device and its session thread.
pub(crate) struct Running {
    pub(crate) served: Arc<Served>,
    pub(crate) thread: JoinHandle<()>,
}

impl Running {
    /// Waits for the session thread, which is about to end, and closes the device. Can take long.
    pub(crate) fn close(self) {
        // The outcome of the session already contains a panic.
        let _ = self.thread.join();
    }
}

/// The contents of an entry before a new device replaced them. They return to the entry if the new device
/// cannot be opened.
pub(crate) struct Replaced {
    id: u64,
    config: DeviceConfig,
    socket: Option<PathBuf>,
    outcome: Outcome,
}

/// A reservation of the name and the socket of a new device.
pub(crate) struct Reserved {
    pub(crate) id: u64,
    /// The ended device, which the caller must close before it opens the new one.
    pub(crate) replaced: Option<Running>,
}

/// A device taken out of its entry. The caller closes it, and then removes the entry.
pub(crate) struct ClosedEntry {
    pub(crate) id: u64,
    pub(crate) config: DeviceConfig,
    pub(crate) running: Option<Running>,
    pub(crate) outcome: Outcome,
}

impl Entry {
    pub(crate) fn served(&self) -> Option<&Arc<Served>> {
        match &self.phase {
            Phase::Running(running) | Phase::Ended(Some(running), _) => Some(&running.served),
            Phase::Opening(_) | Phase::Ended(None, _) | Phase::Closing => None,
        }
    }

    pub(crate) fn state(&self) -> DeviceState {
        match &self.phase {
            Phase::Opening(_) => DeviceState::Opening,
            Phase::Ended(..) => DeviceState::Ended,
            Phase::Closing => DeviceState::Removing,
            Phase::Running(_) if self.is_removing => DeviceState::Removing,
            Phase::Running(running) if running.served.is_connected() => DeviceState::Connected,
            Phase::Running(_) => DeviceState::Free,
        }
    }

    pub(crate) fn error(&self) -> Option<String> {
        match &self.phase {
            Phase::Ended(_, Err(error)) => Some(sentence(error)),
            _ => None,
        }
    }

    /// Takes the device out of the entry if its session thread has ended.
    pub(crate) fn close(&mut self) -> Option<ClosedEntry> {
        match std::mem::replace(&mut self.phase, Phase::Closing) {
            Phase::Ended(running, outcome) => {
                Some(ClosedEntry { id: self.id, config: self.config.clone(), running, outcome })
            }
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// Gives the entry to a new device. Returns the ended device. Does nothing while the session thread runs.
    fn replace(&mut self, id: u64, config: DeviceConfig, socket: Option<PathBuf>) -> Option<Running> {
        let ClosedEntry { running, outcome, .. } = self.close()?;
        let replaced = Replaced {
            id: std::mem::replace(&mut self.id, id),
            config: std::mem::replace(&mut self.config, config),
            socket: std::mem::replace(&mut self.socket, socket),
            outcome,
        };
        self.phase = Phase::Opening(Some(Box::new(replaced)));
        running
    }
}

impl Table {
    pub(crate) fn find(&mut self, id: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    pub(crate) fn remove_entry(&mut self, id: u64) -> Option<Entry> {
        let at = self.entries.iter().position(|entry| entry.id == id)?;
        Some(self.entries.remove(at))
    }

    /// Returns whether no device is served or being closed, and no device that is being opened will be
    /// served.
    pub(crate) fn is_idle(&self) -> bool {
        self.entries.iter().all(|entry| match entry.phase {
            Phase::Opening(_) => self.is_stopping,
            Phase::Ended(..) => true,
            Phase::Running(_) | Phase::Closing => false,
        })
    }

    /// Reserves the name and the socket of a device. Returns `None` if an identical device is already served.
    /// The caller resolves the path of the socket without the lock, because the file system may not answer.
    pub(crate) fn reserve(
        &mut self,
        config: &DeviceConfig,
        socket: Option<PathBuf>,
        is_inherited: bool,
        devices_max: usize,
    ) -> Result<Option<Reserved>, AddError> {
        if self.is_stopping {
            return Err(AddError::Stopping);
        }
        let name = config.name().unwrap_or_default().to_owned();
        let same = self.entries.iter().position(|entry| entry.name == name);
        if let Some(entry) = same.map(|at| &self.entries[at]) {
            match (&entry.phase, entry.is_removing) {
                (_, true) | (Phase::Closing, _) => return Err(AddError::Busy { name, doing: "removed" }),
                (Phase::Opening(_), _) => return Err(AddError::Busy { name, doing: "added" }),
                (Phase::Running(_), _) if entry.config == *config && !is_inherited => return Ok(None),
                (Phase::Running(_), _) => return Err(AddError::Different { name }),
                (Phase::Ended(..), _) => {}
            }
        }
        if socket.is_none() && !is_inherited {
            return Err(AddError::NoSocket);
        }
        if let Some(path) = &socket
            && let Some(other) =
                self.entries.iter().find(|entry| entry.socket.as_ref() == Some(path) && entry.name != name)
        {
            return Err(AddError::SocketTaken { name: other.name.clone(), path: path.clone() });
        }
        if same.is_none() && self.entries.len() >= devices_max {
            return Err(AddError::Full { max: devices_max });
        }
        let id = self.next_id;
        self.next_id += 1;
        let config = config.clone();
        let replaced = match same {
            Some(at) => self.entries[at].replace(id, config, socket),
            None => {
                let (phase, is_removing, waiters) = (Phase::Opening(None), false, 0);
                self.entries.push(Entry { id, name, config, socket, phase, is_removing, waiters });
                None
            }
        };
        Ok(Some(Reserved { id, replaced }))
    }

    /// Cancels the opening of a device. Removes its entry, or returns the entry to the device that it would
    /// have replaced. Returns whether the device was being opened.
    pub(crate) fn cancel_opening(&mut self, id: u64) -> bool {
        let Some(entry) = self.find(id) else { return false };
        let Phase::Opening(replaced) = &mut entry.phase else { return false };
        match replaced.take().map(|replaced| *replaced) {
            Some(Replaced { id, config, socket, outcome }) => {
                (entry.id, entry.config, entry.socket) = (id, config, socket);
                entry.phase = Phase::Ended(None, outcome);
            }
            None => drop(self.remove_entry(id)),
        }
        true
    }

    /// Records that a device is served from now on. Returns the device if it must not be served, because the
    /// daemon is stopping.
    pub(crate) fn set_running(&mut self, id: u64, running: Running) -> Option<Running> {
        let is_stopping = self.is_stopping;
        match self.find(id) {
            Some(entry) if !is_stopping => {
                entry.phase = Phase::Running(running);
                None
            }
            _ => Some(running),
        }
    }

    /// Records that a session thread has ended. Returns the device if the thread must close it.
    pub(crate) fn set_ended(&mut self, id: u64, outcome: Outcome) -> Option<Running> {
        let entry = self.find(id)?;
        match std::mem::replace(&mut entry.phase, Phase::Closing) {
            Phase::Running(running) if entry.is_removing && entry.waiters == 0 => return Some(running),
            Phase::Running(running) => entry.phase = Phase::Ended(Some(running), outcome),
            other => entry.phase = other,
        }
        None
    }

    /// Takes the ended devices out of their entries. Leaves those whose end a caller waits for.
    pub(crate) fn close_ended(&mut self) -> Vec<ClosedEntry> {
        let without_waiters = self.entries.iter_mut().filter(|entry| entry.waiters == 0);
        without_waiters.filter_map(Entry::close).collect()
    }
}
