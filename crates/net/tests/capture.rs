//! Captures the frames of cards, on real rings.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, DeviceMessage, Operate};
use kickless_net::{Net, NullPort};
use kickless_spec::net::{Header, NetFeatures};
use kickless_testing::{CaptureContents, parse_pcapng};
use rig::switch::{name, open};
use rig::{Rig, SIZE_MAX, card, card_on, counter, kinds, without};
use std::path::Path;
use tempfile::TempDir;
use zerocopy::IntoBytes;

const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

fn frame(len: usize, number: u8) -> Vec<u8> {
    (0..len).map(|n| (n as u8).wrapping_mul(3).wrapping_add(number)).collect()
}

fn send(rig: &mut Rig, frame: &[u8], cut: usize) {
    rig.send(&[Header::default().as_bytes(), frame].concat(), cut).unwrap();
}

fn begin(card: &Net, path: &Path, len_max: u32) {
    card.set_capture(Some(&CaptureTo { path, device: "card", len_max })).unwrap();
}

fn end(card: &Net, path: &Path) -> CaptureContents {
    card.set_capture(None).unwrap();
    let contents = parse_pcapng(&std::fs::read(path).unwrap());
    assert_eq!((contents.received, contents.dropped), (contents.frames.len() as u64, 0));
    contents
}

/// Returns the captured part of each frame of a direction.
fn of(contents: &CaptureContents, direction: u32) -> Vec<Vec<u8>> {
    let frames = contents.frames.iter().filter(|frame| frame.direction == direction);
    frames.map(|frame| frame.bytes.clone()).collect()
}

#[test]
fn both_directions_of_a_pair_are_captured() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    for kind in kinds() {
        let card = card_on(2, "loop");
        // Without merged buffers, frames are not in batches, and the header is as long.
        for features in
            [card.features(), without(&card, NetFeatures::MRG_RXBUF | NetFeatures::GUEST_OFFLOADS)]
        {
            let [mut receive, mut transmit] =
                [2, 3].map(|index| Rig::start(&card, index, kind, SIZE_MAX, features));
            let sent: Vec<_> = (0..20).map(|number| frame(60 + 50 * usize::from(number), number)).collect();
            let mut exchange = || {
                while receive.offer(&[1530], true).is_some() {}
                // Some frames have one buffer and are taken in batches.
                sent.iter()
                    .zip([2000, 100].iter().cycle())
                    .for_each(|(frame, cut)| send(&mut transmit, frame, *cut));
                assert_eq!(transmit.poll(), 20);
                while transmit.take().is_some() {}
                receive.poll();
                (0..20).for_each(|_| drop(receive.receive(12).unwrap()));
            };
            exchange();
            begin(&card, &path, 100);
            exchange();
            let contents = end(&card, &path);
            exchange();
            assert_eq!(contents.interface, "card");
            let parts: Vec<_> = sent.iter().map(|frame| frame[..frame.len().min(100)].to_vec()).collect();
            assert!(of(&contents, OUTBOUND) == parts && of(&contents, INBOUND) == parts, "{kind:?}");
            assert!(contents.frames.iter().all(|frame| frame.queue == 1 && frame.len >= 60));
            for rig in [receive, transmit] {
                rig.stop();
            }
        }
    }
}

/// The announcements of a guest's address are frames that the card sends. A front-end that requests very many
/// gets few.
#[test]
fn announcements_are_few_and_captured() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    let ports = [NullPort::default().into(), "loop".into(), open(&name())];
    for port in ports {
        let card = card_on(1, port);
        begin(&card, &path, 100);
        let begun = std::time::Instant::now();
        (0..500).for_each(|_| card.message(DeviceMessage::SendRarp([2, 0, 0, 0, 0, 7])).unwrap());
        // Ten, and five in each further second.
        let most = 10 + begun.elapsed().as_millis() as u64 / 200;
        let made = counter(&card, "announcements") - counter(&card, "announcements_limited");
        assert_eq!(counter(&card, "announcements"), 500);
        assert!(made >= 10 && made <= most + 1, "{made}");
        let frames = of(&end(&card, &path), OUTBOUND);
        assert_eq!(frames.len() as u64, made);
        assert!(
            frames.iter().all(|frame| frame.len() == 60 && frame[6..14] == [2, 0, 0, 0, 0, 7, 0x80, 0x35])
        );
    }
}

#[test]
fn discarded_frames_are_captured_and_invalid_ones_are_not() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    let card = card(1, NullPort::default());
    let mut transmit = Rig::start(&card, 1, kinds().next().unwrap(), SIZE_MAX, card.features());
    begin(&card, &path, 65_550);
    let sent = [frame(60, 1), frame(13, 2), frame(65_550, 3), frame(14, 4)];
    for frame in &sent {
        send(&mut transmit, frame, 4096);
        transmit.poll();
        transmit.take().unwrap();
    }
    let contents = end(&card, &path);
    assert!(of(&contents, OUTBOUND) == [sent[0].clone(), sent[2].clone(), sent[3].clone()]);
    transmit.stop();
}
