//! `kickless metrics`: counters of a running daemon for Prometheus.
//!
//! This is a process of its own, so that the daemon parses no HTTP. Each scrape is two calls on a control
//! socket, of which the read-only one is enough.
#![cfg_attr(not(test), expect(clippy::disallowed_methods, reason = "this command is no daemon"))]

mod http;

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use kickless_control::{Client, ClientError, Exposition, Stats, exposition};
use kickless_sandbox::Mode;
use serde::Deserialize;
use serde_json::Map;
use tracing::info;

use crate::cli::Metrics;
use crate::replace::replace;
use crate::sandbox::{Exporter, log_refusals};

/// The time that the daemon has for an answer. Its calls wait for nothing, so a daemon that takes longer is
/// stopped or overloaded.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Serves, writes or prints the metrics. `log` starts the log, which has a thread. `print` writes a text to
/// standard output.
///
/// # Errors
/// No daemon answers, or the metrics cannot be written. The error is one sentence.
pub(crate) fn metrics(
    options: &Metrics,
    log: impl FnOnce() -> Result<()>,
    print: fn(&str) -> Result<()>,
) -> Result<()> {
    let control = options.control.path();
    if let Some(address) = options.listen {
        return serve(address, options.sandbox, log, control);
    }
    log()?;
    let text = scrape(&control, Exposition::Prometheus).inspect_err(|_| {
        // The old metrics would be read as if they were true now.
        options.textfile.iter().for_each(|path| drop(fs::remove_file(path)));
    })?;
    match &options.textfile {
        // A collector of text files reads only names that end with `.prom`, and not the one before the
        // rename.
        Some(path) => replace(path, &text, None).with_context(|| format!("--textfile={}", path.display())),
        None => print(&text),
    }
}

/// Serves the metrics until the process ends.
///
/// # Errors
/// The address cannot be served, or the sandbox cannot be made. The error is one sentence.
fn serve(address: SocketAddr, mode: Mode, log: impl FnOnce() -> Result<()>, control: PathBuf) -> Result<()> {
    let about = || format!("--listen={address}");
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            anyhow!("another program has this port, perhaps kickless-metrics.service: choose another one")
        }
        _ => error.into(),
    });
    let listener = listener.with_context(about)?;
    let address = listener.local_addr().with_context(about)?;
    let sandbox = Exporter::enter(mode)?;
    log()?;
    let refusals = sandbox.map(Exporter::lock).transpose()?.flatten();
    info!(sandbox = %mode, %address, "serving metrics");
    let page = move |format| {
        let page = scrape(&control, format);
        refusals.into_iter().for_each(|refusals| log_refusals(refusals.take_new()));
        page
    };
    http::serve(&listener, Arc::new(page)).with_context(about)
}

/// Returns the metrics of the daemon.
fn scrape(control: &Path, format: Exposition) -> Result<String> {
    let about = || format!("--control={}", control.display());
    let mut client =
        Client::connect(control).and_then(|client| client.within(ANSWER_WAIT)).with_context(about)?;
    let read = |client: &mut Client| -> Result<String, ClientError> {
        let unreadable = |error: serde_json::Error| ClientError::Answer(error.to_string());
        let info = client.call("daemon.info", Map::new())?;
        let stats = client.call("stats.get", Map::new())?;
        let stats = Stats::deserialize(stats).map_err(unreadable)?;
        let version = info["version"].as_str().unwrap_or_default();
        Ok(exposition(format, version, &stats, &kickless_kinds::kinds()))
    };
    read(&mut client).with_context(about)
}
