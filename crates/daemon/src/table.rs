//! The table of the devices: their names, their sockets, and the phase of each.
//!
//! Nothing here waits, and nothing closes a device. A function that takes a device out of the table returns it, and the caller
//! drops it without the lock of the table. The entry stays until then, so that the name and the socket are in use as long as
//! the device has them.

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
    /// It is being opened.
    Opening,
    /// It waits for a front-end.
    Free,
    /// A front-end is connected.
    Connected,
    /// It takes no new requests, and is removed when the last one in flight ends.
    Removing,
    /// It is not served any longer: see [`Listed::error`](crate::Listed::error) and the log.
    Ended,
}

#[derive(Default)]
pub(crate) struct Table {
    /// In the order in which the devices came. A device that replaces one that has ended has its place.
    pub(crate) entries: Vec<Entry>,
    /// The id of the next entry.
    next: u64,
    pub(crate) is_stopping: bool,
}

pub(crate) struct Entry {
    pub(crate) id: u64,
    /// Empty for a device without a name.
    pub(crate) name: String,
    pub(crate) config: DeviceConfig,
    /// The real path of its socket.
    socket: Option<PathBuf>,
    pub(crate) phase: Phase,
    pub(crate) is_removing: bool,
    /// Callers that wait for its end. One of them closes it.
    pub(crate) waiters: usize,
}

pub(crate) enum Phase {
    /// It is being opened, in place of a device that has ended.
    Opening(Option<Box<Replaced>>),
    Running(Running),
    /// Its session thread has ended. It is closed if a device was to replace it and could not be opened.
    Ended(Option<Running>, Outcome),
    /// It is being closed without the lock, and then goes.
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
    /// Waits for the session thread, which has nothing left to do but to end, and closes the device. Takes its time.
    pub(crate) fn close(self) {
        // A panic is its outcome.
        let _ = self.thread.join();
    }
}

/// An entry that comes back if its successor cannot be opened.
pub(crate) struct Replaced {
    id: u64,
    config: DeviceConfig,
    socket: Option<PathBuf>,
    outcome: Outcome,
}

/// A name that is reserved for a device.
pub(crate) struct Reserved {
    pub(crate) id: u64,
    /// The device to close before.
    pub(crate) replaced: Option<Running>,
}

/// A device to close, whose entry is to be taken then.
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

    /// Takes the device out if its session thread has ended.
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

    /// Makes the entry that of a successor. Only for one whose session thread has ended.
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

    pub(crate) fn take(&mut self, id: u64) -> Option<Entry> {
        let at = self.entries.iter().position(|entry| entry.id == id)?;
        Some(self.entries.remove(at))
    }

    /// Returns whether no device is served or being closed, and none will be served.
    pub(crate) fn is_idle(&self) -> bool {
        self.entries.iter().all(|entry| match entry.phase {
            Phase::Opening(_) => self.is_stopping,
            Phase::Ended(..) => true,
            Phase::Running(_) | Phase::Closing => false,
        })
    }

    /// Reserves the name and the socket of a device. `None`: the same device is served already. The path of the socket is
    /// resolved before, because that asks the file system, which may not answer.
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
        let id = self.next;
        self.next += 1;
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

    /// Gives the name of a device back that was being opened, to the device that it would have replaced if there is one.
    /// Returns whether it was being opened.
    pub(crate) fn give_up(&mut self, id: u64) -> bool {
        let Some(entry) = self.find(id) else { return false };
        let Phase::Opening(replaced) = &mut entry.phase else { return false };
        match replaced.take().map(|replaced| *replaced) {
            Some(Replaced { id, config, socket, outcome }) => {
                (entry.id, entry.config, entry.socket) = (id, config, socket);
                entry.phase = Phase::Ended(None, outcome);
            }
            None => drop(self.take(id)),
        }
        true
    }

    /// Notes that a device that was being opened is served. Returns it if it is not to be, because the daemon is stopping.
    pub(crate) fn begin(&mut self, id: u64, running: Running) -> Option<Running> {
        let is_stopping = self.is_stopping;
        match self.find(id) {
            Some(entry) if !is_stopping => {
                entry.phase = Phase::Running(running);
                None
            }
            _ => Some(running),
        }
    }

    /// Notes that a session thread has ended. Returns its device if the thread is to close that.
    pub(crate) fn end(&mut self, id: u64, outcome: Outcome) -> Option<Running> {
        let entry = self.find(id)?;
        match std::mem::replace(&mut entry.phase, Phase::Closing) {
            Phase::Running(running) if entry.is_removing && entry.waiters == 0 => return Some(running),
            Phase::Running(running) => entry.phase = Phase::Ended(Some(running), outcome),
            other => entry.phase = other,
        }
        None
    }

    /// Takes out the devices that are not served any longer, but those that others wait for.
    pub(crate) fn close_ended(&mut self) -> Vec<ClosedEntry> {
        let unwaited = self.entries.iter_mut().filter(|entry| entry.waiters == 0);
        unwaited.filter_map(Entry::close).collect()
    }
}
