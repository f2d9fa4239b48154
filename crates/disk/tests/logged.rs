//! The log of one thread, as the other tests read it. A program of its own: its call site is reached for the first time
//! while this is the only log of the process.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::logged;
use std::thread;

fn log() {
    tracing::info!("a line");
}

#[test]
fn a_line_is_logged_though_another_thread_is_first() {
    let ((), log) = logged(|| {
        thread::spawn(log).join().unwrap();
        log();
    });
    assert_eq!(log.matches("a line").count(), 1, "{log}");
}
