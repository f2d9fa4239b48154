//! Sets filters and offloads through the control ring, and returns frames through a loop port.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Driver};
use kickless_net::Net;
use kickless_spec::net::{ERR, GSO_TCPV4, HDR_F_NEEDS_CSUM, Header, NetFeatures, OK};
use rig::{Kind, Rig, SIZE_MAX, card_on, counter};
use std::sync::Arc;
use zerocopy::IntoBytes;

const KIND: Kind = Kind { packed: true, event_idx: true, in_order: false };
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 7];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 8];
const GROUP: [u8; 6] = [3, 0, 0, 0, 0, 9];
const BROADCAST: [u8; 6] = [0xff; 6];

struct Rings {
    card: Arc<Net>,
    receive: Rig,
    transmit: Rig,
    control: Rig,
}

impl Rings {
    fn new(without: NetFeatures) -> Self {
        let card = card_on(1, "loop");
        let features = rig::without(&card, without);
        let [receive, transmit, control] =
            [0, 1, 2].map(|index| Rig::start(&card, index, KIND, SIZE_MAX, features));
        Self { card, receive, transmit, control }
    }

    fn command(&mut self, bytes: &[u8]) -> u8 {
        let id = self.control.command(bytes);
        self.control.poll();
        self.control.take().unwrap();
        self.control.answer(id)
    }

    /// Starts the control ring again: for the same driver, which goes on, or a fresh one.
    fn restart_control(self, is_fresh: bool) -> Self {
        let (next_avail, guest) = self.control.stop_task();
        let guest = if is_fresh { guest.with_new_driver() } else { guest };
        let next_avail = if is_fresh { guest.first_avail() } else { next_avail };
        let vring = guest.vring(2, next_avail, None);
        Self { control: Rig::start_on(&self.card, guest, vring, self.card.features()), ..self }
    }

    /// Sends a frame, and returns those that come back.
    fn pass(&mut self, header: Header, frame: &[u8]) -> Vec<(Header, Vec<u8>)> {
        while self.receive.offer(&[1530], true).is_some() {}
        self.transmit.send(&[header.as_bytes(), frame].concat(), 4096).unwrap();
        self.transmit.poll();
        self.transmit.take().unwrap();
        self.receive.poll();
        std::iter::from_fn(|| self.receive.receive(12)).collect()
    }

    /// Returns whether frames to the four addresses come back.
    fn accepted(&mut self) -> [bool; 4] {
        [OWN, OTHER, GROUP, BROADCAST].map(|address| self.accepts(address, None))
    }

    fn accepts(&mut self, address: [u8; 6], vlan: Option<u16>) -> bool {
        let mut frame = [&address[..], &[4; 6]].concat();
        if let Some(vlan) = vlan {
            frame.extend([0x81, 0]);
            frame.extend(vlan.to_be_bytes());
        }
        frame.resize(60, 1);
        let frames = self.pass(Header::default(), &frame);
        assert!(frames.iter().all(|(_, bytes)| *bytes == frame));
        frames.len() == 1
    }
}

#[test]
fn addresses_are_filtered_as_the_driver_wants() {
    let mut rings = Rings::new(NetFeatures::empty());
    assert_eq!(rings.accepted(), [true; 4], "a fresh driver gets all frames");
    let table = |unicast: &[[u8; 6]], multicast: &[[u8; 6]]| {
        let len = |table: &[[u8; 6]]| (table.len() as u32).to_le_bytes();
        [&[1, 0], &len(unicast)[..], unicast.as_flattened(), &len(multicast), multicast.as_flattened()]
            .concat()
    };
    for (command, expected) in [
        (vec![0, 0, 0], [true, false, false, true]),
        (table(&[OTHER], &[]), [true, true, false, true]),
        (table(&[], &[GROUP]), [true, false, true, true]),
        (vec![0, 5, 1], [true, false, true, false]),
        (vec![0, 3, 1], [true, false, false, false]),
        (vec![0, 2, 1], [true, true, false, false]),
        (vec![0, 4, 1], [false; 4]),
        (vec![0, 0, 1], [true; 4]),
        (vec![0, 0, 0], [false; 4]),
        (vec![0, 4, 0], [true, true, false, false]),
        (vec![0, 2, 0], [true, false, false, false]),
        ([&[1, 1], &OTHER[..]].concat(), [false, true, false, false]),
    ] {
        assert_eq!(rings.command(&command), OK, "{command:?}");
        assert_eq!(rings.accepted(), expected, "{command:?}");
    }
    let mut address = [0; 6];
    rings.card.read_config(0, &mut address);
    assert_eq!(address, OTHER);
    // A table of more than 64 addresses accepts all.
    assert_eq!(rings.command(&table(&[[8; 6]; 65], &[])), OK);
    assert_eq!(rings.accepted(), [true, true, false, false]);
    assert!(counter(&rings.card, "dropped_filtered") > 20);
    // A reset forgets all of it.
    rings.card.reset(Driver::SameFrontEnd);
    assert_eq!(rings.accepted(), [true; 4]);
}

#[test]
fn vlans_are_filtered_if_the_driver_negotiated_that() {
    for without in [NetFeatures::empty(), NetFeatures::CTRL_VLAN] {
        let mut rings = Rings::new(without);
        assert!(rings.accepts(OWN, Some(5)), "promiscuous");
        assert_eq!(rings.command(&[0, 0, 0]), OK);
        let filters = without.is_empty();
        assert_eq!(rings.accepts(OWN, Some(5)), !filters);
        assert_eq!(rings.command(&[2, 0, 5, 0]), if filters { OK } else { ERR });
        assert!(rings.accepts(OWN, Some(5)));
        assert_eq!(rings.accepts(OWN, Some(6)), !filters);
        assert!(rings.accepts(OWN, None));
        assert_eq!(rings.command(&[2, 1, 5, 0]), if filters { OK } else { ERR });
        assert_eq!(rings.accepts(OWN, Some(5)), !filters);
    }
}

/// A front-end connects anew with a driver that made commands before, or with a fresh one.
#[test]
fn settings_that_a_reconnection_loses_neither_drop_frames_nor_force_offloads_on_a_driver() {
    let table = [&[1, 0, 1, 0, 0, 0][..], &OTHER, &1u32.to_le_bytes(), &GROUP].concat();
    let offloads = [&[5, 0][..], &0u64.to_le_bytes()].concat();
    let commands = [&[2, 0, 5, 0][..], &table, &[0, 0, 0], &offloads];
    for is_fresh in [false, true] {
        let mut rings = Rings::new(NetFeatures::empty());
        commands.iter().for_each(|command| assert_eq!(rings.command(command), OK));
        assert_eq!(rings.accepted(), [true; 4]);
        assert_eq!([5, 6].map(|vlan| rings.accepts(OWN, Some(vlan))), [true, false]);
        rings.card.connected();
        rings = rings.restart_control(is_fresh);
        assert_eq!(rings.accepted(), [true; 4], "promiscuous");
        let header = Header { gso_type: GSO_TCPV4, gso_size: 1000.into(), ..packet_header() };
        let lens: Vec<_> = rings.pass(header, &packet()).iter().map(|(_, frame)| frame.len()).collect();
        assert_eq!(lens, if is_fresh { vec![2554] } else { vec![1054, 1054, 554] });
        // The driver does not know of the reconnection, and leaves the promiscuous mode again.
        assert_eq!(rings.command(&[0, 0, 0]), OK);
        assert_eq!(rings.accepted(), if is_fresh { [true, false, false, true] } else { [true; 4] });
        assert_eq!([5, 6].map(|vlan| rings.accepts(OWN, Some(vlan))), [!is_fresh; 2]);
        // Its new settings are in force.
        assert_eq!(rings.command(&table), OK);
        assert_eq!(rings.command(&[&[1, 1], &OTHER[..]].concat()), OK);
        assert_eq!(rings.accepted(), [false, true, true, true]);
        let mut address = [0; 6];
        rings.card.read_config(0, &mut address);
        assert_eq!(address, OTHER);
        // A second start of the ring over the same connection changes nothing.
        rings = rings.restart_control(false);
        assert_eq!(rings.accepted(), [false, true, true, true]);
        rings.card.reset(Driver::SameFrontEnd);
        assert_eq!(rings.command(&[0, 0, 0]), OK);
        assert_eq!(rings.accepted(), [true, false, false, true], "a fresh driver");
    }
}

/// Returns a TCP packet of 2500 bytes without a checksum.
fn packet() -> Vec<u8> {
    let mut packet = [&OWN[..], &[4; 6]].concat();
    packet.extend([8, 0, 0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend([0, 1, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    packet.resize(54 + 2500, 7);
    packet
}

fn packet_header() -> Header {
    Header { flags: HDR_F_NEEDS_CSUM, csum_start: 34.into(), csum_offset: 16.into(), ..Header::default() }
}

/// The driver switches its offloads off and on, as Linux does for XDP.
#[test]
fn offloads_are_switched_while_frames_flow() {
    let mut rings = Rings::new(NetFeatures::empty());
    let packet = packet();
    let header = Header { gso_type: GSO_TCPV4, gso_size: 1000.into(), ..packet_header() };
    let checksum = NetFeatures::GUEST_CSUM.bits();
    let all = (checksum | NetFeatures::GUEST_TSO4.bits(), [2554].as_slice(), GSO_TCPV4);
    let none = (0, [1054, 1054, 554].as_slice(), 0);
    for (offloads, lens, kind) in [all, none, (checksum, none.1, 0), all, none] {
        let command = [&[5, 0][..], &offloads.to_le_bytes()].concat();
        assert_eq!(rings.command(&command), OK);
        let frames = rings.pass(header, &packet);
        assert_eq!(frames.iter().map(|(_, frame)| frame.len()).collect::<Vec<_>>(), lens);
        assert!(frames.iter().all(|(header, _)| header.gso_type == kind));
        // A checksum of a packet that is not segmented stays as it is, or is completed.
        let plain = Header { gso_type: 0, gso_size: 0.into(), ..header };
        let frames = rings.pass(plain, &packet[..1000]);
        assert_eq!(frames[0].0.flags & HDR_F_NEEDS_CSUM != 0, offloads != 0);
        assert_eq!(frames[0].1[50..52] != [0, 0], offloads == 0);
    }
    // This offload was not offered.
    assert_eq!(rings.command(&[&[5, 0][..], &NetFeatures::GUEST_UFO.bits().to_le_bytes()].concat()), ERR);
}
