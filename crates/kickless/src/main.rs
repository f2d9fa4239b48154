//! kickless: virtual machine disks and network cards over vhost-user.
//!
//! This crate contains only the program: the command line, the log, the inherited socket, and the wiring of
//! the other crates, which do not depend on one another. No file names a kind of device.

// Printing blocks if standard output or error blocks, and panics if it fails.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod cli;
mod config;
mod control;
mod ctl;
mod exit;
mod inherited;
mod log;
mod metrics;
mod reload;
mod replace;
mod serve;
mod service;
mod signals;
#[cfg(test)]
mod testing;
mod top;
mod uevents;
mod wire;

use std::io::{Write, stdout};
use std::process::ExitCode;

use anyhow::{Context, Result};

use cli::{Invocation, Work};
use service::Service;

/// The exit status of a wrong command line. That of all other errors is 1.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let invocation = match cli::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(sentence) => {
            log::print_sentence(&sentence);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let outcome = match invocation {
        Invocation::Print(text) => print(&text),
        Invocation::Run { log_level, work } => run(&log_level, work),
    };
    if let Err(error) = &outcome {
        log::print_sentence(&kickless_daemon::sentence(&**error));
    }
    log::end();
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output cannot be written to")
}

fn run(log_level: &cli::LogLevel, work: Work) -> Result<()> {
    // The benchmark reports errors of the driver in its result, so the log leaves them out.
    let base = if matches!(work, Work::Bench(_)) { "kickless_driver=off," } else { "" };
    log::start(base, log_level)?;
    match work {
        Work::Serve(service) => serve::serve(*service),
        Work::ServeFile { config, control, all_or_nothing } => {
            serve::serve(Service { control, all_or_nothing, ..config::read(&config)? })
        }
        Work::Ctl(ctl) => ctl::call(&ctl, print),
        Work::Metrics(options) => metrics::metrics(&options, print),
        Work::Top(options) => top::top(&options, print),
        Work::Bench(bench) => kickless_bench::carry_out(&bench, print),
        Work::Man(directory) => cli::write_man(&directory)
            .with_context(|| format!("{} cannot be written to", directory.display())),
    }
}
