//! Tests the rings of a pair with the rings of our devices, in one thread.

use std::collections::VecDeque;
use std::sync::Arc;

use kickless_memory::{Gpa, Marks, UserAddr, View};
use kickless_spec::features::Features;
use kickless_spec::net::{GSO_TCPV4, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use kickless_virtqueue::{Buffer, Chain};
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::memory::HEADER_LEN;
use super::rings::{Lost, PairLayout, PairRings};
use super::transmit::GROUP_FRAMES;
use crate::connection::RingSetup;
use crate::error::Error;
use crate::memory::{self, Region, Regions};
use crate::offload::{Checksum, Offload, Protocol, Segmentation};

/// The kinds of rings.
#[derive(Clone, Copy, Debug)]
struct Shape {
    size: u16,
    packed: bool,
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    mergeable: bool,
    buffer_len: u32,
}

const SHAPE: Shape = Shape {
    size: 8,
    packed: false,
    event_idx: true,
    indirect: true,
    in_order: false,
    mergeable: true,
    buffer_len: 128,
};

impl Shape {
    fn features(self) -> Features {
        let mut features = Features::from_bits_retain(self.net_features().bits());
        features.set(Features::RING_PACKED, self.packed);
        features.set(Features::EVENT_IDX, self.event_idx);
        features.set(Features::INDIRECT_DESC, self.indirect);
        features.set(Features::IN_ORDER, self.in_order);
        features
    }

    fn net_features(self) -> NetFeatures {
        let mut features = NetFeatures::all();
        features.set(NetFeatures::MRG_RXBUF, self.mergeable);
        features
    }

    /// Returns the device's end of a ring.
    fn device(self, setup: &RingSetup, view: &Arc<View>) -> Queue {
        let options = match self.packed {
            true => Options::packed(self.size, self.event_idx, self.indirect),
            false => Options::new(self.size, self.event_idx, self.indirect),
        };
        let options = options.unwrap().with_in_order(self.in_order);
        let addresses = Addresses {
            desc: UserAddr(setup.desc),
            avail: UserAddr(setup.driver),
            used: UserAddr(setup.device),
            log: None,
        };
        let metadata = Metadata::map(view, &addresses, &options).unwrap();
        Queue::new(options, metadata, if self.packed { 0x8000 } else { 0 })
    }
}

/// A card that keeps the frames that it gets, and delivers any frames.
struct Device {
    shape: Shape,
    view: Arc<View>,
    receive: Queue,
    transmit: Queue,
    /// The frames of the driver, with their headers.
    got: VecDeque<Vec<u8>>,
}

fn bytes_of(view: &View, buffers: &[Buffer]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for buffer in buffers {
        let mut part = vec![0; buffer.len as usize];
        view.read(Gpa(buffer.addr.0), &mut part).unwrap();
        bytes.extend(part);
    }
    bytes
}

impl Device {
    fn new(shape: Shape, rings: &PairRings, region: &Region) -> Self {
        let view = Arc::new(View::new(region.map().clone()));
        let [receive, transmit] = rings.setups();
        Self {
            receive: shape.device(receive, &view),
            transmit: shape.device(transmit, &view),
            shape,
            view,
            got: VecDeque::new(),
        }
    }

    /// Takes up to `max` frames of the driver.
    fn take(&mut self, max: usize) {
        let mut chain = Chain::default();
        for _ in 0..max {
            if !self.transmit.pop(&self.view, &mut chain).unwrap() {
                break;
            }
            assert!(chain.writable().is_empty());
            self.got.push_back(bytes_of(&self.view, chain.readable()));
            self.transmit.push(chain.id, 0);
        }
        let _ = self.transmit.publish();
    }

    /// Delivers a frame with its header, whose number of buffers this sets. Returns `false` if the driver has
    /// not offered enough buffers.
    fn deliver(&mut self, mut frame: Vec<u8>) -> bool {
        let mut chains = Vec::new();
        let mut room = 0;
        while room < frame.len() as u64 {
            let mut chain = Chain::default();
            if !self.receive.pop_credit(&self.view, &mut chain).unwrap() {
                break;
            }
            room += chain.writable_len();
            chains.push(chain);
        }
        if room < frame.len() as u64 {
            while self.receive.unpop().is_some() {}
            return false;
        }
        assert!(self.shape.mergeable || chains.len() == 1);
        let (mut header, _) = Header::read_from_prefix(&frame).unwrap();
        header.num_buffers = (chains.len() as u16).into();
        frame[..HEADER_LEN as usize].copy_from_slice(header.as_bytes());
        let mut group = Vec::new();
        let mut rest = &frame[..];
        for chain in &chains {
            assert!(self.receive.use_credit());
            let [buffer] = chain.writable() else { panic!("one buffer each") };
            let (now, later) = rest.split_at(rest.len().min(buffer.len as usize));
            self.view.write(Gpa(buffer.addr.0), now, &mut Marks::default()).unwrap();
            group.push((chain.id, now.len() as u32));
            rest = later;
        }
        self.receive.push_group(&group);
        let _ = self.receive.publish();
        true
    }
}

/// A pair and its card.
struct Rig {
    rings: PairRings,
    device: Device,
    region: Arc<Region>,
    shape: Shape,
}

impl Rig {
    fn new(shape: Shape) -> Self {
        let layout = PairLayout::new(memory::FIRST, shape.size, shape.features(), shape.buffer_len).unwrap();
        let regions = Regions::new(layout.end() - memory::FIRST, false).unwrap();
        let region = regions.all()[0].clone();
        let rings = PairRings::new(0, &layout, &region, shape.net_features()).unwrap();
        let device = Device::new(shape, &rings, &region);
        Self { rings, device, region, shape }
    }

    fn send(&mut self, frames: &[Vec<u8>]) -> usize {
        let sent = self.rings.send(
            frames.len(),
            |at| frames[at].len(),
            |at, frame| assert_eq!(frame.write(0, &frames[at]), frames[at].len()),
        );
        let (sent, ended) = sent.unwrap();
        ended.unwrap();
        sent.frames
    }

    fn receive(&mut self, max: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        self.rings.receive(max, |frame| frames.push(frame.to_vec())).unwrap();
        frames
    }
}

fn frame(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at * 7 + number * 31 + (at >> 8)) as u8).collect()
}

fn with_header(frame: &[u8]) -> Vec<u8> {
    [Header::default().as_bytes(), frame].concat()
}

#[derive(Clone, Debug)]
enum Step {
    Send { count: usize, len: usize },
    Take(usize),
    Deliver { count: usize, len: usize },
    Receive(usize),
    Forward(usize),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1usize..6, 14usize..700).prop_map(|(count, len)| Step::Send { count, len }),
        4 => (1usize..20).prop_map(Step::Take),
        4 => (1usize..6, 14usize..700).prop_map(|(count, len)| Step::Deliver { count, len }),
        4 => (1usize..20).prop_map(Step::Receive),
        3 => (1usize..20).prop_map(Step::Forward),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..80)
}

fn shapes() -> impl Strategy<Value = Shape> {
    let bits = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (0u32..7, bits, prop_oneof![Just(128u32), Just(200), Just(2048)]).prop_map(|(size, bits, buffer_len)| {
        let (packed, event_idx, indirect, in_order, mergeable) = bits;
        let buffer_len = if mergeable { buffer_len } else { 2048 };
        Shape { size: 1 << size, packed, event_idx, indirect, in_order, mergeable, buffer_len }
    })
}

/// Runs the steps. Each frame arrives whole, once and in order, and a restart loses what was in flight.
fn run(shape: Shape, steps: Vec<Step>) {
    let mut rig = Rig::new(shape);
    let (mut sent, mut delivered) = (VecDeque::new(), VecDeque::new());
    let mut number = 0;
    let longest = rig.rings.transmit.len_max(&rig.rings.memory);
    for step in steps {
        match step {
            Step::Send { count, len } => {
                let frames: Vec<_> = (0..count as u64).map(|n| frame(number + n, len.min(longest))).collect();
                number += count as u64;
                let count = rig.send(&frames);
                sent.extend(frames.into_iter().take(count));
            }
            Step::Take(max) => {
                rig.device.take(max);
                while let Some(got) = rig.device.got.pop_front() {
                    assert_eq!(Some(got), sent.pop_front().map(|frame| with_header(&frame)));
                }
            }
            Step::Deliver { count, len } => {
                for _ in 0..count {
                    let frame = frame(number, len);
                    number += 1;
                    if rig.device.deliver(with_header(&frame)) {
                        delivered.push_back(frame);
                    }
                }
            }
            Step::Receive(max) => {
                for frame in rig.receive(max) {
                    assert_eq!(Some(frame), delivered.pop_front());
                }
            }
            Step::Forward(max) => {
                let mut all = Vec::new();
                let done = rig.rings.forward(max, |frame| {
                    all.push(frame.to_vec());
                    true
                });
                let done = done.unwrap();
                assert_eq!(all.len(), done.received.frames);
                assert_eq!(done.sent.frames as u64 + done.dropped, done.received.frames as u64);
                // A frame of more buffers than the transmit ring has room for is dropped.
                let keeps = done.dropped == 0;
                for frame in all {
                    assert_eq!(Some(&frame), delivered.pop_front().as_ref());
                    sent.push_back(frame);
                }
                if !keeps {
                    // It is not known which were dropped.
                    restart(&mut rig, &mut sent, &mut delivered);
                }
            }
            Step::Restart => restart(&mut rig, &mut sent, &mut delivered),
        }
    }
    // Everything still gets through.
    loop {
        let before = (sent.len(), delivered.len());
        rig.device.take(usize::MAX);
        while let Some(got) = rig.device.got.pop_front() {
            assert_eq!(Some(got), sent.pop_front().map(|frame| with_header(&frame)));
        }
        for frame in rig.receive(usize::MAX) {
            assert_eq!(Some(frame), delivered.pop_front());
        }
        if before == (sent.len(), delivered.len()) {
            break;
        }
    }
    assert_eq!((sent.len(), delivered.len()), (0, 0));
    rig.rings.transmit.reap(&mut rig.rings.memory).unwrap();
    assert_eq!(rig.rings.transmit.in_flight(), 0);
}

fn restart(rig: &mut Rig, sent: &mut VecDeque<Vec<u8>>, delivered: &mut VecDeque<Vec<u8>>) {
    rig.rings.restart().unwrap();
    rig.device = Device::new(rig.shape, &rig.rings, &rig.region);
    sent.clear();
    delivered.clear();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn frames_arrive_whole_and_in_order(shape in shapes(), steps in steps()) {
        run(shape, steps);
    }
}

#[test]
fn frames_in_flight_are_lost_and_counted() {
    let mut rig = Rig::new(SHAPE);
    assert_eq!(rig.send(&[frame(1, 60), frame(2, 60), frame(3, 60)]), 3);
    rig.device.take(1);
    assert!(rig.device.deliver(with_header(&frame(4, 60))));
    assert_eq!(rig.rings.restart().unwrap(), Lost { sent: 2, received: 1 });
    rig.device = Device::new(SHAPE, &rig.rings, &rig.region);
    assert_eq!(rig.send(&[frame(4, 60)]), 1);
    rig.device.take(2);
    assert_eq!(rig.device.got, [with_header(&frame(4, 60))]);
    assert!(rig.device.deliver(with_header(&frame(5, 60))));
    assert_eq!(rig.receive(9), [frame(5, 60)]);
}

#[test]
fn offloads_arrive_in_both_directions() {
    let mut rig = Rig::new(SHAPE);
    let offload = Offload {
        checksum: Checksum::Partial { start: 34, offset: 16 },
        segmentation: Some(Segmentation { protocol: Protocol::TcpV4, size: 100, header_len: 54, ecn: false }),
    };
    let bytes = frame(1, 400);
    let sent = rig.rings.send(
        1,
        |_| bytes.len(),
        |_, frame| {
            frame.write(0, &bytes);
            frame.set_offload(offload);
        },
    );
    assert_eq!(sent.unwrap().0.frames, 1);
    rig.device.take(1);
    let got = rig.device.got.pop_front().unwrap();
    let header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54.into(),
        gso_size: 100.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        num_buffers: 0.into(),
    };
    assert_eq!(got, [header.as_bytes(), &bytes].concat());
    assert!(rig.device.deliver(got));
    let mut offloads = Vec::new();
    rig.rings.receive(1, |frame| offloads.push((frame.len(), frame.offload()))).unwrap();
    assert_eq!(offloads, [(400, offload)]);
}

#[test]
fn frames_with_senseless_headers_are_dropped() {
    let mut rig = Rig::new(SHAPE);
    let header = Header { flags: HDR_F_NEEDS_CSUM, csum_start: 100.into(), ..Header::default() };
    assert!(rig.device.deliver([header.as_bytes(), &frame(1, 60)].concat()));
    assert!(rig.device.deliver(with_header(&frame(2, 60))));
    let mut got = Vec::new();
    let done = rig.rings.receive(9, |frame| got.push(frame.to_vec())).unwrap();
    assert_eq!((done.frames, done.invalid, got), (1, 1, vec![frame(2, 60)]));
}

/// Delivers one buffer with a header that names `count` buffers, in `len` bytes.
fn error_of(count: u16, len: u32) -> Error {
    let mut rig = Rig::new(SHAPE);
    let mut chain = Chain::default();
    assert!(rig.device.receive.pop(&rig.device.view, &mut chain).unwrap());
    let header = Header { num_buffers: count.into(), ..Header::default() };
    let at = Gpa(chain.writable()[0].addr.0);
    rig.device.view.write(at, header.as_bytes(), &mut Marks::default()).unwrap();
    rig.device.receive.push(chain.id, len);
    let _ = rig.device.receive.publish();
    rig.rings.receive(9, |_| {}).unwrap_err()
}

#[test]
fn impossible_lengths_and_numbers_of_buffers_are_found() {
    for (count, len, text) in [
        (1, 11, "queue 0: the back-end wrote 11 bytes into buffer 0, and the header of a frame has 12"),
        (0, 72, "queue 0: a frame in 0 buffers, and the back-end has 8"),
        (9, 72, "queue 0: a frame in 9 buffers, and the back-end has 8"),
        (u16::MAX, 72, "queue 0: a frame in 65535 buffers, and the back-end has 8"),
    ] {
        assert_eq!(error_of(count, len).to_string(), text);
    }
    assert!(matches!(error_of(1, 129), Error::InvalidUsed { queue: 0, .. }));
}

#[test]
fn a_frame_whose_buffers_come_late_is_received_whole() {
    let mut rig = Rig::new(SHAPE);
    let bytes = frame(1, 300);
    let header = Header { num_buffers: 3.into(), ..Header::default() };
    let whole = [header.as_bytes(), &bytes].concat();
    let mut rest = &whole[..];
    while !rest.is_empty() {
        assert_eq!(rig.receive(9), [[0u8; 0]; 0]);
        let mut chain = Chain::default();
        assert!(rig.device.receive.pop(&rig.device.view, &mut chain).unwrap());
        let (now, later) = rest.split_at(rest.len().min(128));
        let at = Gpa(chain.writable()[0].addr.0);
        rig.device.view.write(at, now, &mut Marks::default()).unwrap();
        rig.device.receive.push(chain.id, now.len() as u32);
        let _ = rig.device.receive.publish();
        rest = later;
    }
    assert_eq!(rig.receive(9), [bytes]);
}

/// A long ring of either kind.
fn long_rings() -> impl Iterator<Item = Shape> {
    [false, true].map(|packed| Shape { size: 64, packed, ..SHAPE }).into_iter()
}

#[test]
fn the_device_takes_the_first_frames_while_others_are_written() {
    for shape in long_rings() {
        let Rig { mut rings, mut device, .. } = Rig::new(shape);
        let mut taken = Vec::new();
        let sent = rings.send(
            40,
            |_| 60,
            |_, _| {
                device.take(64);
                taken.push(device.got.len());
            },
        );
        assert_eq!(sent.unwrap().0.frames, 40);
        let expected: Vec<_> = (0..40).map(|at| at / GROUP_FRAMES * GROUP_FRAMES).collect();
        assert_eq!(taken, expected, "{shape:?}");
        device.take(64);
        assert_eq!(device.got.len(), 40);
    }
}

/// A call that took each frame that comes meanwhile would not end.
#[test]
fn frames_that_come_during_a_call_are_left_for_the_next_one() {
    for shape in long_rings() {
        for forwards in [false, true] {
            let Rig { mut rings, mut device, .. } = Rig::new(shape);
            let deliver = |device: &mut Device| assert!(device.deliver(with_header(&frame(1, 60))));
            (0..3).for_each(|_| deliver(&mut device));
            for _ in 0..3 {
                let frames = match forwards {
                    false => rings.receive(64, |_| deliver(&mut device)).unwrap().frames,
                    true => {
                        let done = rings.forward(64, |_| {
                            deliver(&mut device);
                            true
                        });
                        done.unwrap().received.frames
                    }
                };
                // Six times the three that are there.
                assert_eq!(frames, 18, "{shape:?} {forwards}");
            }
        }
    }
}
