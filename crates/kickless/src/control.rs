//! The control sockets of a daemon.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_control::{Access, Daemon, Hooks, SandboxInfo, Server};
use kickless_daemon::{PassedListener, Registry};
use kickless_io::Waker;
use kickless_opener::{Listener, Target};
use tracing::info;

use crate::cli::ControlOptions;
use crate::log;
use crate::reload::Reload;
use crate::upgrade::HandOver;

/// The mode of a control socket. Its group can be given to operators.
const MODE: u32 = 0o660;

/// The control sockets before they are served.
#[derive(Default)]
pub(crate) struct Sockets(Vec<(Listener, Access)>);

/// Returns the control sockets, for the process that makes them.
pub(crate) fn targets(options: &ControlOptions) -> Vec<Target> {
    let paths = options.control.iter().chain(&options.control_read_only);
    paths.map(|path| Target::Socket { path: path.clone(), mode: Some(MODE), group: None }).collect()
}

/// Makes the control sockets. A client that connects waits until [`start`].
///
/// # Errors
/// A socket cannot be made. The error is one sentence.
pub(crate) fn bind(options: &ControlOptions) -> Result<Sockets> {
    let bind = |path: &Path, option: &str| {
        Listener::bind(path, MODE).with_context(|| format!("--{option}={}", path.display()))
    };
    let mut sockets = Vec::new();
    if let Some(path) = &options.control {
        sockets.push((bind(path, "control")?, Access::Full));
    }
    if let Some(path) = &options.control_read_only {
        sockets.push((bind(path, "control-read-only")?, Access::ReadOnly));
    }
    for (listener, access) in &sockets {
        let path = listener.name().map(|name| name.path.display().to_string());
        let mode = listener.rights().map(|rights| format!("{:04o}", rights.mode));
        let owner = listener.rights().map(|rights| format!("{}:{}", rights.uid, rights.gid));
        info!(socket = path, mode, owner, read_only = *access == Access::ReadOnly, "control socket");
    }
    Ok(Sockets(sockets))
}

impl Sockets {
    /// Returns the sockets.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = &Listener> {
        self.0.iter().map(|(listener, _)| listener)
    }
}

/// Makes the control sockets that another process does not pass. Done before that one stops anything.
///
/// # Errors
/// A socket cannot be made. The error is one sentence.
pub(crate) fn bind_missing(options: &ControlOptions, passed: &[PassedListener]) -> Result<Sockets> {
    let missing = |path: &Option<PathBuf>| {
        path.clone().filter(|path| !passed.iter().any(|passed| has_path(passed, path)))
    };
    bind(&ControlOptions {
        control: missing(&options.control),
        control_read_only: missing(&options.control_read_only),
    })
}

fn has_path(passed: &PassedListener, path: &Path) -> bool {
    passed.name.as_ref().is_some_and(|name| name.path == path)
}

/// Takes the control sockets of a process that has ended, beside those that it did not have.
pub(crate) fn take_over(options: &ControlOptions, own: Sockets, mut passed: Vec<PassedListener>) -> Sockets {
    let Sockets(mut sockets) = own;
    for (path, access) in [(&options.control, Access::Full), (&options.control_read_only, Access::ReadOnly)] {
        let is_it = |passed: &PassedListener| path.as_ref().is_some_and(|path| has_path(passed, path));
        if let Some(at) = passed.iter().position(is_it) {
            sockets.push((passed.swap_remove(at).into_listener(), access));
        }
    }
    // The names of sockets that are not served any more are removed.
    passed.into_iter().for_each(|passed| drop(passed.into_listener()));
    Sockets(sockets)
}

/// Serves the control sockets. A call can signal `stop`, which ends the daemon.
///
/// # Errors
/// The thread cannot be started. The error is one sentence.
pub(crate) fn start(
    sockets: Sockets,
    registry: &Arc<Registry>,
    sandbox: SandboxInfo,
    reload: Option<Reload>,
    hand_over: Arc<HandOver>,
    stop: Waker,
) -> Result<Option<Server>> {
    if sockets.0.is_empty() {
        return Ok(None);
    }
    let reload = move |used| match &reload {
        Some(reload) => reload.call(used),
        None => Err("the daemon was started without a configuration file".into()),
    };
    let hooks = Hooks {
        stop: Box::new(move || stop.wake()),
        reload: Box::new(reload),
        set_log: Box::new(log::set_filter),
        user: hand_over.user,
        upgrade: Box::new(move |successor| hand_over.begin(successor)),
    };
    let daemon = Arc::new(Daemon::new(registry.clone(), sandbox, hooks));
    Server::start(daemon, sockets.0).map(Some).context("the control sockets cannot be served")
}
