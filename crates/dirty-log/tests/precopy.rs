//! Runs `examples/precopy.rs` with little memory.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

/// Runs a program, which must succeed, and returns its output.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn source_and_destination_have_equal_memory() {
    // For the whole workspace, because cargo would build dependencies again with the features of one package.
    let built = ["build", "--quiet", "--offline", "--workspace", "--example", "precopy"];
    run(Command::new(env!("CARGO")).args(built));
    let example = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../debug/examples/precopy");
    for method in ["marks", "protect"] {
        let options = ["--mib=24", "--writers=3", &format!("--method={method}")];
        let text = run(Command::new(&example).args(options));
        assert!(text.contains("downtime") && text.contains("checksums: "), "{text}");
    }
}
