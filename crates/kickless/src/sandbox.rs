//! Takes rights from the process that serves, and gives names to helper processes.
//!
//! ```text
//! enter    the only thread    forks the launcher and the opener, drops capabilities and paths
//! start    before devices     all uses of names become requests to the opener from now on
//! lock     the last           takes system calls from all threads; no peer was read before
//! ```
//!
//! Each helper ends with the process that serves, and that one ends when a helper does. An orderly end waits
//! for the helpers.

mod exporter;
mod helpers;
mod rbd;
mod roots;

use std::collections::BTreeSet;
use std::env;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, bail};
use kickless_opener::{Authority, Calls, Target};
use kickless_sandbox::{
    Access, DATA, DATA_WITH_RBD, Lack, Mode, Refusals, Ruleset, Tcp, landlock_abi, place, restrict,
};
use rustix::thread::CapabilitySet;
use tracing::{info, warn};

use crate::cli::runtime_directories;
use crate::control;
use crate::inherited::Noted;
use crate::service::Service;
pub(crate) use exporter::Exporter;
use helpers::{Helpers, Kernel, Running};

/// The rights that this process has lost, and what is left to be done.
pub(crate) struct Sandbox {
    mode: Mode,
    kernel: Kernel,
    lacks: Vec<Lack>,
    /// The directories in which files may be, for the log.
    roots: BTreeSet<String>,
    calls: Calls,
    /// The helpers until [`Sandbox::start`], and afterwards.
    helpers: Option<Helpers>,
    running: Option<Running>,
    /// Their inodes must stay as they are while threads open files below them.
    places: Vec<OwnedFd>,
    has_rbd: bool,
}

/// Starts the helpers, and takes capabilities and paths from this process. Must be called while it has one
/// thread. Returns nothing if the sandbox is off.
///
/// # Errors
/// The options cannot be kept in a sandbox, the kernel lacks what `strict` needs, or a helper cannot be
/// started. The error is one sentence.
pub(crate) fn enter(service: &Service, inherited: &Noted) -> Result<Option<Sandbox>> {
    let mode = service.sandbox.mode;
    if mode == Mode::Off {
        return Ok(None);
    }
    let lacks = mode.lacks()?;
    let authority = authority(service)?;
    let rbd = rbd::files(&authority.named);
    let (roots, calls) = (authority.roots.iter(), authority.calls);
    let roots = roots.map(|root| root.directory.display().to_string()).collect();
    let kernel = Kernel { landlock: landlock_abi(), has_filters: !lacks.contains(&Lack::Filters) };
    // The machinery of backtraces opens this program at its first use, and keeps it.
    if env::var_os("RUST_BACKTRACE").is_some() {
        std::backtrace::Backtrace::force_capture().to_string();
    }
    let helpers = Helpers::fork(service, authority, kernel, inherited)?;
    let has_rbd = rbd.is_some();
    let mut rules = Ruleset::new(kernel.landlock, if has_rbd { Tcp::Connect } else { Tcp::Nothing })?;
    if let Some(files) = rbd {
        rbd::allow(&mut rules, &files, &service.sandbox.roots)?;
    }
    // Each worker opens a file about its own thread when it starts, and one about the machine.
    let places = ["/proc/self/task", "/proc/stat"].map(|path| place(Path::new(path)).context(path));
    let places = places.into_iter().collect::<Result<Vec<_>>>()?;
    places.iter().try_for_each(|place| rules.allow(place, Access::READ_FILE))?;
    restrict(CapabilitySet::empty(), rules)?;
    Ok(Some(Sandbox {
        mode,
        kernel,
        lacks,
        roots,
        calls,
        helpers: Some(helpers),
        running: None,
        places,
        has_rbd,
    }))
}

impl Sandbox {
    /// Logs what this sandbox is, and what this kernel lacks.
    pub(crate) fn report(&self) {
        let Self { mode, kernel: Kernel { landlock, .. }, roots, calls, .. } = self;
        info!(%mode, landlock, ?roots, ?calls, "sandbox");
        for lack in &self.lacks {
            warn!("the sandbox is incomplete: {lack}");
        }
        if self.has_rbd {
            warn!("the sandbox is wider for librbd, which opens its own files and connections");
        }
    }

    /// Makes all further uses of names requests to the opener. Ends this process when a helper ends.
    ///
    /// # Errors
    /// The process cannot start a thread.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.running = self.helpers.take().map(Helpers::start).transpose()?;
        Ok(())
    }

    /// Takes all system calls from all threads that this program does not make. Returns the notes of those
    /// that are refused from now on.
    ///
    /// # Errors
    /// The kernel refuses the filter.
    pub(crate) fn lock(&mut self) -> Result<Option<&'static Refusals>> {
        self.places.clear();
        let profile = if self.has_rbd { &DATA_WITH_RBD } else { &DATA };
        if self.kernel.has_filters { Ok(kickless_sandbox::lock(profile)?) } else { Ok(None) }
    }
}

/// Logs calls that were refused, each once.
pub(crate) fn log_refusals(refusals: &Refusals) {
    for refusal in refusals.take_new() {
        let path = refusal.path.as_deref().map(Path::display).map(tracing::field::display);
        warn!(call = refusal.call, path, count = refusal.count, "the sandbox refused a system call");
    }
}

/// Returns what the operator lets the devices of this service use.
fn authority(service: &Service) -> Result<Authority> {
    let (mut named, mut libraries) = (Vec::new(), Vec::new());
    for device in &service.devices {
        for grant in device.grants() {
            if let Target::Library { name, .. } = &grant.to {
                let option = device.option(service.notation, grant.option);
                match service.sandbox.mode {
                    Mode::On if name == rbd::NAME => libraries.push(name.clone()),
                    Mode::Strict if name == rbd::NAME => bail!(
                        "{option}: librbd opens and connects itself, which strict refuses: give --sandbox=on"
                    ),
                    _ => bail!(
                        "{option}: the sandbox has no room for what the library {name} opens: give --sandbox=off"
                    ),
                }
            }
            named.push(grant.to);
        }
    }
    let calls = match service.sandbox.mode {
        _ if !service.control.is_on() => Calls::Nothing,
        Mode::Strict => Calls::Files,
        Mode::On | Mode::Off => Calls::All,
    };
    let control = control::targets(&service.control);
    let prepared = runtime_directories();
    let roots = roots::roots(named.iter().chain(&control), &service.sandbox.roots, &prepared)?;
    Ok(Authority { named, control, roots, calls, libraries })
}
