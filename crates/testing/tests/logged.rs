//! Tests `logged`, the helper that captures the log of one thread.
//!
//! This is a program of its own, so no other log exists when the call site in `log` is reached first.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_testing::logged;
use std::thread;

fn log() {
    tracing::info!("a line");
}

#[test]
fn a_line_is_captured_although_another_thread_logs_it_first() {
    let ((), log) = logged(|| {
        thread::spawn(log).join().unwrap();
        log();
    });
    assert_eq!(log.matches("a line").count(), 1, "{log}");
}
