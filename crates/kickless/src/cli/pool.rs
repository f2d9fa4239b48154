//! The options of the workers.

use std::time::Duration;

use clap::Args;
use kickless_io::{CompletionMode, EngineKind};
use kickless_values::CpuList;
use kickless_worker::Poll;

use super::values::{
    PollMode, parse_completion, parse_delay, parse_engine, parse_idle, parse_rate, parse_workers,
};
use crate::service::{Mistake, Pool, Said};

/// What can be said of the workers.
#[derive(Debug, Args)]
pub(crate) struct PoolOptions {
    /// How I/O is done: io_uring, threads, or auto, the best of them that works here
    #[arg(long, value_name = "ENGINE", default_value_t = EngineKind::Auto, value_parser = parse_engine)]
    pub(crate) engine: EngineKind,
    /// Who submits to the kernel: worker, which completes in turn; thread, one beside each worker, which completes meanwhile
    #[arg(long, value_name = "BY", default_value_t = CompletionMode::Worker, value_parser = parse_completion)]
    pub(crate) completion: CompletionMode,
    /// Have a thread of the kernel look for what is submitted to io_uring
    #[arg(long)]
    pub(crate) sqpoll: bool,
    /// Register guest memory with io_uring, which pins it: not for machines with a balloon, free page reporting or post-copy
    #[arg(long)]
    pub(crate) fixed_buffers: bool,
    /// How many threads do the work [default: one, or one for each CPU of --cpu]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub(crate) workers: Option<u16>,
    /// Run the workers on these CPUs, such as 0-3,8
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) cpu: Option<CpuList>,
    #[command(flatten)]
    pub(crate) poll: PollOptions,
    /// Hold calls to the driver back for this long at most, to make one of several [default: not at all]
    #[arg(long, value_name = "DURATION", value_parser = parse_delay)]
    pub(crate) call_coalesce: Option<Duration>,
}

/// What can be said of polling.
#[derive(Debug, Default, Args)]
pub(crate) struct PollOptions {
    /// When to look at rings without being kicked: auto, when it pays; always; never; rate, from a rate of kicks on
    /// [default: auto]
    #[arg(long, value_enum, value_name = "WHEN", hide_possible_values = true)]
    pub(crate) poll: Option<PollMode>,
    /// The delay that auto may add to a request to save processor time [default: 100us]
    #[arg(long, value_name = "DURATION", value_parser = parse_delay)]
    pub(crate) poll_latency: Option<Duration>,
    /// The rate from which on rate polls; 0 for never. Implies --poll=rate [default: 5000]
    #[arg(long, value_name = "KICKS_PER_SEC", value_parser = parse_rate)]
    pub(crate) poll_start_rate: Option<u32>,
    /// How long rate goes on polling a ring that yields nothing. Implies --poll=rate [default: 3s]
    #[arg(long, value_name = "DURATION", value_parser = parse_idle)]
    pub(crate) poll_stop_idle: Option<Duration>,
}

impl PoolOptions {
    /// What they amount to.
    ///
    /// # Errors
    /// They do not go together.
    pub(crate) fn pool(&self, said: Said) -> Result<Pool, Mistake> {
        let cpus = self.cpu.as_ref().map_or(&[][..], |list| &list.0);
        let for_each_cpu = u16::try_from(cpus.len()).unwrap_or(u16::MAX).max(1);
        let workers = self.workers.unwrap_or(for_each_cpu);
        if usize::from(workers) < cpus.len() {
            let why = format!(
                "{workers} leaves some of the {} CPUs of {} idle: name fewer CPUs or ask for more workers",
                cpus.len(),
                said.option("cpu")
            );
            return Err(Mistake { option: "workers", why });
        }
        let of_ring = [("sqpoll", self.sqpoll), ("fixed-buffers", self.fixed_buffers)];
        if matches!(self.engine, EngineKind::Aio | EngineKind::Threads)
            && let Some((option, _)) = of_ring.into_iter().find(|(_, given)| *given)
        {
            let (ring, engine) =
                (said.with_value("engine", EngineKind::Uring), said.with_value("engine", self.engine));
            return Err(Mistake { option, why: format!("it is for {ring}; leave it or {engine} out") });
        }
        Ok(Pool {
            workers,
            cpus: cpus.to_vec(),
            engine: self.engine,
            completion: self.completion,
            sqpoll: self.sqpoll,
            fixed_buffers: self.fixed_buffers,
            poll: self.poll.poll(said)?,
            call_coalesce: self.call_coalesce.filter(|delay| !delay.is_zero()),
        })
    }
}

impl PollOptions {
    /// What they amount to.
    fn poll(&self, said: Said) -> Result<Poll, Mistake> {
        let of_rate = [
            ("poll-start-rate", self.poll_start_rate.is_some()),
            ("poll-stop-idle", self.poll_stop_idle.is_some()),
        ];
        let of_rate = of_rate.into_iter().find_map(|(option, given)| given.then_some(option));
        let mode = match (self.poll, of_rate) {
            (None, None) => PollMode::Auto,
            (None, Some(_)) | (Some(PollMode::Rate), _) => PollMode::Rate,
            (Some(mode), None) => mode,
            (Some(mode), Some(option)) => {
                let (rate, mode) = (said.with_value("poll", "rate"), said.with_value("poll", mode.name()));
                return Err(Mistake { option, why: format!("it is for {rate}; leave it or {mode} out") });
            }
        };
        if self.poll_latency.is_some() && mode != PollMode::Auto {
            let auto = said.with_value("poll", "auto");
            let other = match of_rate {
                Some(option) => said.option(option),
                None => said.with_value("poll", mode.name()),
            };
            return Err(Mistake {
                option: "poll-latency",
                why: format!("it is for {auto}; leave it or {other} out"),
            });
        }
        Ok(match mode {
            PollMode::Auto => Poll::Auto { latency: self.poll_latency.unwrap_or(Poll::LATENCY) },
            PollMode::Always => Poll::Always,
            PollMode::Never => Poll::Never,
            PollMode::Rate => Poll::Rate {
                start_per_sec: self.poll_start_rate.unwrap_or(Poll::START_PER_SEC),
                stop_idle: self.poll_stop_idle.unwrap_or(Poll::STOP_IDLE),
            },
        })
    }
}
