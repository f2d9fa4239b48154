//! Runs the driver's end of a queue pair of a network card. The input is the back-end: it takes and delivers
//! frames with any lengths, ids, headers and numbers of buffers, and it overwrites any memory that it shares.
//!
//! No call panics or leaves the driver's memory. A received frame is never longer than the buffers that the
//! driver gave, and no more frames are in flight than the ring has descriptors. After an error or a restart,
//! the rings work again.
#![no_main]

use std::sync::Arc;

use kickless_driver::fuzzing::Pair;
use kickless_memory::{Gpa, Marks, UserAddr, View};
use kickless_spec::features::Features;
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use libfuzzer_sys::fuzz_target;
use zerocopy::IntoBytes;

const BUFFER_LEN: u32 = 128;
/// The first bytes of the memory: the rings of the largest queues, and some buffers.
const RANGE: u64 = 0x8000;

fuzz_target!(|data: &[u8]| {
    let [size, flags, net, ops @ ..] = data else { return };
    let mergeable = flags & 16 != 0;
    // Without mergeable buffers, buffers for large packets would be long.
    let mut card = if net & 1 != 0 && mergeable { NetFeatures::all() } else { NetFeatures::empty() };
    card.set(NetFeatures::MRG_RXBUF, mergeable);
    let mut features = Features::from_bits_retain(card.bits());
    for (bit, feature) in [
        (1, Features::RING_PACKED),
        (2, Features::EVENT_IDX),
        (4, Features::INDIRECT_DESC),
        (8, Features::IN_ORDER),
    ] {
        features.set(feature, flags & bit != 0);
    }
    let size = 1 << (size % 6);
    let Ok(pair) = Pair::new(size, features, BUFFER_LEN) else { return };
    BackEnd::new(pair, size, features).run(ops);
});

struct BackEnd {
    pair: Pair,
    size: u16,
    features: Features,
    view: Arc<View>,
    receive: Queue,
    transmit: Queue,
}

fn queue(view: &Arc<View>, size: u16, features: Features, [desc, avail, used]: [u64; 3]) -> Queue {
    let has = |feature| features.contains(feature);
    let (event_idx, indirect) = (has(Features::EVENT_IDX), has(Features::INDIRECT_DESC));
    let packed = has(Features::RING_PACKED);
    let options = match packed {
        true => Options::packed(size, event_idx, indirect),
        false => Options::new(size, event_idx, indirect),
    };
    let options = options.expect("a power of two").with_in_order(has(Features::IN_ORDER));
    let addresses =
        Addresses { desc: UserAddr(desc), avail: UserAddr(avail), used: UserAddr(used), log: None };
    let metadata = Metadata::map(view, &addresses, &options).expect("the driver's memory");
    Queue::new(options, metadata, if packed { 0x8000 } else { 0 })
}

impl BackEnd {
    fn new(pair: Pair, size: u16, features: Features) -> Self {
        let view = Arc::new(View::new(pair.map().clone()));
        let [receive, transmit] = pair.addresses().map(|addresses| queue(&view, size, features, addresses));
        Self { pair, size, features, view, receive, transmit }
    }

    fn run(&mut self, mut ops: &[u8]) {
        while let [op, detail, rest @ ..] = ops {
            ops = rest;
            let detail = *detail;
            let count = usize::from(detail % 16);
            let done = match op % 8 {
                0 => self.pair.send(count, usize::from(detail) * 3),
                1 => self.check_received(count),
                2 => self.pair.forward(count),
                3 => self.take(detail),
                4..6 => self.deliver(detail, &mut ops),
                6 => self.write_anywhere(&mut ops),
                _ => Err(kickless_driver::Error::RingError),
            };
            if done.is_err() {
                self.pair.restart().expect("the memory is still there");
                let addresses = self.pair.addresses();
                let queues =
                    addresses.map(|addresses| queue(&self.view, self.size, self.features, addresses));
                [self.receive, self.transmit] = queues;
            }
            assert!(self.pair.in_flight() <= self.size.into(), "more frames in flight than descriptors");
        }
    }

    fn check_received(&mut self, count: usize) -> Result<usize, kickless_driver::Error> {
        // Buffers are not shorter than those for the MTU.
        let longest = usize::from(self.size) * 2048;
        self.pair.receive(count, |frame| {
            assert!(frame.len() <= longest, "a frame longer than all buffers");
            assert_eq!(frame.to_vec().len(), frame.len());
            let mut last = [0; 8];
            let offset = frame.len().saturating_sub(8);
            assert_eq!(frame.read(offset, &mut last), frame.len().min(8));
            assert_eq!(frame.read(frame.len(), &mut last), 0);
        })
    }

    /// Takes frames, and says of some of them that it has written to them.
    fn take(&mut self, detail: u8) -> Result<usize, kickless_driver::Error> {
        let mut chain = Chain::default();
        for _ in 0..detail % 8 {
            if !matches!(self.transmit.pop(&self.view, &mut chain), Ok(true)) {
                break;
            }
            self.transmit.push(chain.id, u32::from(detail >= 250));
        }
        let _ = self.transmit.publish();
        Ok(0)
    }

    /// Delivers buffers with a header of the input, and with small lies about lengths and numbers.
    fn deliver(&mut self, detail: u8, ops: &mut &[u8]) -> Result<usize, kickless_driver::Error> {
        let mut header = Header::default();
        if detail & 64 != 0
            && let Some((bytes, rest)) = ops.split_at_checked(size_of::<Header>())
        {
            header.as_mut_bytes().copy_from_slice(bytes);
            *ops = rest;
        }
        let count = 1 + u16::from(detail % 4);
        if detail & 128 == 0 {
            header.num_buffers = count.into();
        }
        let mut chain = Chain::default();
        for at in 0..count {
            if !matches!(self.receive.pop(&self.view, &mut chain), Ok(true)) {
                break;
            }
            let Some(buffer) = chain.writable().first() else { continue };
            if at == 0 {
                let _ = self.view.write(buffer.addr, header.as_bytes(), &mut Marks::default());
            }
            let lie = match detail >> 2 & 15 {
                0 => 0,
                1 => buffer.len + 1,
                2 => 11,
                len => len as u32 * 9,
            };
            self.receive.push(chain.id, lie);
        }
        let _ = self.receive.publish();
        Ok(0)
    }

    /// Writes eight bytes at any address.
    fn write_anywhere(&mut self, ops: &mut &[u8]) -> Result<usize, kickless_driver::Error> {
        if let [low, high, a, b, c, d, e, f, g, h, rest @ ..] = ops {
            let at = u64::from(u16::from_le_bytes([*low, *high])) % (RANGE - 8);
            let _ = self.pair.map().write(Gpa(Pair::START + at), &[*a, *b, *c, *d, *e, *f, *g, *h]);
            *ops = rest;
        }
        Ok(0)
    }
}
