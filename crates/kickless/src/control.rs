//! The control sockets of a daemon.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_control::{Access, Daemon, Hooks, Server};
use kickless_daemon::{Listener, PoolConfig, Registry};
use kickless_io::Waker;

use crate::cli::ControlOptions;
use crate::log;

/// The mode of a control socket. Its group can be given to operators.
const MODE: u32 = 0o660;

/// The control sockets before they are served.
pub(crate) struct Sockets(Vec<(Listener, Access)>);

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
    pool: PoolConfig,
    stop: Waker,
) -> Result<Option<Server>> {
    if sockets.0.is_empty() {
        return Ok(None);
    }
    let hooks = Hooks { stop: Box::new(move || stop.wake()), set_log: Box::new(log::set_filter) };
    let daemon = Arc::new(Daemon::new(registry.clone(), pool, hooks));
    Server::start(daemon, sockets.0).map(Some).context("the control sockets cannot be served")
}
