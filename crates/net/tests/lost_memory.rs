//! Sends frames from memory that the guest cuts short. A port gets none of which a part is lost.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, Operate};
use kickless_net::NullPort;
use kickless_net_port::{StreamPort, Tap};
use kickless_spec::net::{GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header};
use kickless_testing::parse_pcapng;
use rig::lost_memory::LosingGuest;
use rig::switch::{ethernet, name, open};
use rig::{Kind, Rig, SIZE_MAX, card_on, card_with, counter};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{ErrorKind, Read};
use std::os::unix::net::{UnixDatagram, UnixListener};
use zerocopy::IntoBytes;

const HEADER: usize = size_of::<Header>();
/// The parts of a frame that are in memory: its header and the one of Ethernet, and nothing.
const KEPT: [usize; 2] = [HEADER + 14, 0];

/// Returns a frame behind its header. A test loses a part of it.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = ethernet(1, 0);
    frame.resize(HEADER + len, 0x5a);
    frame
}

/// Returns the ways to cut a frame into buffers.
fn cuts(len: usize) -> [Vec<usize>; 2] {
    [vec![len], vec![HEADER, 14, len - HEADER - 14]]
}

#[test]
fn a_switch_passes_no_lost_bytes_on() {
    for len in [60, 1514, 9000] {
        for (kept, lens) in KEPT.iter().flat_map(|kept| cuts(HEADER + len).map(|lens| (*kept, lens))) {
            let name = name();
            let [from, to] = [(); 2].map(|()| card_with(None, 1, open(&name)));
            let mut receive = Rig::start(&to, 0, Kind::default(), SIZE_MAX, to.features());
            while receive.offer(&[16_384], true).is_some() {}
            let mut guest = LosingGuest::start(&from);
            guest.transmit.send(&frame(len), 16_384).unwrap();
            guest.transmit.poll();
            guest.transmit.take().unwrap();
            receive.poll();
            assert!(receive.receive(HEADER).is_some());
            guest.send_and_lose(&frame(len), kept, &lens);
            guest.check_broken();
            receive.poll();
            assert!(receive.receive(HEADER).is_none(), "{len} {kept} {lens:?}");
        }
    }
}

#[test]
fn a_capture_gets_no_lost_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("capture");
    let card = card_on(1, NullPort::default());
    card.set_capture(Some(&CaptureTo { path: &path, device: "card", len_max: 65_550 })).unwrap();
    let mut guest = LosingGuest::start(&card);
    guest.send_and_lose(&frame(1514), KEPT[0], &[HEADER + 1514]);
    guest.check_broken();
    card.set_capture(None).unwrap();
    assert!(parse_pcapng(&std::fs::read(path).unwrap()).frames.is_empty());
}

#[test]
fn a_stream_peer_gets_no_lost_bytes() {
    for kept in KEPT {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peer");
        let listener = UnixListener::bind(&path).unwrap();
        let card = card_on(1, StreamPort::to(&path).unwrap());
        card.open().unwrap();
        let mut guest = LosingGuest::start(&card);
        let (mut peer, _) = listener.accept().unwrap();
        guest.transmit.poll();
        guest.send_and_lose(&frame(1514), kept, &[HEADER + 1514]);
        guest.check_broken();
        peer.set_nonblocking(true).unwrap();
        assert_eq!(peer.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock, "{kept}");
    }
}

#[test]
fn a_tap_gets_no_lost_bytes() {
    let mut datagrams = frame(1514);
    let header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        hdr_len: 42.into(),
        gso_size: 500.into(),
        csum_start: 34.into(),
        csum_offset: 6.into(),
        ..Header::default()
    };
    datagrams[..HEADER].copy_from_slice(header.as_bytes());
    // The length of an IPv4 header, UDP, and the headers are in memory.
    datagrams[HEADER + 12..HEADER + 15].copy_from_slice(&[8, 0, 0x45]);
    datagrams[HEADER + 23] = 17;
    let plain = [60, 1514, 9000].map(frame);
    let all =
        plain.iter().flat_map(|frame| KEPT.map(|kept| (frame, kept))).chain([(&datagrams, HEADER + 42)]);
    for (frame, kept) in all {
        for lens in cuts(frame.len()) {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
            let card = card_on(1, Tap::over_sockets(vec![ours], false));
            let mut guest = LosingGuest::start(&card);
            guest.send_and_lose(frame, kept, &lens);
            let got = UnixDatagram::from(peer).recv(&mut [0; 1]);
            let got = got.map_err(|error| error.kind());
            assert_eq!(got, Err(ErrorKind::WouldBlock), "{} {kept} {lens:?}", frame.len());
            assert_eq!(counter(&card, "sent_frames"), 0);
            // Of a long frame, the kernel finds the lost page.
            if kept == 0 || frame.len() < 2048 {
                guest.check_broken();
            }
        }
    }
}
