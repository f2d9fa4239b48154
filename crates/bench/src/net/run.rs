//! Runs one turn: a scenario on a card.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use kickless_driver::{Card, CardOptions};
use kickless_spec::net::NetFeatures;

use super::load::{Loader, Shown, ThreadResult, TurnContext};
use super::options::{Direction, NetLoadOptions};
use super::packet::Work;
use super::scenario::Scenario;
use crate::cpu::CpuMeter;
use crate::progress::Progress;
use crate::target::Target;
use crate::threads::Threads;
use crate::turn::Turn;
use crate::watch::{Period, Sample, part_of, watch};

/// Runs `scenario` on `target`.
///
/// # Errors
/// The target cannot be reached, lacks a required feature, or dies.
pub(crate) fn turn(
    scenario: &Scenario,
    target: &Target,
    load: &NetLoadOptions,
    stop: &AtomicBool,
    progress: &Progress,
) -> Result<Turn> {
    run(scenario, target, load, stop, progress).with_context(|| target.name().to_owned())
}

fn run(
    scenario: &Scenario,
    target: &Target,
    load: &NetLoadOptions,
    stop: &AtomicBool,
    progress: &Progress,
) -> Result<Turn> {
    let options = scenario.card_options(target.socket(), load);
    let card = Card::connect(CardOptions { connect_timeout: target.connect_timeout(), ..options })?;
    if card.pairs() < usize::from(scenario.pairs) {
        bail!("it has {} queue pairs: lower --pairs={}", card.pairs(), scenario.pairs);
    }
    let has_segments = matches!(scenario.work, Some(Work::Segments(_)));
    if has_segments {
        requires(&card, NetFeatures::HOST_TSO4, "VIRTIO_NET_F_HOST_TSO4")?;
    }
    let shown: Vec<Shown> = (0..scenario.pairs).map(|_| Shown::default()).collect();
    let halted = AtomicBool::new(false);
    let from = scenario.warm_up.as_nanos() as u64;
    let period = Period { epoch: Instant::now(), from, to: from + scenario.time.as_nanos() as u64 };
    let shared = TurnContext { scenario, period, stop: &halted };
    let mut loaders = Vec::new();
    let missing = "a queue pair is missing";
    let peer = match scenario.direction {
        Direction::Pass => {
            let options = scenario.card_options(&target.peer_socket(), load);
            let connect_timeout = target.connect_timeout();
            let peer = Card::connect(CardOptions { connect_timeout, ..options });
            Some(peer.with_context(|| target.peer_socket().display().to_string())?)
        }
        _ => None,
    };
    if has_segments && scenario.direction != Direction::Transmit {
        requires(peer.as_ref().unwrap_or(&card), NetFeatures::GUEST_TSO4, "VIRTIO_NET_F_GUEST_TSO4")?;
    }
    for (thread, shown) in (0..scenario.pairs).zip(&shown) {
        let pair = card.pair(thread.into()).context(missing)?;
        let peer = match &peer {
            Some(peer) => Some(peer.pair(thread.into()).context(missing)?),
            None => None,
        };
        loaders.push(Loader::new(&shared, pair, peer, thread, shown)?);
    }
    let meter = CpuMeter::start(target.pid())?;
    let is_plotted = load.common.output.plot_time.is_some();
    let (seen, moments) = thread::scope(|scope| {
        let loads = loaders.into_iter().map(|loader| || loader.run());
        let running = Threads::start(scope, load.common.rings.cpu.as_ref(), loads);
        let sum = |figure: fn(&Shown) -> u64| shown.iter().map(figure).sum();
        let look = || Sample {
            done: sum(|shown| shown.done.load(Ordering::Relaxed)),
            kicks: sum(|shown| shown.kicks.load(Ordering::Relaxed)),
            // A back-end that has exited gives no figure here. The check after the turn reports it.
            back_end_cpu: meter.back_end(),
        };
        let part = part_of(scenario.time, is_plotted);
        let moments = watch(&period, part, look, stop, progress, || running.is_one_finished());
        running.wait(|| {
            // A signal ends the turn.
            halted.fetch_or(stop.load(Ordering::Relaxed), Ordering::Relaxed);
            false
        });
        let seen = running.join();
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok((seen?, moments))
    })?;
    let turn = Turn::new(scenario.time, meter.used()?, moments, is_plotted)?;
    seen.into_iter().try_fold(turn, add)
}

/// Checks that a card has a feature.
///
/// # Errors
/// It was not offered.
fn requires(card: &Card, feature: NetFeatures, name: &str) -> Result<()> {
    match card.net_features().contains(feature) {
        true => Ok(()),
        false => bail!("it does not offer {name}, which --gso-size needs"),
    }
}

fn add(mut turn: Turn, seen: ThreadResult) -> Result<Turn> {
    turn.latencies.add(&seen.latencies)?;
    turn.done += seen.done;
    turn.submitted += seen.total;
    turn.unsent += seen.unsent;
    turn.lost += seen.lost;
    turn.kicks += seen.kicks;
    turn.calls = turn.calls.wrapping_add(seen.calls);
    Ok(turn)
}
