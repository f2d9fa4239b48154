//! kickless: virtual machine disks and network cards over vhost-user.
//!
//! This crate is the program and nothing else: the command line, the log, the socket, and the wiring of the parts, which
//! know nothing of one another (`wire` alone names the kinds of devices).

// Both block, and panic where they fail.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod capabilities;
mod cli;
mod config;
mod exit;
mod inherited;
mod log;
mod serve;
mod service;
mod signals;
mod uevents;
mod wire;

use std::io::{Write, stdout};
use std::process::ExitCode;

use anyhow::{Context, Result};

use cli::{Request, Work};

/// A wrong command line; everything else that goes wrong is 1.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let request = match cli::parse(std::env::args_os()) {
        Ok(request) => request,
        Err(sentence) => {
            log::say(&sentence);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let outcome = match request {
        Request::Print(text) => print(&text),
        Request::Run { log_level, work } => run(&log_level, work),
    };
    if let Err(error) = &outcome {
        log::say(&kickless_daemon::sentence(&**error));
    }
    log::end();
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output cannot be written to")
}

fn run(log_level: &cli::LogLevel, work: Work) -> Result<()> {
    // What the driver reports of a back-end is the benchmark's result: it is said once.
    let but = if matches!(work, Work::Bench(_)) { "kickless_driver=off," } else { "" };
    log::start(but, log_level)?;
    match work {
        Work::Serve(service) => serve::serve(service),
        Work::ServeFile(path) => serve::serve(config::read(&path)?),
        Work::Bench(bench) => kickless_bench::carry_out(&bench, print),
    }
}
