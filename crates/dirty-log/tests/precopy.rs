//! Runs `examples/precopy.rs` with little memory.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::Command;

#[test]
fn source_and_destination_have_equal_memory() {
    for method in ["marks", "protect"] {
        let output = Command::new(env!("CARGO"))
            .args(["run", "--quiet", "--offline", "-p", "kickless-dirty-log", "--example", "precopy", "--"])
            .args(["--mib=24", "--writers=3", &format!("--method={method}")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("downtime") && text.contains("checksums: "), "{text}");
    }
}
