//! Runs one turn: a scenario on a card.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use kickless_driver::{Card, CardOptions};
use kickless_spec::net::NetFeatures;

use super::load::{Loader, Shown, ThreadResult, TurnContext};
use super::options::{Direction, NetLoadOptions};
use super::scenario::Scenario;
use crate::cpu::{back_end_cpu, driver_cpu, pin, shorten_timer_slack};
use crate::progress::Progress;
use crate::target::Target;
use crate::turn::{Turn, latencies};
use crate::watch::{Period, Sample, part_of, watch};

/// The time between two checks whether the last frames are back.
const LAST_LOOK: Duration = Duration::from_millis(1);

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
    if scenario.gso_size.is_some() {
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
    if scenario.gso_size.is_some() && scenario.direction != Direction::Transmit {
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
    let back_end = || target.pid().map(back_end_cpu).transpose();
    let cpu = (driver_cpu(), back_end()?);
    let began = Instant::now();
    let (seen, moments) = thread::scope(|scope| {
        let running: Vec<_> = loaders
            .into_iter()
            .enumerate()
            .map(|(at, loader)| {
                scope.spawn(move || {
                    pin(load.common.rings.cpu.as_ref(), at)?;
                    shorten_timer_slack();
                    loader.run()
                })
            })
            .collect();
        let finished = || running.iter().any(thread::ScopedJoinHandle::is_finished);
        let sum = |figure: fn(&Shown) -> u64| shown.iter().map(figure).sum();
        let look = || Sample {
            done: sum(|shown| shown.done.load(Ordering::Relaxed)),
            kicks: sum(|shown| shown.kicks.load(Ordering::Relaxed)),
            // A back-end that has exited gives no figure here. The check after the turn reports it.
            back_end_cpu: back_end().ok().flatten(),
        };
        let part = part_of(scenario.time, load.common.output.plot_time.is_some());
        let moments = watch(&period, part, look, stop, progress, finished);
        while !running.iter().all(thread::ScopedJoinHandle::is_finished) {
            // A signal ends the turn.
            halted.fetch_or(stop.load(Ordering::Relaxed), Ordering::Relaxed);
            thread::sleep(LAST_LOOK);
        }
        let ended: Vec<_> = running.into_iter().map(join).collect();
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok((ended.into_iter().collect::<Result<Vec<ThreadResult>>>()?, moments))
    })?;
    let seconds_counted = began.elapsed().as_secs_f64();
    let turn = Turn {
        seconds: scenario.time.as_secs_f64(),
        done: 0,
        unsent: 0,
        failed: 0,
        failure: None,
        lost: 0,
        latencies: latencies()?,
        submitted: 0,
        kicks: 0,
        calls: 0,
        driver_cpu: (driver_cpu() - cpu.0).as_secs_f64(),
        back_end_cpu: back_end()?
            .zip(cpu.1)
            .map(|(after, before)| after.saturating_sub(before).as_secs_f64()),
        seconds_counted,
        timeline: moments.iter().map(|moment| moment.requests).collect(),
        moments: if load.common.output.plot_time.is_some() { moments } else { Vec::new() },
    };
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

fn join(running: thread::ScopedJoinHandle<'_, Result<ThreadResult>>) -> Result<ThreadResult> {
    running.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
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
