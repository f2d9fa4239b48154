//! The log: structured lines on standard error.

use std::io::{IsTerminal, stderr};

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

/// Starts logging what `filter` lets through, or `but`, which goes before it, where `filter` says nothing more exact.
///
/// # Errors
/// `filter` is no filter.
pub(crate) fn start(but: &str, filter: &str) -> Result<()> {
    let filter = EnvFilter::builder().parse(format!("{but}{filter}")).with_context(|| {
        format!("--log-level={filter} is neither a level such as info nor a list of them")
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .try_init()
        .map_err(|error| anyhow::anyhow!("logging cannot be started: {error}"))
}
