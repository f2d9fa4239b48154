//! Tests that the threads of a disk log in the span that the disk was opened in.
//!
//! This is a program of its own, because it sets the log of the whole process.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{open, spec, worker};
use kickless_disk::Request;
use kickless_testing::hostile_nbd::{HostileNbd, greet, hello, read_request};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use tracing::{Level, error_span};

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_thread_of_an_nbd_disk_logs_in_the_disks_span() {
    tracing_subscriber::fmt().with_ansi(false).with_max_level(Level::INFO).with_writer(|| Log).init();
    let server = HostileNbd::start(1, |_, stream| {
        greet(stream, &hello(false));
        let _ = read_request(stream);
    });
    let disk = error_span!("device", name = "web").in_scope(|| open(&spec(&server.uri())));
    assert!(worker(&disk).run(Request::Flush).is_err());
    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    let line = log.lines().find(|line| line.contains("the NBD server is lost")).unwrap();
    assert!(line.contains("device{name=\"web\"}"), "{log}");
}
