//! Makes an upgrade fail at one of its steps, for tests. Release builds do not have this module.
//!
//! The variable of the environment has the end, the number of the step and the fault: `old:9:kill`,
//! `new:4:stop`, `old:2:exit`, `new:10:error`. It happens once in a process. A process that has stopped goes
//! on at SIGCONT.

use std::env;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use kickless_daemon::{End, set_step_hook};
use signal_hook::consts::{SIGKILL, SIGSTOP};
use signal_hook::low_level::raise;

use crate::exit;

#[cfg(not(debug_assertions))]
compile_error!("only tests need faults");

/// The variable that has the fault.
const VARIABLE: &str = "KICKLESS_UPGRADE_FAULT";

static HAS_HAPPENED: AtomicBool = AtomicBool::new(false);

/// Reads the variable.
///
/// # Errors
/// It names no fault.
pub(crate) fn prepare() -> Result<()> {
    let Ok(value) = env::var(VARIABLE) else { return Ok(()) };
    let known = ["kill", "stop", "exit", "error"];
    match value.split(':').collect::<Vec<_>>()[..] {
        ["old" | "new", step, fault] if step.parse::<u32>().is_ok() && known.contains(&fault) => {}
        _ => bail!("{VARIABLE}={value}: it must be old or new, a step and kill, stop, exit or error"),
    }
    set_step_hook(at_step);
    Ok(())
}

fn at_step(end: End, step: u32) -> Result<(), String> {
    let value = env::var(VARIABLE).unwrap_or_default();
    let end = if end == End::Old { "old" } else { "new" };
    let fault = value.strip_prefix(&format!("{end}:{step}:"));
    let Some(fault) = fault.filter(|_| !HAS_HAPPENED.swap(true, Ordering::Relaxed)) else { return Ok(()) };
    // The log has a thread of its own, which may not come to it.
    let said = format!("fault: {value}\n");
    let _ = rustix::io::write(rustix::stdio::stderr(), said.as_bytes());
    match fault {
        "kill" => raise(SIGKILL).map_err(|error| error.to_string()),
        "stop" => raise(SIGSTOP).map_err(|error| error.to_string()),
        "exit" => exit::exit_now(1),
        _ => Err("a fault for a test".into()),
    }
}
