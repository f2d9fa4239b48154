//! The options to take over from a running daemon.

use std::path::PathBuf;

use clap::Args;
use kickless_control::check_drain;
use kickless_values::parse_duration;

/// The daemon to take over from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Upgrade")]
pub(crate) struct UpgradeOptions {
    /// Take over from the daemon with this control socket, while its guests go on. If that fails, serve
    /// nothing: the daemon goes on
    #[arg(long, value_name = "SOCKET")]
    pub(crate) upgrade_from: Option<PathBuf>,
    /// Longest time that requests in flight have to complete in the other daemon, from 100ms to 30s
    #[arg(long, value_name = "DURATION", default_value = "2s", requires = "upgrade_from", value_parser = parse_drain)]
    pub(crate) upgrade_drain: DrainTime,
    /// Serve in a process of its own, and return when it has taken over, or has failed. For ExecReload= of
    /// systemd
    #[arg(long, requires = "upgrade_from")]
    pub(crate) background: bool,
}

/// A duration as the operator wrote it, which the other daemon reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DrainTime(pub(crate) String);

fn parse_drain(text: &str) -> Result<DrainTime, String> {
    check_drain(parse_duration(text)?)?;
    Ok(DrainTime(text.to_owned()))
}
