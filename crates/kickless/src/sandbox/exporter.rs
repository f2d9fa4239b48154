//! The sandbox of `kickless metrics --listen`, which is one process.
//!
//! It listens before it loses its rights, and makes a thread for each client afterwards. Each answer needs a
//! new connection to the control socket, because the daemon can be restarted.

use anyhow::Result;
use kickless_sandbox::{EXPORTER, Lack, Mode, Refusals, Ruleset, Tcp, landlock_abi, restrict};
use rustix::thread::CapabilitySet;
use tracing::warn;

/// The rights that an exporter has lost, and what is left to be done.
pub(crate) struct Exporter {
    lacks: Vec<Lack>,
}

impl Exporter {
    /// Takes capabilities, paths and new TCP sockets from this process. Must be called while it has one
    /// thread. Returns nothing if the sandbox is off.
    ///
    /// # Errors
    /// The kernel lacks what `strict` needs, or refuses a step.
    pub(crate) fn enter(mode: Mode) -> Result<Option<Self>> {
        if mode == Mode::Off {
            return Ok(None);
        }
        let lacks = mode.lacks()?;
        restrict(CapabilitySet::empty(), Ruleset::new(landlock_abi(), Tcp::Nothing)?)?;
        Ok(Some(Self { lacks }))
    }

    /// Takes all system calls that an exporter does not make from all threads, before a client is read, and
    /// logs what this kernel lacks.
    ///
    /// # Errors
    /// The kernel refuses the filter.
    pub(crate) fn lock(self) -> Result<Option<&'static Refusals>> {
        for lack in &self.lacks {
            warn!("the sandbox is incomplete: {lack}");
        }
        if self.lacks.contains(&Lack::Filters) { Ok(None) } else { Ok(kickless_sandbox::lock(&EXPORTER)?) }
    }
}
