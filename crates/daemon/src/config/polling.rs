//! The polling rule of the workers.

use std::fmt;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kickless_worker::Poll;
use serde::Serialize;

use super::notation::{Mistake, Notation};
use super::text;
use super::values::{parse_delay, parse_idle, parse_rate, show_name};

/// The polling rule of the workers: the options of the pool that change while the workers run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PollingConfig {
    /// When to poll rings instead of waiting for kicks: auto, when it saves more than it costs; always;
    /// never; rate, above a rate of visits with work [default: auto]
    #[arg(long, value_enum, value_name = "WHEN", hide_possible_values = true)]
    #[serde(serialize_with = "text::optional", skip_serializing_if = "Option::is_none")]
    pub poll: Option<PollMode>,
    /// Delay that --poll=auto may add to a request to save CPU time [default: 100us]
    #[arg(long, value_name = "DURATION", value_parser = parse_delay)]
    #[serde(serialize_with = "text::duration", skip_serializing_if = "Option::is_none")]
    pub poll_latency: Option<Duration>,
    /// Processor time that a kick costs the guest. The higher it is, the more does --poll=auto use timers
    /// instead of kicks [default: 3us]
    #[arg(long, value_name = "DURATION", value_parser = parse_delay)]
    #[serde(serialize_with = "text::duration", skip_serializing_if = "Option::is_none")]
    pub poll_kick_price: Option<Duration>,
    /// Visits with work in a second at which --poll=rate starts to poll; 0 for never. Implies --poll=rate
    /// [default: 5000]
    #[arg(long, value_name = "VISITS_PER_SEC", value_parser = parse_rate)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_start_rate: Option<u32>,
    /// Idle time after which --poll=rate stops polling a ring. Implies --poll=rate [default: 3s]
    #[arg(long, value_name = "DURATION", value_parser = parse_idle)]
    #[serde(serialize_with = "text::duration", skip_serializing_if = "Option::is_none")]
    pub poll_stop_idle: Option<Duration>,
}

/// The value of the option `poll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PollMode {
    /// Polls when it saves more than it costs.
    Auto,
    /// Polls all the time.
    Always,
    /// Does not poll.
    Never,
    /// Polls above a rate of visits with work.
    Rate,
}

impl fmt::Display for PollMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_name(*self, f)
    }
}

impl PollingConfig {
    /// Returns the rule for the workers.
    ///
    /// # Errors
    /// Some options cannot be combined. The error names them in `notation`.
    pub fn rule(&self, notation: Notation) -> Result<Poll, Mistake> {
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
                let (rate, mode) = (notation.with_value("poll", "rate"), notation.with_value("poll", mode));
                return Err(Mistake::new(option, format!("it is for {rate}; leave it or {mode} out")));
            }
        };
        let of_auto = [
            ("poll-latency", self.poll_latency.is_some()),
            ("poll-kick-price", self.poll_kick_price.is_some()),
        ];
        let of_auto = of_auto.into_iter().find_map(|(option, given)| given.then_some(option));
        if let Some(option) = of_auto.filter(|_| mode != PollMode::Auto) {
            let auto = notation.with_value("poll", "auto");
            let other = match of_rate {
                Some(option) => notation.option(option),
                None => notation.with_value("poll", mode),
            };
            return Err(Mistake::new(option, format!("it is for {auto}; leave it or {other} out")));
        }
        Ok(match mode {
            PollMode::Auto => Poll::Auto {
                latency: self.poll_latency.unwrap_or(Poll::LATENCY),
                kick_price: self.poll_kick_price.unwrap_or(Poll::KICK_PRICE),
            },
            PollMode::Always => Poll::Always,
            PollMode::Never => Poll::Never,
            PollMode::Rate => Poll::Rate {
                start_per_sec: self.poll_start_rate.unwrap_or(Poll::START_PER_SEC),
                stop_idle: self.poll_stop_idle.unwrap_or(Poll::STOP_IDLE),
            },
        })
    }
}
