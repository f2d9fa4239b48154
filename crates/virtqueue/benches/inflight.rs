//! Measures the cost of the in-flight buffer for a request: pop, push and publish of a chain of three
//! descriptors, in batches of 32, with and without the buffer in turns.
//!
//!     cargo bench -p kickless-virtqueue --bench inflight
//!
//! With `--one FORMAT WITH ROUNDS` (`split` or `packed`, `0` or `1`), it runs only that, for callgrind.
#![allow(clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/model/mod.rs"]
mod model;

use kickless_memory::{Area, Gpa, Inflight, UserAddr, View};
use kickless_spec::ring::{DESC_F_NEXT, PackedDesc};
use kickless_spec::vhost_user::{inflight_entry_len, inflight_head_len};
use kickless_virtqueue::device::{Metadata, Options, Queue};
use kickless_virtqueue::packed::RingPosition;
use kickless_virtqueue::{Chain, ChainId};
use model::{ADDRESSES, Buf, Driver, USER};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BATCH: u16 = 32;
const SIZE: u16 = 256;
const BUFS: [(u64, u32); 3] = [(0x1000, 16), (0x10_0000, 4096), (0x2000, 1)];

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some([_, format, with, rounds]) = args.windows(4).find(|args| args[0] == "--one") {
        let mut bench = Bench::new(format == "packed", with == "1");
        (0..rounds.parse::<u32>().unwrap()).for_each(|_| _ = bench.round());
        return;
    }
    let (rounds, runs) = if args.iter().any(|arg| arg == "--bench") { (500, 400) } else { (10, 1) };
    println!("pop, push and publish, 3 descriptors a chain, batches of {BATCH}, ns/request:");
    for packed in [false, true] {
        let mut benches = [false, true].map(|with| Bench::new(packed, with));
        let mut best = [f64::MAX; 2];
        for _ in 0..runs {
            for (bench, best) in benches.iter_mut().zip(&mut best) {
                let spent: Duration = (0..rounds).map(|_| bench.round()).sum();
                *best = best.min(spent.as_nanos() as f64 / f64::from(rounds) / f64::from(BATCH));
            }
        }
        let [without, with] = best;
        let format = if packed { "packed" } else { "split" };
        println!("  {format:6} without {without:6.1}, with {with:6.1}, ratio {:.2}", with / without);
    }
}

/// A device and its driver.
struct Bench {
    queue: Queue,
    driver: Offers,
    view: Arc<View>,
    chain: Chain,
    ids: Vec<ChainId>,
    _buffer: Option<Inflight>,
}

enum Offers {
    /// A ring that is laid out once, and offered again and again.
    Split(Box<Driver>, Vec<u16>),
    Packed(Area, RingPosition),
}

impl Bench {
    fn new(packed: bool, tracked: bool) -> Self {
        let options = match packed {
            true => Options::packed(SIZE, true, false),
            false => Options::new(SIZE, true, false),
        };
        let options = options.unwrap();
        let (view, driver) = if packed {
            let view = model::memory();
            let ring = view.map().area(UserAddr(USER), 16 * usize::from(SIZE), 16).unwrap();
            (view, Offers::Packed(ring, RingPosition::FIRST))
        } else {
            let mut driver = Driver::new(options, 0);
            let bufs: Vec<Buf> =
                BUFS.iter().map(|&(addr, len)| Buf { addr, len, writable: len != 16 }).collect();
            let heads = (0..BATCH).map(|_| driver.add(&bufs, 3).unwrap()).collect();
            driver.publish();
            (driver.view.clone(), Offers::Split(Box::new(driver), heads))
        };
        let mut queue = Queue::unmapped(options, if packed { 0x8000 } else { 0 }, &view);
        let buffer = tracked.then(|| {
            let len = inflight_head_len(packed) + inflight_entry_len(packed) * usize::from(SIZE);
            let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, len as u64).unwrap();
            let buffer = Inflight::map(file, 0, len as u64).unwrap();
            queue.track(buffer.records(0, len).unwrap());
            buffer
        });
        queue.remap(Metadata::map(&view, &ADDRESSES, &options).unwrap());
        queue.disarm();
        let mut bench =
            Self { queue, driver, view, chain: Chain::default(), ids: Vec::new(), _buffer: buffer };
        if !packed {
            bench.serve();
        }
        bench
    }

    /// The driver offers a batch. Returns the time that the device takes to serve it.
    fn round(&mut self) -> Duration {
        match &mut self.driver {
            Offers::Split(driver, heads) => {
                heads.iter().for_each(|head| driver.offer(*head));
                driver.publish();
            }
            Offers::Packed(ring, next) => {
                for id in 0..BATCH {
                    for (nth, &(addr, len)) in (0..).zip(&BUFS) {
                        let writable = if len == 16 { 0 } else { kickless_spec::ring::DESC_F_WRITE };
                        let more = if nth < 2 { DESC_F_NEXT } else { 0 };
                        let flags = next.available() | writable | more;
                        let (addr, len) = (Gpa(addr).0.into(), len.into());
                        ring.write(next.at(), &PackedDesc { addr, len, id: id.into(), flags: flags.into() });
                        *next = next.after(1, SIZE);
                    }
                }
            }
        }
        let start = Instant::now();
        self.serve();
        let spent = start.elapsed();
        assert_eq!(self.ids.len(), usize::from(BATCH));
        spent
    }

    #[inline(never)]
    fn serve(&mut self) {
        self.ids.clear();
        while self.queue.pop(&self.view, &mut self.chain).unwrap() {
            black_box((self.chain.readable(), self.chain.writable()));
            self.ids.push(self.chain.id);
        }
        for &id in &self.ids {
            self.queue.push(id, 4097);
        }
        black_box(self.queue.publish());
    }
}
