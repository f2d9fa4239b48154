//! What is to be served, however it was said: on the command line or in a file.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use kickless_disk::{Cache, DiskSpec};
use kickless_io::{CompletionMode, EngineKind};
use kickless_worker::Poll;
use tracing::{Span, error_span};

/// The name of the span that log lines about a device are in.
pub(crate) const DEVICE_SPAN: &str = "device";

/// A pool of workers, and the devices that share it.
#[derive(Debug)]
pub(crate) struct Service {
    /// Where all this was said.
    pub(crate) said: Said,
    /// The workers.
    pub(crate) pool: Pool,
    /// At least one.
    pub(crate) devices: Vec<Device>,
}

/// The workers.
#[derive(Debug)]
pub(crate) struct Pool {
    /// How many.
    pub(crate) workers: u16,
    /// Where they run, one on each in turn; empty: anywhere.
    pub(crate) cpus: Vec<usize>,
    /// How they do I/O.
    pub(crate) engine: EngineKind,
    /// Who submits to the kernel.
    pub(crate) completion: CompletionMode,
    /// A thread of the kernel's looks for submissions.
    pub(crate) sqpoll: bool,
    /// Guest memory is registered with the kernel.
    pub(crate) fixed_buffers: bool,
    /// When they look at rings without kicks.
    pub(crate) poll: Poll,
    /// For how long a call may be held back to be one with those that follow.
    pub(crate) call_coalesce: Option<Duration>,
}

/// One disk, and where it is served.
#[derive(Debug)]
pub(crate) struct Device {
    /// What the log calls it, where there are several.
    pub(crate) name: Option<String>,
    /// Where front-ends come from.
    pub(crate) socket: Socket,
    /// What is served.
    pub(crate) disk: Disk,
    /// Bytes that its front-end may have mapped here.
    pub(crate) memory_max: u64,
    /// A front-end may share memory on any file system.
    pub(crate) allow_slow_memory: bool,
    /// Its share of the pool, beside the others'.
    pub(crate) weight: u32,
}

/// Where front-ends come from.
#[derive(Debug)]
pub(crate) enum Socket {
    /// A descriptor that was inherited under this number.
    Inherited(i32),
    /// A socket that is made.
    Path {
        /// Its name.
        path: PathBuf,
        /// Its permissions.
        mode: Option<u32>,
        /// Its group, by name or number.
        group: Option<String>,
    },
}

/// A disk.
#[derive(Debug)]
pub(crate) struct Disk {
    /// What lies behind it.
    pub(crate) blk_file: DiskSpec,
    /// Guests can only read.
    pub(crate) read_only: bool,
    /// What it calls itself.
    pub(crate) serial: Option<String>,
    /// The most queues.
    pub(crate) num_queues: u16,
    /// The most entries of a queue.
    pub(crate) queue_size: u16,
    /// Whether the host's page cache is used.
    pub(crate) cache: Cache,
    /// Neighbouring requests are one for the kernel.
    pub(crate) merge: bool,
    /// It is locked while a guest uses it.
    pub(crate) lock: bool,
    /// Another host may still be using it.
    pub(crate) incoming: bool,
}

/// Where options were said, which is how a sentence about them names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// On the command line.
    CommandLine,
    /// In a file, by the same names without the dashes.
    File,
}

impl Said {
    /// How `option` is written there.
    pub(crate) fn option(self, option: &str) -> String {
        match self {
            Said::CommandLine => format!("--{option}"),
            Said::File => option.into(),
        }
    }

    /// How `option` with `value` is written there.
    pub(crate) fn with_value(self, option: &str, value: impl fmt::Display) -> String {
        match self {
            Said::CommandLine => format!("--{option}={value}"),
            Said::File => format!("{option} = \"{value}\""),
        }
    }
}

/// Options that do not go together.
#[derive(Debug)]
pub(crate) struct Mistake {
    /// The one that is to blame.
    pub(crate) option: &'static str,
    /// What is wrong with it, as the end of a sentence.
    pub(crate) why: String,
}

impl Disk {
    /// What the options' types cannot say.
    ///
    /// # Errors
    /// They do not go together.
    pub(crate) fn check(&self, said: Said) -> Result<(), Mistake> {
        if self.incoming && self.blk_file.is_of_process() {
            let why = format!(
                "it needs a {} that another host can use, not null: or mem:",
                said.option("blk-file")
            );
            return Err(Mistake { option: "incoming", why });
        }
        Ok(())
    }
}

impl Device {
    /// What marks the log's lines about this device. Of the highest level, so that it is there whatever is logged.
    pub(crate) fn span(&self) -> Span {
        match &self.name {
            Some(name) => error_span!(DEVICE_SPAN, %name),
            None => Span::none(),
        }
    }

    /// How a sentence about an option of this device names it.
    pub(crate) fn option(&self, said: Said, option: &str) -> String {
        match &self.name {
            Some(name) => format!("device {name}: {}", said.option(option)),
            None => said.option(option),
        }
    }
}
