//! The workers that devices share.

use clap::Args;
use kickless_io::{EngineKind, EngineOptions};
use kickless_values::CpuList;
use serde::Serialize;

use super::notation::{Mistake, Notation};
use super::polling::PollingConfig;
use super::text;
use super::values::parse_workers;

/// Operations that a worker can have in flight, in addition to the reserve of each device. Further requests
/// wait in their queues.
const ENGINE_DEPTH: u32 = 1024;

/// The configuration of the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Workers, I/O and polling")]
#[serde(rename_all = "kebab-case")]
pub struct PoolConfig {
    /// Engine for I/O: io_uring, aio, threads, or auto for the best one that works on this host
    #[arg(long, value_name = "ENGINE", default_value_t = EngineKind::Auto, value_parser = str::parse::<EngineKind>)]
    #[serde(serialize_with = "text::serialize")]
    pub engine: EngineKind,
    /// Number of worker threads [default: one, or one for each CPU of --cpu]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<u16>,
    /// Run the workers on these CPUs, such as 0-3,8
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    #[serde(serialize_with = "text::optional", skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuList>,
    /// The polling rule.
    #[command(flatten)]
    #[serde(flatten)]
    pub polling: PollingConfig,
}

impl PoolConfig {
    /// Returns the options of a pool whose engines have reserves for `devices_max` devices.
    ///
    /// # Errors
    /// Some options cannot be combined. The error names them in `notation`.
    pub fn worker_options(
        &self,
        devices_max: u32,
        notation: Notation,
    ) -> Result<kickless_worker::Options, Mistake> {
        Ok(kickless_worker::Options {
            workers: self.workers(notation)?.into(),
            engine: EngineOptions {
                kind: self.engine,
                depth: ENGINE_DEPTH,
                owners: devices_max,
                lone_owner: devices_max == 1,
            },
            cpus: self.cpus().to_vec(),
            poll: self.polling.rule(notation)?,
        })
    }

    /// Returns this configuration with another polling rule.
    pub fn with_polling(&self, polling: &PollingConfig) -> Self {
        Self { polling: polling.clone(), ..self.clone() }
    }

    /// Returns the CPUs that the workers run on. An empty list stands for all CPUs.
    pub fn cpus(&self) -> &[usize] {
        self.cpu.as_ref().map_or(&[], |list| &list.0)
    }

    fn workers(&self, notation: Notation) -> Result<u16, Mistake> {
        let cpus = self.cpus();
        let for_each_cpu = u16::try_from(cpus.len()).unwrap_or(u16::MAX).max(1);
        let workers = self.workers.unwrap_or(for_each_cpu);
        if usize::from(workers) < cpus.len() {
            let why = format!(
                "{workers} leaves some of the {} CPUs of {} idle: name fewer CPUs or ask for more workers",
                cpus.len(),
                notation.option("cpu")
            );
            return Err(Mistake::new("workers", why));
        }
        Ok(workers)
    }
}
