//! Runs one turn: a scenario on a card.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use kickless_driver::{Card, CardOptions};
use kickless_spec::net::NetFeatures;

use super::load::{Loader, Shown, ThreadResult, TurnContext};
use super::options::{Direction, NetLoadOptions};
use super::packet::Work;
use super::scenario::Scenario;
use crate::progress::Progress;
use crate::target::{Target, name_command, name_in};
use crate::threads::ReadyTurn;
use crate::turn::Turn;
use crate::watch::Period;

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
    let options = scenario.card_options(target.socket(), load);
    let card = Card::connect(CardOptions { connect_timeout: target.connect_timeout(), ..options })
        .map_err(|error| name_command(error, "bench blk or compare"))?;
    if card.pairs() < usize::from(scenario.pairs) {
        bail!("it has {} queue pairs: lower --pairs={}", card.pairs(), scenario.pairs);
    }
    let has_segments = matches!(scenario.work, Some(Work::Segments(_)));
    if has_segments {
        requires(&card, NetFeatures::HOST_TSO4, "VIRTIO_NET_F_HOST_TSO4")?;
    }
    let shown: Vec<Shown> = (0..scenario.pairs).map(|_| Shown::default()).collect();
    let halted = AtomicBool::new(false);
    let period = Period::new(scenario.warm_up, scenario.time);
    let shared = TurnContext { scenario, period, stop: &halted };
    let mut loaders = Vec::new();
    let missing = "a queue pair is missing";
    let peer = match scenario.direction {
        Direction::Pass => {
            let options = scenario.card_options(&target.peer_socket(), load);
            let connect_timeout = target.connect_timeout();
            let peer = Card::connect(CardOptions { connect_timeout, ..options });
            Some(peer.map_err(|error| name_in(error.into(), &target.peer_socket().to_string_lossy()))?)
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
    let (options, pid, halted) = (&load.common, target.pid(), &halted);
    let sum = |figure: fn(&Shown) -> &AtomicU64| -> u64 {
        shown.iter().map(|shown| figure(shown).load(Ordering::Relaxed)).sum()
    };
    let (seen, turn) = ReadyTurn { period, options, pid, stop, halted, progress }.run(
        loaders.into_iter().map(|loader| || loader.run()),
        || (sum(|shown| &shown.done), sum(|shown| &shown.kicks)),
        || {},
    )?;
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
