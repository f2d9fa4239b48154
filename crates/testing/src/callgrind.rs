//! Counts the instructions that this program runs. Their number is the same each time.

use std::process::Command;

/// Runs this program with `argument` in valgrind and returns the number of counted instructions.
///
/// It counts the functions whose names contain `counted_submit` or `counted_complete`, and the functions that
/// these call. Returns `None` if valgrind cannot count them.
pub fn counted_instructions(argument: &str) -> Option<f64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"])
        .args(["--toggle-collect=*counted_submit*", "--toggle-collect=*counted_complete*"])
        .arg(std::env::current_exe().ok()?)
        .arg(argument)
        .output()
        .ok()?;
    let log = String::from_utf8_lossy(&output.stderr);
    let (_, collected) = log.split_once("Collected :")?;
    let count: f64 = collected.split_ascii_whitespace().next()?.parse().ok()?;
    (output.status.success() && count > 0.0).then_some(count)
}
