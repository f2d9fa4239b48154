//! The log: structured lines on standard error.

mod filter;

use std::io::{IsTerminal, stderr};

use anyhow::{Result, anyhow};

use crate::cli::LogLevel;

/// Starts logging what `level` lets through, or `but`, which goes before it, where `level` says nothing more exact.
///
/// # Errors
/// `level` is no filter: one sentence that names the option or the variable.
pub(crate) fn start(but: &str, level: &LogLevel) -> Result<()> {
    let filter = filter::parse(but, &level.filter).map_err(|why| anyhow!("{level}: {why}"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .try_init()
        .map_err(|error| anyhow!("logging cannot be started: {error}"))
}
