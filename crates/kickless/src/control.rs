//! The control sockets of a daemon.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_control::{Access, Daemon, Hooks, SandboxInfo, Server};
use kickless_daemon::Registry;
use kickless_io::Waker;
use kickless_opener::{Listener, Target};

use crate::cli::ControlOptions;
use crate::log;
use crate::reload::Reload;

/// The mode of a control socket. Its group can be given to operators.
const MODE: u32 = 0o660;

/// The control sockets before they are served.
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
    Ok(Sockets(sockets))
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
    };
    let daemon = Arc::new(Daemon::new(registry.clone(), sandbox, hooks));
    Server::start(daemon, sockets.0).map(Some).context("the control sockets cannot be served")
}
