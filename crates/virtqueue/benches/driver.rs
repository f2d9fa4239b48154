//! Measures the cost of a request at the driver's end of a ring: add and publish, pop and give back of a
//! chain of three descriptors (a header, a page, a status byte). Batches have 32 requests or 1, in one thread
//! and with warm caches.
//!
//! Both ends are measured together, and then the device's end alone on prepared rings, whose cost is
//! subtracted. They take turns. The best of many short runs counts, because other programs disturb the
//! others. First, valgrind counts the driver's instructions, which are the same each time.
//!
//!     cargo bench -p kickless-virtqueue --bench driver [-- --quick | --instructions]
#![allow(clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/model/mod.rs"]
mod model;

use kickless_memory::{Area, UserAddr, View};
use kickless_testing::{CountedLoad, print_instructions};
use kickless_virtqueue::driver::{self, Areas, Buffer, Completer, Submitter, Table};
use kickless_virtqueue::{Chain, ChainId, device};
use model::{ADDRESSES, AVAIL, DESC, SEAM, TABLES, USED, USER, memory};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u16 = 256;
const BATCH_MAX: usize = 32;
/// Largest cost in nanoseconds of a request in a batch of 32.
const TARGET_NS: f64 = 30.0;
/// Bytes from one indirect table to the next.
const TABLE_STRIDE: usize = 64;
/// Requests of a run whose instructions are counted.
const COUNTED: usize = 32 * 1024;

#[derive(Clone, Copy, Debug)]
struct Shape {
    packed: bool,
    in_order: bool,
    indirect: bool,
    batch: usize,
}

impl Shape {
    fn all() -> impl Iterator<Item = Shape> {
        (0..16).map(|bits| Shape {
            batch: if bits & 8 == 0 { BATCH_MAX } else { 1 },
            packed: bits & 4 != 0,
            in_order: bits & 2 != 0,
            indirect: bits & 1 != 0,
        })
    }

    fn options(self) -> device::Options {
        let options = match self.packed {
            true => device::Options::packed(SIZE, true, self.indirect),
            false => device::Options::new(SIZE, true, self.indirect),
        };
        options.unwrap().with_in_order(self.in_order)
    }

    /// Returns the words for the ring, for the order of its buffers, and for the place of its descriptors.
    fn words(self) -> [&'static str; 3] {
        let ring = if self.packed { "packed" } else { "split" };
        let order = if self.in_order { "in-order" } else { "any-order" };
        [ring, order, if self.indirect { "indirect" } else { "direct" }]
    }

    /// Returns the run whose instructions are counted.
    fn load(self) -> CountedLoad {
        let name = format!("driver/{}/{}", self.words().join("/"), self.batch);
        CountedLoad::new(name, COUNTED as u32, move || {
            both(self, &mut pair(self), COUNTED);
        })
    }

    /// Returns the index at which a device begins.
    fn base(self) -> u16 {
        if self.packed { 1 << 15 } else { 0 }
    }
}

/// The driver's end, and memory for its tables.
struct Driver {
    submitter: Submitter,
    completer: Completer,
    tables: Area,
    indirect: bool,
}

impl Driver {
    /// Adds this many requests and shows them. Returns how many there was room for.
    #[inline(never)]
    fn counted_submit(&mut self, count: usize) -> usize {
        for done in 0..count {
            let Some(id) = self.submitter.next_id() else { return done };
            // The memory of a request, by its id.
            let addr = 0x1000 * u64::from(id);
            let buffers = [
                Buffer { addr, len: 16, writable: false },
                Buffer { addr: 0x10_0000 + addr, len: 4096, writable: true },
                Buffer { addr: addr + 32, len: 1, writable: true },
            ];
            let offset = TABLE_STRIDE * usize::from(id);
            let table = Table { area: &self.tables, offset, addr: TABLES + offset as u64 };
            if self.submitter.add(black_box(&buffers), self.indirect.then_some(table)).is_err() {
                return done;
            }
        }
        black_box(self.submitter.publish());
        count
    }

    /// Takes used chains back. Returns their number.
    #[inline(never)]
    fn counted_complete(&mut self) -> usize {
        let mut count = 0;
        while let Some(done) = self.completer.pop().unwrap() {
            self.completer.give_back(black_box(done).id);
            count += 1;
        }
        count
    }
}

/// The device's end.
struct Device {
    queue: device::Queue,
    view: Arc<View>,
    chain: Chain,
    ids: Vec<ChainId>,
}

impl Device {
    /// Pops and pushes up to this many requests, and shows them. Returns their number.
    #[inline(never)]
    fn round(&mut self, count: usize) -> usize {
        self.ids.clear();
        while self.ids.len() < count && self.queue.pop(&self.view, &mut self.chain).unwrap() {
            black_box((self.chain.readable(), self.chain.writable()));
            self.ids.push(self.chain.id);
        }
        for &id in &self.ids {
            self.queue.push(id, 4097);
        }
        black_box(self.queue.publish());
        self.ids.len()
    }
}

fn pair(shape: Shape) -> (Driver, Device) {
    let view = memory();
    let area = |gpa: u64, len: u64| view.map().area(UserAddr(USER + gpa), len as usize, 16).unwrap();
    let areas = Areas {
        desc: area(DESC, AVAIL - DESC),
        driver: area(AVAIL, USED - AVAIL),
        device: area(USED, TABLES - USED),
    };
    let (submitter, mut completer) = driver::queue(shape.options(), areas);
    completer.disable_calls();
    let metadata = device::Metadata::map(&view, &ADDRESSES, &shape.options()).unwrap();
    let mut queue = device::Queue::new(shape.options(), metadata, shape.base());
    queue.disarm();
    let tables = area(TABLES, SEAM - TABLES);
    let driver = Driver { submitter, completer, tables, indirect: shape.indirect };
    (driver, Device { queue, view, chain: Chain::default(), ids: Vec::with_capacity(BATCH_MAX) })
}

/// Runs about this many requests through both ends. Returns nanoseconds for each.
fn both(shape: Shape, (driver, device): &mut (Driver, Device), requests: usize) -> f64 {
    let rounds = requests / shape.batch;
    let start = Instant::now();
    for _ in 0..rounds {
        let submitted = driver.counted_submit(shape.batch);
        let served = device.round(shape.batch);
        assert_eq!((submitted, driver.counted_complete()), (served, served));
    }
    per_request(start.elapsed(), rounds * shape.batch)
}

/// Runs about this many requests through the device's end. Returns nanoseconds for each.
fn device_alone(shape: Shape, (driver, device): &mut (Driver, Device), requests: usize) -> f64 {
    // Three descriptors each, or one.
    let chains = usize::from(SIZE) / if shape.indirect { 1 } else { 3 };
    let batches = chains / shape.batch;
    let mut spent = Duration::ZERO;
    let mut done = 0;
    while done < requests {
        for _ in 0..batches {
            assert_eq!(driver.counted_submit(shape.batch), shape.batch);
        }
        let start = Instant::now();
        for _ in 0..batches {
            done += device.round(shape.batch);
        }
        spent += start.elapsed();
        assert_eq!(driver.counted_complete(), batches * shape.batch);
    }
    per_request(spent, done)
}

fn per_request(spent: Duration, requests: usize) -> f64 {
    spent.as_nanos() as f64 / requests as f64
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn row(shape: Shape, rounds: usize, runs: usize) {
    const REQUESTS: usize = 4096;
    let mut ends = pair(shape);
    let best = |run: &mut dyn FnMut() -> f64| (0..runs).map(|_| run()).fold(f64::MAX, f64::min);
    let (mut boths, mut devices, mut drivers) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let both = best(&mut || both(shape, &mut ends, REQUESTS));
        let device = best(&mut || device_alone(shape, &mut ends, REQUESTS));
        boths.push(both);
        devices.push(device);
        drivers.push(both - device);
    }
    let driver = median(&mut drivers);
    let [ring, order, place] = shape.words();
    println!(
        "  {ring:6} {order:9} {place:8} {:>5} {:>7.1} {:>7.1} {driver:>7.1}  {:>5.1} .. {:<5.1}",
        shape.batch,
        median(&mut boths),
        median(&mut devices),
        drivers[0],
        drivers[rounds - 1],
    );
}

fn main() {
    let asked = |word: &str| std::env::args().any(|argument| argument == word);
    let short = std::env::var_os("KICKLESS_BENCH_QUICK").is_some_and(|value| value == "1");
    let quick = short || asked("--quick") || !asked("--bench");
    if !quick && !print_instructions(&Shape::all().map(Shape::load).collect::<Vec<_>>()) {
        return;
    }
    let (rounds, runs) = if quick { (1, 3) } else { (7, 100) };
    println!(
        "the driver's end of a ring of {SIZE}, ns for each request, {rounds} turns of each{}",
        if quick { "  (short form: not a measurement)" } else { "" }
    );
    println!(
        "  {:25} {:>5} {:>7} {:>7} {:>7}  {:>5} .. {:<5}",
        "", "batch", "both", "device", "driver", "least", "most"
    );
    for shape in Shape::all() {
        row(shape, rounds, runs);
    }
    println!("target: at most {TARGET_NS:.0} ns in a batch of {BATCH_MAX}");
}
