//! Measures frames between two ports of a switch, and broadcasts, against the number of ports and addresses.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_driver::{Card, CardOptions, QueuePair};
use kickless_tests::daemon::Daemon;

use crate::Bench;
use crate::curve::{Curve, Group, Panel, Shape};
use crate::load::work_seconds;

const PORTS: [u64; 4] = [2, 8, 64, 256];
/// Addresses behind one port. A port may have 1024.
const ADDRESSES: [u64; 4] = [1, 16, 128, 1024];
const TURN: Duration = Duration::from_millis(400);
/// Frames of one call.
const BATCH: usize = 32;
const LEN: usize = 64;
/// The size of a ring: two batches, so that 256 cards take little memory.
const RING: u16 = 64;
const LIMIT: Duration = Duration::from_secs(10);

/// A daemon on one worker, with the cards of a switch.
struct Switch {
    daemon: Daemon,
    cards: Vec<(Card, QueuePair)>,
}

/// Returns an address of a card, which may have several.
fn mac(card: usize, address: usize) -> [u8; 6] {
    let ([a, b], [c, d]) = ((card as u16).to_be_bytes(), (address as u16).to_be_bytes());
    [2, 0, a, b, c, d]
}

/// Returns the head of a frame, whose type is for local experiments.
fn head(to: [u8; 6], from: [u8; 6]) -> [u8; 14] {
    let mut head = [0; 14];
    head[..6].copy_from_slice(&to);
    head[6..12].copy_from_slice(&from);
    head[12..].copy_from_slice(&[0x88, 0xb5]);
    head
}

const BROADCAST: [u8; 6] = [0xff; 6];

impl Switch {
    fn start(bench: &Bench, ports: u64) -> Result<Switch> {
        let (daemon, names) = bench.serve(ports, "port = \"switch:bench\"", &["--control"])?;
        let connect = |name: &String| -> Result<(Card, QueuePair)> {
            let options = CardOptions { queue_size: RING, ..CardOptions::new(daemon.socket_of(name)) };
            let card = Card::connect(options)?;
            let pair = card.pair(0).context("no queue pair")?;
            Ok((card, pair))
        };
        let cards = names.iter().map(connect).collect::<Result<_>>()?;
        let mut switch = Switch { daemon, cards };
        (0..switch.cards.len()).try_for_each(|card| switch.announce(card, 1))?;
        Ok(switch)
    }

    /// Has the switch learn addresses of a card.
    fn announce(&mut self, card: usize, addresses: usize) -> Result<()> {
        let mut sent = 0;
        while sent < addresses {
            let count = BATCH.min(addresses - sent);
            sent += self.cards[card].1.send_with(
                count,
                |_| LEN,
                |at, frame| {
                    frame.write(0, &head(BROADCAST, mac(card, sent + at)));
                },
            )?;
            ensure!(self.cards[card].1.flush(Some(LIMIT))?, "the switch does not take frames");
            self.drain()?;
        }
        Ok(())
    }

    /// Takes the frames of all cards but the first. Returns their number.
    fn drain(&mut self) -> Result<usize> {
        let mut taken = 0;
        for (_, pair) in &mut self.cards[1..] {
            taken += pair.receive(2 * BATCH, |_| {})?;
        }
        Ok(taken)
    }

    /// Sends frames from the first card to these addresses for a turn. The first `receivers` other cards take
    /// theirs, and no more are sent before that: their rings have room, so the switch drops none. Returns the
    /// nanoseconds of work for each frame that arrived.
    fn turn(&mut self, to: &[[u8; 6]], receivers: usize, time: Duration) -> Result<f64> {
        let control = self.daemon.socket_of("control");
        let (mut sent, mut received) = (0, 0);
        let (begin, before) = (Instant::now(), work_seconds(&control)?);
        while begin.elapsed() < time {
            let [(_, sender), others @ ..] = &mut self.cards[..] else { break };
            if received >= sent * receivers {
                sent += sender.send_with(
                    BATCH,
                    |_| LEN,
                    |at, frame| {
                        frame.write(0, &head(to[(sent + at) % to.len()], mac(0, 0)));
                    },
                )?;
            }
            for (_, pair) in &mut others[..receivers] {
                received += pair.receive(2 * BATCH, |_| {})?;
            }
        }
        let work = work_seconds(&control)? - before;
        ensure!(received > 0, "no frame arrives");
        Ok(work / received as f64 * 1e9)
    }
}

/// Measures the switch.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Group>> {
    let time = TURN.min(bench.plan.time);
    let axis = bench.axis(&PORTS);
    let switches = axis.iter().map(|ports| Switch::start(bench, *ports));
    let mut switches = switches.collect::<Result<Vec<_>>>()?;
    let [between] = bench.rounds(axis.len(), |at| Ok([switches[at].turn(&[mac(1, 0)], 1, time)?]))?;
    let [copy] = bench.rounds(axis.len(), |at| {
        let others = switches[at].cards.len() - 1;
        Ok([switches[at].turn(&[BROADCAST], others, time)?])
    })?;
    let curve = |name, shape, figures| Curve::new(name, shape, &axis, figures);
    let frames = vec![
        curve("a frame between two ports", Shape::Flat, between),
        curve("each copy of a broadcast", Shape::Flat, copy),
    ];
    let ports = Group { axis: "ports", panels: vec![Panel { figure: "ns", curves: frames }] };
    drop(switches);
    let axis = bench.axis(&ADDRESSES);
    let learned = axis.iter().map(|addresses| -> Result<Switch> {
        let mut switch = Switch::start(bench, 2)?;
        switch.announce(1, *addresses as usize)?;
        Ok(switch)
    });
    let mut switches = learned.collect::<Result<Vec<_>>>()?;
    let [known] = bench.rounds(axis.len(), |at| {
        let to: Vec<[u8; 6]> = (0..axis[at] as usize).map(|address| mac(1, address)).collect();
        Ok([switches[at].turn(&to, 1, time)?])
    })?;
    let frames = vec![Curve::new("a frame to each in turn", Shape::Flat, &axis, known)];
    let addresses =
        Group { axis: "addresses of a port", panels: vec![Panel { figure: "ns", curves: frames }] };
    Ok(vec![ports, addresses])
}
