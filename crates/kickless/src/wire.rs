//! Makes the registry and the pool of a service.

use anyhow::{Context, Result};
use kickless_daemon::Registry;
use kickless_io::{EngineKind, OWNERS_MAX};
use kickless_opener::Descriptors;
use kickless_values::CpuList;
use kickless_worker::{Options, Poll, WorkerPool};
use tracing::info;

use crate::service::Service;

/// Makes a registry for the devices of a service. They can use the descriptors that the program inherited for
/// them. `has_others`: devices come that the service does not name.
///
/// # Errors
/// The process has no free descriptor.
pub(crate) fn registry(service: &Service, inherited: Descriptors, has_others: bool) -> Result<Registry> {
    let has_any = has_others || service.control.is_on() || service.upgrade.upgrade_from.is_some();
    let devices_max = if has_any { OWNERS_MAX as usize } else { service.devices.len() };
    Registry::with_inherited(devices_max, kickless_kinds::kinds(), inherited)
        .context("no free descriptor to wait with")
}

/// Starts the workers. Returns their options too.
///
/// # Errors
/// The workers cannot be started. The error is one sentence.
pub(crate) fn pool(service: &Service, devices_max: usize) -> Result<(WorkerPool, Options)> {
    let devices_max = u32::try_from(devices_max).unwrap_or(u32::MAX);
    let options = service.pool.worker_options(devices_max, service.notation);
    let options = options.map_err(|mistake| service.mistake(None, &mistake.option, &mistake.why))?;
    let pool = WorkerPool::start(&options).with_context(|| match service.pool.engine {
        EngineKind::Auto => "the workers cannot be started".to_owned(),
        engine => format!(
            "{}: the workers cannot be started with {engine}, and auto would take another engine",
            service.place(None, "engine")
        ),
    })?;
    Ok((pool, options))
}

/// Logs the workers, which have these options.
pub(crate) fn log_pool(pool: &WorkerPool, options: &Options) {
    pool.log_engine();
    let poll = match options.poll {
        Poll::Auto { .. } => "auto",
        Poll::Always => "always",
        Poll::Never => "never",
        Poll::Rate { .. } => "rate",
    };
    info!(workers = options.workers, poll, "pool");
}

/// Checks that this machine has the CPUs of the workers.
///
/// # Errors
/// A CPU does not exist or is offline. The error is one sentence.
pub(crate) fn check_cpus(service: &Service) -> Result<()> {
    // If the host does not list its CPUs, the workers find out when they start.
    let Ok(online) = kickless_opener::cpus_online() else { return Ok(()) };
    let online = online.trim();
    let Ok(CpuList(here)) = online.parse() else { return Ok(()) };
    match service.pool.cpus().iter().find(|cpu| !here.contains(cpu)) {
        None => Ok(()),
        Some(cpu) => {
            let why = format!(
                "CPU {cpu} does not exist or is offline: this machine has {online}, name some of these"
            );
            Err(service.mistake(None, "cpu", &why))
        }
    }
}
