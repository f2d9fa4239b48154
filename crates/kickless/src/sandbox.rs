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

use std::backtrace::Backtrace;
use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::Result;
use kickless_control::SandboxInfo;
use kickless_opener::{Authority, Calls, Target};
use kickless_sandbox::{
    Access, DATA, DATA_WITH_RBD, Lack, Mode, Refusal, Refusals, Ruleset, Tcp, landlock_abi, place, restrict,
};
use rustix::thread::CapabilitySet;
use tracing::{info, warn};

use crate::cli::runtime_directories;
use crate::control;
use crate::notify::Relay;
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
    /// Calls and images can name all files.
    is_wide: bool,
    calls: Calls,
    /// The helpers until [`Sandbox::start`], and afterwards.
    helpers: Option<Helpers>,
    running: Option<Running>,
    /// Their inodes must stay as they are while threads open files below them.
    places: Vec<OwnedFd>,
    has_rbd: bool,
    /// The notes of calls that are refused. All are logged when this is dropped.
    refusals: Option<&'static Refusals>,
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.refusals.iter().for_each(|refusals| log_refusals(refusals.all()));
    }
}

/// Starts the helpers, and takes capabilities and paths from this process. Must be called while it has one
/// thread. The helpers close the descriptors `close`, and one of them runs the relay. Returns nothing, and
/// leaves the relay, if the sandbox is off.
///
/// # Errors
/// The options cannot be kept in a sandbox, the kernel lacks what `strict` needs, or a helper cannot be
/// started. The error is one sentence.
pub(crate) fn enter(
    service: &Service,
    close: &[BorrowedFd<'_>],
    relay: &mut Option<Relay>,
) -> Result<Option<Sandbox>> {
    let mode = service.sandbox.mode;
    if mode == Mode::Off {
        return Ok(None);
    }
    let lacks = mode.lacks()?;
    let authority = authority(service)?;
    let rbd = rbd::files(&authority.named);
    let (roots, calls) = (authority.roots.iter(), authority.calls);
    let is_wide = roots.clone().any(|root| root.for_calls && root.directory == Path::new("/"));
    let roots = roots.map(|root| root.directory.display().to_string()).collect();
    let kernel = Kernel { landlock: landlock_abi(), has_filters: !lacks.contains(&Lack::Filters) };
    prepare_backtraces();
    let helpers = Helpers::fork(service, authority, kernel, close, relay.take())?;
    let has_rbd = rbd.is_some();
    let mut rules = Ruleset::new(kernel.landlock, if has_rbd { Tcp::Connect } else { Tcp::Nothing })?;
    if let Some(files) = rbd {
        rbd::allow(&mut rules, &files, &service.sandbox.roots)?;
    }
    // Each worker opens a file about its own thread when it starts, and one about the machine. A container
    // may have neither.
    let places = ["/proc/self/task", "/proc/stat"].into_iter().filter_map(|path| place(Path::new(path)).ok());
    let places: Vec<_> = places.collect();
    places.iter().try_for_each(|place| rules.allow(place, Access::READ_FILE))?;
    restrict(CapabilitySet::empty(), rules)?;
    Ok(Some(Sandbox {
        mode,
        kernel,
        lacks,
        roots,
        is_wide,
        calls,
        helpers: Some(helpers),
        running: None,
        places,
        has_rbd,
        refusals: None,
    }))
}

impl Sandbox {
    /// Logs what this sandbox is, and what this kernel lacks.
    pub(crate) fn report(&self) {
        let Self { mode, kernel: Kernel { landlock, .. }, roots, calls, .. } = self;
        let roots: Vec<_> = roots.iter().map(String::as_str).collect();
        info!(%mode, landlock, roots = roots.join(","), ?calls, "sandbox");
        for lack in &self.lacks {
            warn!("the sandbox is incomplete: {lack}");
        }
        if self.has_rbd {
            warn!("the sandbox is wider for librbd, which opens its own files and connections");
        }
        if self.is_wide {
            warn!("--allow-root=/ lets calls and images name all files of this host");
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
        if self.kernel.has_filters {
            let profile = if self.has_rbd { &DATA_WITH_RBD } else { &DATA };
            self.refusals = kickless_sandbox::lock(profile)?;
        }
        Ok(self.refusals)
    }
}

/// Returns the properties of a sandbox, for operators.
pub(crate) fn info(sandbox: Option<&Sandbox>) -> SandboxInfo {
    match sandbox {
        Some(Sandbox { mode, kernel: Kernel { landlock, has_filters }, roots, has_rbd, .. }) => SandboxInfo {
            mode: mode.to_string(),
            landlock: *landlock,
            profile: match (has_filters, has_rbd) {
                (false, _) => "none",
                (true, false) => "data",
                (true, true) => "data-with-rbd",
            },
            roots: roots.iter().cloned().collect(),
        },
        None => SandboxInfo { mode: Mode::Off.to_string(), landlock: 0, profile: "none", roots: Vec::new() },
    }
}

/// Logs calls that were refused.
pub(crate) fn log_refusals(refused: Vec<Refusal>) {
    for refusal in refused {
        let path = refusal.path.as_deref().map(Path::display).map(tracing::field::display);
        warn!(call = refusal.call, path, count = refusal.count, "the sandbox refused a system call");
    }
}

/// Lets later panics have backtraces, if the operator wants them. The machinery of the standard library opens
/// this program at its first use, and keeps it.
fn prepare_backtraces() {
    Backtrace::capture().to_string();
}

/// Returns what the operator lets the devices of this service use.
fn authority(service: &Service) -> Result<Authority> {
    let (mut named, mut libraries) = (Vec::new(), Vec::new());
    for device in &service.devices {
        for grant in device.grants() {
            if let Target::Library { name, .. } = &grant.to {
                let wrong = |why: &str| Err(service.mistake(device.name(), grant.option, why));
                match service.sandbox.mode {
                    Mode::On if name == rbd::NAME => libraries.push(name.clone()),
                    Mode::Strict if name == rbd::NAME => {
                        return wrong(
                            "librbd opens and connects itself, which strict refuses: give --sandbox=on",
                        );
                    }
                    _ => {
                        return wrong(&format!(
                            "the sandbox has no room for what the library {name} opens: give --sandbox=off"
                        ));
                    }
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
    let roots = roots::roots(named.iter().chain(&control), &service.sandbox.roots, &prepared, calls)?;
    Ok(Authority { named, control, roots, calls, libraries })
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::{env, thread};

    use super::*;
    use crate::exit::exit_on_panic;

    #[test]
    #[ignore = "a panicking process that the test below starts"]
    fn panics() {
        exit_on_panic(|| false);
        prepare_backtraces();
        // The filter alone refuses each path. The rest is for a process with one thread.
        rustix::thread::set_no_new_privs(true).unwrap();
        kickless_sandbox::lock(&DATA).unwrap();
        let thread = thread::Builder::new().name("worker 7".into());
        let _ = thread.spawn(|| panic!("with a trace")).unwrap().join();
    }

    #[test]
    fn a_panic_in_a_sandbox_has_a_backtrace() {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "sandbox::tests::panics", "--ignored", "--nocapture"]);
        let output = command.env("RUST_BACKTRACE", "1").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("thread \"worker 7\" panicked") && said.contains("with a trace"), "{said}");
        assert!(said.contains("kickless::sandbox::tests::panics"), "{said}");
    }
}
