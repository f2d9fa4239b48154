//! Sends frames through transmit rings, and commands through the control ring.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{ConfigError, Device, DeviceMessage, Disabled, Driver, MessageError, Next};
use kickless_net::{Net, NullPort};
use kickless_net_port::Tap;
use kickless_spec::features::Features;
use kickless_spec::net::{Config, ERR, HDR_F_NEEDS_CSUM, Header, NetFeatures, OK};
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_virtqueue::Chain;
use rig::{Guest, Kind, Rig, card, counter, kinds};
use zerocopy::{FromBytes, IntoBytes};

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };

fn frame(len: usize) -> Vec<u8> {
    let mut frame = Header::default().as_bytes().to_vec();
    frame.resize(12 + len, 0x5a);
    frame
}

#[test]
fn frames_are_taken_in_order() {
    for kind in kinds() {
        let card = card(1, NullPort::default());
        let mut rig = Rig::start(&card, 1, kind, 128, card.features());
        let mut sent = 0;
        for round in 0..20 {
            for (len, cut) in [(14, 5), (60, 12), (1514, 1000), (9000, 4096)] {
                rig.send(&frame(len), cut).unwrap();
                sent += len as u64;
            }
            assert_eq!(rig.poll(), 4);
            assert_eq!((rig.last, rig.task.in_flight(), rig.interest()), (Next::Idle, 0, None));
            for _ in 0..4 {
                assert_eq!(rig.take().unwrap().2, 0, "{kind:?} {round}");
            }
            assert!(rig.take().is_none());
        }
        assert_eq!((counter(&card, "sent_frames"), counter(&card, "sent_bytes")), (80, sent));
        rig.stop();
    }
}

#[test]
fn invalid_frames_are_dropped_and_completed() {
    let card = card(1, NullPort::default());
    let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
    // An incomplete header, an incomplete Ethernet header, a frame that is too long, a checksum outside of
    // the frame, and a chain without readable bytes.
    rig.send(&[0; 11], 100).unwrap();
    rig.send(&frame(13), 100).unwrap();
    rig.send(&frame(65_551), 4096).unwrap();
    let header = Header { flags: HDR_F_NEEDS_CSUM, csum_start: 60.into(), ..Header::default() };
    let mut checksum = frame(60);
    checksum[..12].copy_from_slice(header.as_bytes());
    rig.send(&checksum, 100).unwrap();
    rig.offer(&[2000], true).unwrap();
    rig.send(&frame(65_550), 4096).unwrap();
    assert_eq!(rig.poll(), 6);
    for _ in 0..6 {
        assert_eq!(rig.take().unwrap().2, 0);
    }
    assert_eq!((counter(&card, "sent_invalid"), counter(&card, "sent_frames")), (5, 1));
    assert_eq!(rig.task.vring().counters().errors.get(), 5);
}

#[test]
fn a_disabled_ring_is_drained_and_counted_separately() {
    let card = card(1, NullPort::default());
    assert_eq!(
        [0, 1, 2].map(|n| card.disabled(n)),
        [Disabled::LeftAlone, Disabled::Drained, Disabled::LeftAlone]
    );
    let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
    for enabled in [false, true, false] {
        rig.task.set_enabled(enabled);
        rig.send(&frame(60), 100).unwrap();
        rig.send(&[0; 3], 100).unwrap();
        assert_eq!(rig.poll(), 2);
        while rig.take().is_some() {}
    }
    let counts = ["sent_disabled", "sent_frames", "sent_invalid"].map(|name| counter(&card, name));
    assert_eq!(counts, [4, 1, 1]);
}

#[test]
fn a_poll_keeps_to_its_budget() {
    let card = card(1, NullPort::default());
    let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
    for _ in 0..10 {
        rig.send(&frame(8192), 8300).unwrap();
    }
    let polled = rig.poll_once(6);
    // A frame costs 27 sixteenths: one, and 26 for its bytes from 1536 on. The last one may cost more than is
    // left.
    assert_eq!((polled.served, polled.cost, polled.next), (4, 7, Next::More));
    assert_eq!(rig.poll_once(0).served, 0);
    assert_eq!(rig.stop().1, 10);
}

#[test]
fn a_stop_takes_the_frames_of_an_earlier_process_in_turns() {
    for kind in kinds() {
        let card = card(1, NullPort::default());
        let mut guest = Guest::prepare(kind, 128).with_inflight();
        for _ in 0..100 {
            guest.send(&frame(8192), 8300).unwrap();
        }
        let start = guest.first_avail();
        let (mut killed, mut chain) = (guest.vring(1, start, None), Chain::default());
        while killed.pop(&mut chain) {}
        drop(killed);
        let vring = guest.vring(1, start, None);
        let mut rig = Rig::start_on(&card, guest, vring, card.features());
        assert_eq!(rig.task.in_flight(), 100);
        let polled = rig.poll_once(0);
        assert_eq!((polled.served, polled.cost, polled.next), (22, 66, Next::More), "{kind:?}");
        let (_, mut guest) = rig.stop_task();
        assert_eq!(std::iter::from_fn(|| guest.take()).count(), 100);
    }
}

#[test]
fn commands_are_answered() {
    for kind in kinds() {
        let card = card(4, NullPort::default());
        let mut rig = Rig::start(&card, 8, kind, 64, card.features());
        for (bytes, answer) in [
            (&[4, 0, 4, 0][..], OK),
            (&[4, 0, 5, 0], ERR),
            (&[3, 0], OK),
            (&[0, 0, 1], OK),
            (&[0, 0, 2], ERR),
            (&[1, 1, 2, 0, 0, 0, 0, 7], OK),
            (&[4], ERR),
        ] {
            let id = rig.command(bytes);
            assert_eq!(rig.poll(), 1);
            assert_eq!((rig.take().unwrap().2, rig.answer(id)), (1, answer), "{bytes:?}");
        }
        // This chain has no byte for the answer.
        rig.offer(&[4], false).unwrap();
        rig.poll();
        assert_eq!(rig.take().unwrap().2, 0);
        assert_eq!((counter(&card, "commands"), counter(&card, "commands_refused")), (4, 4));
    }
}

#[test]
fn rings_that_a_card_does_not_have_do_not_start() {
    let card = card(2, NullPort::default());
    let start = |index, features: Features| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Rig::start(&card, index, SPLIT, 16, features)
        }))
        .is_ok()
    };
    assert!(start(4, card.features()));
    assert!(!start(5, card.features()));
    assert!(!start(4, rig::without(&card, NetFeatures::MQ)));
    assert!(start(2, rig::without(&card, NetFeatures::MQ)));
    assert!(!start(2, rig::without(&card, NetFeatures::MQ | NetFeatures::CTRL_VQ)));
    assert!(start(3, rig::without(&card, NetFeatures::CTRL_VQ)));
    assert_eq!(card.queues_max(), 5);
}

fn config(card: &Net) -> Config {
    let mut bytes = [0; size_of::<Config>()];
    card.read_config(0, &mut bytes);
    Config::read_from_bytes(&bytes).unwrap()
}

/// A guest can move to a card with another port, or find one at a reconnection.
#[test]
fn features_are_those_of_every_port() {
    let ports = [
        rig::AnyPort::from(NullPort::default()),
        "loop".into(),
        Tap::over_sockets(Vec::new(), true).into(),
        Tap::over_sockets(Vec::new(), false).into(),
        "stream:/nonexistent/socket".into(),
        "switch:lan".into(),
    ];
    for port in ports {
        let card = rig::card_on(1, port);
        assert_eq!(card.features(), rig::card(1, NullPort::default()).features());
        assert_eq!(card.protocol_features().offered, ProtocolFeatures::MTU | ProtocolFeatures::RARP);
    }
}

#[test]
fn the_front_end_sets_the_mtu_and_announces() {
    let card = card(2, NullPort::default());
    assert_eq!(card.protocol_features().offered, ProtocolFeatures::MTU | ProtocolFeatures::RARP);
    let space = config(&card);
    assert_eq!((space.mac, space.mtu.get(), space.max_virtqueue_pairs.get()), ([2, 0, 0, 0, 0, 7], 1500, 2));
    for mtu in [68, 9000, 65_535] {
        card.message(DeviceMessage::SetMtu(mtu)).unwrap();
        assert_eq!(u64::from(config(&card).mtu.get()), mtu);
    }
    for mtu in [0, 67, 65_536, u64::MAX] {
        let refused = MessageError::Mtu { mtu, min: 68, max: 65_535 };
        assert_eq!(card.message(DeviceMessage::SetMtu(mtu)), Err(refused));
    }
    assert_eq!(config(&card).mtu.get(), 65_535);
    card.reset(Driver::SameFrontEnd);
    assert_eq!(config(&card).mtu.get(), 65_535);
    card.connected();
    assert_eq!(config(&card).mtu.get(), 1500, "the MTU of an earlier front-end stays");
    card.message(DeviceMessage::SendRarp([2; 6])).unwrap();
    assert_eq!(counter(&card, "announcements"), 1);
    assert!(matches!(card.write_config(0, &[1]), Err(ConfigError::ReadOnly { offset: 0, end: 1 })));
    let mut beyond = [0xff; 4];
    card.read_config(usize::MAX, &mut beyond);
    assert_eq!(beyond, [0; 4]);
}

#[test]
fn a_reset_returns_to_one_pair() {
    let card = card(2, NullPort::default());
    let fresh = card.save();
    let mut control = Rig::start(&card, 4, SPLIT, 64, card.features());
    let id = control.command(&[4, 0, 2, 0]);
    control.poll();
    assert_eq!(control.answer(id), OK);
    assert_ne!(card.save(), fresh);
    card.reset(Driver::SameFrontEnd);
    assert_eq!(card.save(), fresh);
}

#[test]
fn the_pairs_of_an_earlier_front_end_are_forgotten() {
    let card = card(2, NullPort::default());
    let one_pair = card.save();
    card.reset(Driver::Unknown);
    let unknown = card.save();
    card.load(&one_pair).unwrap();
    card.connected();
    assert_eq!(card.save(), unknown);
}

#[test]
fn a_state_is_loaded_as_it_was_saved() {
    let card = card(2, NullPort::default());
    let saved = card.save();
    let other = rig::card(2, NullPort::default());
    other.reset(Driver::Unknown);
    assert_ne!(other.save(), saved);
    other.load(&saved).unwrap();
    assert_eq!(other.save(), saved);
    let mut control = Rig::start(&other, 4, SPLIT, 64, other.features());
    for command in [&[0, 0, 0][..], &[1, 1, 2, 3, 4, 5, 6, 7], &[2, 0, 9, 0], &[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]]
    {
        let id = control.command(command);
        control.poll();
        assert_eq!(control.answer(id), OK);
    }
    let set = other.save();
    card.load(&set).unwrap();
    assert_eq!(card.save(), set);
    assert_eq!(config(&card).mac, [2, 3, 4, 5, 6, 7]);
    other.reset(Driver::SameFrontEnd);
    assert_eq!((other.save(), config(&other).mac), (saved.clone(), [2, 0, 0, 0, 0, 7]));
    for wrong in [&b""[..], b"net2", b"net2\0", b"net2\0\0", b"net2\x03\0", b"net2\x01\0\0", b"blk1\x01\0"] {
        assert!(other.load(wrong).is_err(), "{wrong:?}");
        assert_eq!(other.save(), saved);
    }
}
