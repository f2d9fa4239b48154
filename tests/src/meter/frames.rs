//! Behaviours of a card.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_driver::{
    Card, CardOptions, Checksum, Interest, Offload, Outgoing, Protocol, QueuePair, Segmentation,
};
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_vhost_user::FrontendMessage as Message;

use crate::frontend::LIMIT;
use crate::frontend::card::{Card as RawCard, CardShape};
use crate::meter::behaviour::{Behaviour, Bound, Deed, Devices, Site, Stage, Step, device, text};
use crate::meter::victim::{RECEIVER, connect_card};

/// The behaviours.
pub const TABLE: &[Behaviour] = &[
    Behaviour {
        name: "62 KiB of headers, in segments of 1 byte, to `stream`",
        devices: stream_card,
        start: |stage| send(stage, RECEIVER, &packet(31, 1366)),
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "64 KiB in segments of 48 bytes, to `stream`",
        devices: stream_card,
        start: |stage| send(stage, RECEIVER, &Packet { size: 48, ..packet(0, 65_000) }),
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "64 KiB in segments of 1 byte, to a card of the switch",
        devices: switch_card,
        start: |stage| send(stage, RECEIVER, &packet(0, 65_000)),
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "32 KiB of headers, in segments of 1 byte, to a card of the switch",
        devices: switch_card,
        start: |stage| send(stage, RECEIVER, &packet(16, 32_000)),
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a switch table that two cards fill",
        devices: |_| Ok(LATE.iter().flat_map(|(name, lines)| device(name, *lines)).collect()),
        start: fill_table,
        pause: Duration::from_millis(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a trunk that changes its VLAN in each frame",
        devices: trunk,
        start: |stage| batches(stage, (1..1001).map(tagged).collect()),
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "broadcasts to all cards of a switch",
        devices: trunk,
        start: |stage| batches(stage, vec![broadcast([2, 0, 0, 0, 8, 1], 1000); 16]),
        pause: Duration::from_millis(2),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "SEND_RARP without end",
        devices: switch_card,
        start: announce,
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
];

/// The devices of [`fill_table`].
const LATE: &[(&str, &str)] = &[
    ("attacker", "port = 'switch:lan'"),
    ("accomplice", "port = 'switch:lan'"),
    ("late-a", "port = 'switch:lan'\nmac = '02:00:00:00:09:01'"),
    ("late-b", "port = 'switch:lan'\nmac = '02:00:00:00:09:02'"),
];
const LATE_A: [u8; 6] = [2, 0, 0, 0, 9, 1];
const LATE_B: [u8; 6] = [2, 0, 0, 0, 9, 2];

fn switch_card(_: &mut Site) -> Result<Devices> {
    Ok(device("attacker", "port = 'switch:lan'"))
}

/// Starts a peer that takes all bytes, and connects a card to it.
fn stream_card(site: &mut Site) -> Result<Devices> {
    let path = site.dir.path().join("peer");
    let listener = UnixListener::bind(&path)?;
    thread::spawn(move || {
        crate::meter::host::take_role(crate::meter::host::Role::Attacker);
        let mut bytes = vec![0; 1 << 20];
        for mut stream in listener.incoming().flatten() {
            while stream.read(&mut bytes).is_ok_and(|len| len > 0) {}
        }
    });
    Ok(device("attacker", format!("port = 'stream:{}'", text(&path))))
}

/// Adds a trunk to a switch with many ports, each in a VLAN of its own.
fn trunk(site: &mut Site) -> Result<Devices> {
    let ports = site.scale.pick(8, 250);
    let port = |number| device(&format!("port-{number}"), format!("port = 'switch:crowd,vlan={number}'"));
    let mut devices: Vec<_> = (1..=ports).flat_map(port).collect();
    devices.extend(device("attacker", "port = 'switch:crowd'"));
    Ok(devices)
}

/// A TCP packet over IPv6 that the card has to cut.
struct Packet {
    /// Extension headers of 2 KiB each.
    headers: usize,
    payload: usize,
    /// Bytes of payload in a segment.
    size: u16,
}

fn packet(headers: usize, payload: usize) -> Packet {
    Packet { headers, payload, size: 1 }
}

impl Packet {
    /// Returns the frame, and the work that it leaves to the card.
    fn frame(&self, to: [u8; 6]) -> (Vec<u8>, Offload) {
        const EXTENSION: usize = 2048;
        const DESTINATION_OPTIONS: u8 = 60;
        const TCP: u8 = 6;
        let upper = self.headers * EXTENSION + 20 + self.payload;
        let first = if self.headers > 0 { DESTINATION_OPTIONS } else { TCP };
        let mut frame = [&to[..], &[2, 0, 0, 0, 8, 1], &[0x86, 0xdd], &[0x60, 0, 0, 0]].concat();
        frame.extend((upper as u16).to_be_bytes());
        frame.extend([first, 64]);
        frame.extend([0xfd; 32]);
        for number in 0..self.headers {
            let next = if number + 1 < self.headers { DESTINATION_OPTIONS } else { TCP };
            frame.extend([next, (EXTENSION / 8 - 1) as u8]);
            frame.resize(frame.len() + EXTENSION - 2, 0);
        }
        let start = frame.len() as u16;
        frame.extend([0, 80, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        frame.resize(frame.len() + self.payload, 7);
        let segmentation =
            Segmentation { protocol: Protocol::TcpV6, size: self.size, header_len: 0, ecn: false };
        let checksum = Checksum::Partial { start, offset: 16 };
        (frame, Offload { checksum, segmentation: Some(segmentation) })
    }
}

/// Sends a packet in each step, and waits until the card has taken it.
fn send(stage: &Stage<'_>, to: [u8; 6], packet: &Packet) -> Result<Step> {
    let (frame, offload) = packet.frame(to);
    let (card, mut pair) = stage.card("attacker")?;
    Ok(Box::new(move || {
        let _card = &card;
        let sent = pair.send(&[Outgoing { bytes: &frame, offload }])?;
        ensure!(pair.flush(Some(LIMIT))?, "a packet is not taken");
        Ok(Deed::of(sent as u64))
    }))
}

/// Sends these frames in each step.
fn batches(stage: &Stage<'_>, frames: Vec<Vec<u8>>) -> Result<Step> {
    let options = CardOptions { queue_size: 1024, ..CardOptions::new(stage.socket("attacker")) };
    let card = Card::connect(options)?;
    let mut pair = card.pair(0).context("the pair is taken")?;
    Ok(Box::new(move || {
        let _card = &card;
        send_all(&mut pair, &frames)?;
        ensure!(pair.flush(Some(LIMIT))?, "frames are not taken");
        Ok(Deed::of(frames.len() as u64))
    }))
}

fn send_all(pair: &mut QueuePair, frames: &[Vec<u8>]) -> Result<()> {
    let outgoing: Vec<_> = frames.iter().map(|frame| Outgoing::from(&frame[..])).collect();
    let mut sent = 0;
    while sent < outgoing.len() {
        sent += pair.send(&outgoing[sent..])?;
        if sent < outgoing.len() {
            ensure!(pair.wait(Interest::Send, Some(LIMIT))?, "no room for a frame");
        }
    }
    Ok(())
}

/// Returns a frame of this length, of a type for experiments.
fn broadcast(from: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &from, &[0x88, 0xb5]].concat();
    frame.resize(len, 0);
    frame
}

/// Returns a short broadcast with a tag.
fn tagged(vlan: u16) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &[2, 0, 0, 0, 8, 1], &[0x81, 0], &vlan.to_be_bytes()].concat();
    frame.extend([0x88, 0xb5]);
    frame.resize(64, 0);
    frame
}

fn between(to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
    let mut frame = broadcast(from, 64);
    frame[..6].copy_from_slice(&to);
    frame
}

/// Lets two cards send from the same addresses in turn, so that the table is full of addresses that moved.
/// Then exchanges frames between two cards with fixed addresses, which the first two must not see.
fn fill_table(stage: &Stage<'_>) -> Result<Step> {
    const ADDRESSES: u16 = 4096;
    const PORT: u16 = 1024;
    let (mut first, mut second) = (stage.card("attacker")?, stage.card("accomplice")?);
    let sockets = [stage.socket("late-a"), stage.socket("late-b")];
    let address = |number: u16| {
        let [high, low] = number.to_be_bytes();
        [2, 1, 0, 0, high, low]
    };
    let frames = |from: u16| -> Vec<Vec<u8>> {
        (from..from + PORT).map(|number| between(LATE_B, address(number))).collect()
    };
    let sets: Vec<_> = (0..ADDRESSES).step_by(PORT.into()).map(frames).collect();
    Ok(Box::new(move || {
        for set in &sets {
            for (_, pair) in [&mut first, &mut second] {
                send_all(pair, set)?;
                ensure!(pair.flush(Some(LIMIT))?, "frames are not taken");
                pair.receive(usize::MAX, |_| {})?;
            }
        }
        // The last frames of the table have reached both.
        listen(&mut first)?;
        listen(&mut second)?;
        let mut late = connect_both(&sockets)?;
        let done = exchange(&mut late)?;
        let seen = listen(&mut first)? + listen(&mut second)?;
        Ok(Deed { done, seen })
    }))
}

/// Takes all frames until none has come for a while. Returns the number of those between the late cards.
fn listen((_, pair): &mut (Card, QueuePair)) -> Result<u64> {
    let mut seen = 0;
    while pair.wait(Interest::Receive, Some(Duration::from_millis(5)))? {
        pair.receive(64, |frame| {
            let mut addresses = [0; 12];
            frame.read(0, &mut addresses);
            seen += u64::from(addresses == [LATE_A, LATE_B].concat()[..]);
        })?;
    }
    Ok(seen)
}

fn connect_both(sockets: &[impl AsRef<Path>; 2]) -> Result<[(Card, QueuePair); 2]> {
    Ok([connect_card(sockets[0].as_ref())?, connect_card(sockets[1].as_ref())?])
}

/// Sends a frame from the first card to the second, and 20 back. Returns the number of those that come.
fn exchange([(_, first), (_, second)]: &mut [(Card, QueuePair); 2]) -> Result<u64> {
    const FRAMES: u64 = 20;
    send_all(first, &[between(LATE_B, LATE_A)])?;
    ensure!(first.flush(Some(LIMIT))?, "a frame is not taken");
    send_all(second, &vec![between(LATE_A, LATE_B); FRAMES as usize])?;
    let (mut come, deadline) = (0, Instant::now() + LIMIT);
    while come < FRAMES {
        ensure!(first.wait(Interest::Receive, Some(LIMIT))?, "{come} frames come");
        ensure!(Instant::now() < deadline, "{come} frames come");
        first.receive(64, |frame| {
            let mut addresses = [0; 12];
            frame.read(0, &mut addresses);
            come += u64::from(addresses == [LATE_A, LATE_B].concat()[..]);
        })?;
    }
    Ok(come)
}

/// Announces the guest 64 times in a step.
fn announce(stage: &Stage<'_>) -> Result<Step> {
    let mut card = RawCard::start(&stage.socket("attacker"), CardShape::BOTH[0])?;
    let offered = card.frontend.number(&Message::GetProtocolFeatures)?;
    let offered = ProtocolFeatures::from_bits_retain(offered);
    ensure!(offered.contains(ProtocolFeatures::RARP), "the card offers no RARP");
    let usual = ProtocolFeatures::REPLY_ACK | ProtocolFeatures::MQ | ProtocolFeatures::RARP;
    card.frontend.order(&Message::SetProtocolFeatures(usual & offered))?;
    Ok(Box::new(move || {
        for _ in 0..63 {
            card.frontend.send(&Message::SendRarp([2, 0, 0, 0, 8, 1]))?;
        }
        card.frontend.order(&Message::SendRarp([2, 0, 0, 0, 8, 1])).context("the card is not announced")?;
        Ok(Deed::of(64))
    }))
}
