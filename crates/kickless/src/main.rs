//! kickless: virtual machine disks and network cards over vhost-user.
//!
//! This crate contains only the program: the command line, the log, the inherited socket, and the wiring of
//! the other crates, which do not depend on one another. No file names a kind of device.

// Printing blocks if standard output or error blocks, and panics if it fails.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

#[cfg(debug_assertions)]
mod attack;
mod cli;
mod config;
mod control;
mod ctl;
mod exit;
mod inherited;
mod log;
mod metrics;
mod notify;
mod reload;
mod replace;
mod sandbox;
mod serve;
mod service;
mod signals;
#[cfg(debug_assertions)]
mod stall;
mod store;
#[cfg(test)]
mod testing;
mod top;
mod uevents;
mod upgrade;
mod wire;
mod wrong_use;

use std::io::{Write, stdout};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};

use cli::{Invocation, Work};
use kickless_bench::Interrupted;
use kickless_daemon::{Shelved, sentence};
use notify::ServiceState;
use rustix::process::geteuid;
use serve::Start;
use service::Service;
use upgrade::{Upgrade, background};
use wrong_use::WrongUse;

/// The exit status of a wrong command line ([`WrongUse`]). That of all other errors is 1.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let invocation = match cli::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(sentence) => {
            log::print_sentence(&sentence);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if let Invocation::Run { log_format, .. } = &invocation {
        log::set_format(*log_format);
    }
    if matches!(&invocation, Invocation::Run { work: Work::ServeFile { upgrade, .. }, .. } if upgrade.background)
    {
        match background::enter() {
            Ok(None) => {}
            Ok(Some(status)) => return status,
            Err(error) => {
                log::print_sentence(&sentence(&*error));
                return ExitCode::FAILURE;
            }
        }
    }
    let outcome = match invocation {
        Invocation::Print(text) => print(&text),
        Invocation::Run { log_level, work, .. } => run(&log_level, work),
    };
    if let Err(error) = &outcome {
        background::fail(&sentence(&**error));
    }
    log::end();
    if let Some(interrupted) = outcome.as_ref().err().and_then(|error| error.downcast_ref::<Interrupted>()) {
        interrupted.end();
    }
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if WrongUse::is(&error) => ExitCode::from(EXIT_USAGE),
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output cannot be written to")
}

fn run(log_level: &cli::LogLevel, work: Work) -> Result<()> {
    let log = || log::start("", log_level);
    match work {
        Work::Serve(service) => serve(log_level, || Ok(*service)),
        Work::Check(config) => config::check(&config).and_then(|line| print(&line)),
        Work::ServeFile { config, control, sandbox, upgrade, all_or_nothing } => {
            let read = |service| Service { control, sandbox, upgrade, all_or_nothing, ..service };
            serve(log_level, || config::read(&config).map(read))
        }
        Work::Ctl(ctl) => log().and_then(|()| ctl::call(&ctl, print)),
        Work::Metrics(options) => metrics::metrics(&options, log, print),
        Work::Store(control) => log().and_then(|()| store::put(&control.path())),
        Work::Top(options) => log().and_then(|()| top::top(&options, print)),
        Work::Bench(bench) => {
            // The benchmark reports errors of the driver in its result, so the log leaves them out.
            log::start("kickless_driver=off,", log_level)?;
            kickless_bench::carry_out(&bench, print)
        }
        Work::Completions(shell) => print(&cli::completions(shell)),
        Work::Man(directory) => cli::write_man(&directory)
            .with_context(|| format!("{} cannot be written to", directory.display())),
    }
}

/// Serves devices. The first thread of the process is made after it has lost its rights.
fn serve(log_level: &cli::LogLevel, service: impl FnOnce() -> Result<Service>) -> Result<()> {
    let mut noted = inherited::note();
    exit::exit_on_panic(kickless_disk::catches_panic);
    let service = service()?;
    service.check()?;
    wire::check_cpus(&service)?;
    serve::raise_descriptor_limit();
    kickless_memory::prepare_to_explain();
    #[cfg(debug_assertions)]
    attack::prepare().and_then(|()| upgrade::fault::prepare()).and_then(|()| stall::prepare())?;
    let (upgrade, user) = (Upgrade::connect(&service.upgrade)?, geteuid().as_raw());
    // Without a file, the only device takes the only socket by its number.
    let passed = if service.file.is_some() { inherited::passed(&noted)? } else { Vec::new() };
    let sockets = inherited::sockets(&mut noted, &passed, &service, store::NAME)?;
    let is_stored = passed.iter().any(|(_, name)| name == store::NAME);
    if upgrade.is_none() && !is_stored {
        service.check_sockets(|name| sockets.contains_key(name))?;
    }
    // A daemon that serves is better than none.
    let messages = notify::messages().unwrap_or_else(|error| {
        log::print_sentence(&format!("{}, so it learns nothing of this process", sentence(&*error)));
        None
    });
    let (messages, mut relay) = messages.unzip();
    // The last step before the process loses its rights: an end after this one loses what was stored.
    let shelved = store::take(&mut noted, &passed);
    let of_this_process: Vec<_> = upgrade
        .iter()
        .flat_map(Upgrade::fds)
        .chain(noted.fds())
        .chain(shelved.iter().flat_map(Shelved::fds))
        .chain(sockets.values().map(|socket| socket.socket.as_fd()))
        .chain(messages.iter().map(AsFd::as_fd))
        .collect();
    // Sentences of a process without these rights need them.
    kickless_opener::note_host();
    if upgrade.is_none() && shelved.is_none() {
        kickless_opener::note_holders(service.images().iter().map(PathBuf::as_path));
    }
    let sandbox = sandbox::enter(&service, &of_this_process, &mut relay)?;
    log::start("", log_level)?;
    let state = Arc::new(ServiceState::new(messages));
    serve::serve(service, Start { noted, sockets, sandbox, upgrade, shelved, state, relay, user })
}
