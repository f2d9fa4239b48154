//! A daemon in a sandbox: its processes, their rights, and the things of the host that it uses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod files;
mod images;
mod names;
mod processes;

use common::{Daemon, disk};

fn sandboxed(arguments: &[&str]) -> Daemon {
    let daemon = Daemon::serve(&disk("a", ""), arguments);
    daemon.wait_for("serving");
    daemon
}
