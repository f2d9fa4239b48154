//! The rows of the tables: what a behaviour is, and what it has.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use kickless_driver::{Card, QueuePair};
use tempfile::TempDir;

use crate::daemon::Daemon;
use crate::frontend::machine::{Machine, Shape};
use crate::meter::victim::connect_card;

/// A row of a table.
pub struct Behaviour {
    /// Its name, in the words of an operator.
    pub name: &'static str,
    /// Prepares the host for the devices of the attacker, and returns them.
    pub devices: fn(&mut Site) -> Result<Devices>,
    /// Sets the attacker up, while the victims run. The attack begins with the first step.
    pub start: fn(&Stage<'_>) -> Result<Step>,
    /// The time between two steps. It is chosen so that the work that a step may cause takes a small part of
    /// a worker.
    pub pause: Duration,
    /// The limits of the row, and their reason.
    pub bound: Bound,
}

/// The limits of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A loss of rate of 30 %, and a worst request of 50 ms.
    Strict,
    /// None: the kernel causes the figure. The text says how.
    Kernel(&'static str),
}

/// The devices of an attacker: the name and the lines of each `[[device]]`.
pub type Devices = Vec<(String, String)>;

/// Does the deed of a behaviour once.
pub type Step = Box<dyn FnMut() -> Result<Deed>>;

/// The result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deed {
    /// Frames, requests or messages that the daemon has taken.
    pub done: u64,
    /// Frames of others that the attacker saw.
    pub seen: u64,
}

impl Deed {
    /// Returns a deed of this size, in which the attacker saw nothing.
    pub fn of(done: u64) -> Deed {
        Deed { done, seen: 0 }
    }
}

/// The size of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Some megabytes and some queues, to show that the harness works.
    Small,
    /// As much as the fault needs.
    Full,
}

impl Scale {
    /// Returns `full`, or `small` in a short run.
    pub fn pick<T>(self, small: T, full: T) -> T {
        match self {
            Scale::Small => small,
            Scale::Full => full,
        }
    }
}

/// The host of an attack before the daemon starts. It keeps the servers and files of the attacker's devices.
pub struct Site {
    /// The size of the attack.
    pub scale: Scale,
    /// A directory that is removed in the end.
    pub dir: TempDir,
    kept: Vec<Box<dyn Any>>,
}

impl Site {
    /// Creates a directory.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(scale: Scale) -> Result<Site> {
        Ok(Site { scale, dir: crate::guest::image_dir()?, kept: Vec::new() })
    }

    /// Keeps something until the daemon has ended.
    pub fn keep(&mut self, kept: impl Any) {
        self.kept.push(Box::new(kept));
    }
}

/// The daemon, as an attacker sees it.
pub struct Stage<'a> {
    /// The daemon.
    pub daemon: &'a Daemon,
    /// The size of the attack.
    pub scale: Scale,
}

impl Stage<'_> {
    /// Returns the socket of a device, or of `control` and `control-read-only`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.daemon.socket_of(name)
    }

    /// Connects to a disk and starts its queues.
    ///
    /// # Errors
    /// The back-end refuses a message.
    pub fn machine(&self, name: &str, shape: &Shape) -> Result<Machine> {
        Machine::start(&self.socket(name), shape)
    }

    /// Connects to a card, with all offloads of frames that it sends.
    ///
    /// # Errors
    /// The back-end refuses a message.
    pub fn card(&self, name: &str) -> Result<(Card, QueuePair)> {
        connect_card(&self.socket(name))
    }
}

/// Returns one device.
pub fn device(name: &str, lines: impl Into<String>) -> Devices {
    vec![(name.to_owned(), lines.into())]
}

/// Returns a disk in memory for the attacker.
///
/// # Errors
/// None.
pub fn memory_disk(_: &mut Site) -> Result<Devices> {
    Ok(device("attacker", "blk-file = 'mem:64M'"))
}

/// Returns the path of a socket or file in text for a configuration.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}
