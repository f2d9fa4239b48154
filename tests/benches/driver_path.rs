//! Measures the cost of a request at the driver's end, including header, status and completion:
//! `Queue::submit` and `Queue::poll` of reads of 4 KiB, in batches of 32 and of 1. The device, a disk that
//! answers at once, runs in the same thread.
//!
//! The benchmark measures both ends together, then the device's end alone, and subtracts. It does so turn
//! by turn and takes the best of many short runs, which excludes the effect of other programs. First,
//! valgrind counts the driver's instructions, which are the same each time.
//!
//!     cargo bench -p kickless-tests --bench driver_path [-- --quick | --instructions]

mod common;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use common::{Plan, Spread};
use kickless_driver::{Choice, Data, Options, Queue, Request};
use kickless_testing::{CountedLoad, print_instructions};
use kickless_tests::driver_and_device::{DeviceEnd, DriverAndDevice};

const DISK_SIZE: u64 = 1 << 30;
const BATCH_MAX: usize = 32;
/// Requests in flight while the device is measured alone.
const FILL: usize = 32;
/// Entries of the queue. Two batches leave half of the descriptors free, so that the driver uses no indirect
/// tables.
const QUEUE_SIZE: u16 = 512;
/// Requests of one short run.
const REQUESTS: usize = 4096;
/// Requests of the run that counts instructions.
const COUNTED: usize = 16 * 1024;
/// Largest time of a request in a batch of 32, for submission and completion, in nanoseconds.
const TARGET_NS: f64 = 30.0;

#[derive(Clone, Copy, Debug)]
struct Shape {
    packed: bool,
    in_order: bool,
    batch: usize,
}

impl Shape {
    fn all() -> Vec<Shape> {
        let mut all = Vec::new();
        for batch in [BATCH_MAX, 1] {
            for (packed, in_order) in [(false, false), (false, true), (true, false), (true, true)] {
                all.push(Shape { packed, in_order, batch });
            }
        }
        all
    }

    fn options(self) -> Options {
        let choice = |on| if on { Choice::On } else { Choice::Off };
        Options {
            packed: choice(self.packed),
            in_order: choice(self.in_order),
            event_idx: Choice::On,
            indirect: Choice::On,
            queue_size: QUEUE_SIZE,
            buffer_memory: 8 << 20,
            // The measuring thread polls.
            reactor: false,
            ..Options::new("")
        }
    }

    fn name(self) -> String {
        let ring = if self.packed { "packed" } else { "split" };
        let order = if self.in_order { ", in-order" } else { "" };
        format!("{ring}{order}")
    }
}

/// Submits requests and takes completions.
struct Driver {
    queue: Queue,
    data: Vec<Data>,
    batch: Vec<Request>,
    next: u64,
}

impl Driver {
    fn new(ends: &DriverAndDevice) -> Result<Driver> {
        let data = (0..2 * BATCH_MAX).map(|_| Ok(ends.disk.buffer(4096)?.into())).collect::<Result<_>>()?;
        Ok(Driver { queue: ends.disk.queue(0), data, batch: Vec::with_capacity(BATCH_MAX), next: 0 })
    }

    #[inline(never)]
    fn counted_submit(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            let Some(data) = self.data.pop() else { break };
            self.next = (self.next + 4096) % DISK_SIZE;
            self.batch.push(Request::read(self.next, data).token(self.next));
        }
        self.queue.submit(&mut self.batch)?;
        Ok(())
    }

    /// Takes `count` completions, which the device has shown. A poll of a packed ring may take a part.
    #[inline(never)]
    fn counted_complete(&mut self, count: usize) -> Result<()> {
        let mut done = 0;
        while done < count {
            let polled = self.queue.poll(FILL, |completion| {
                done += usize::from(completion.result.is_ok());
                self.data.push(completion.data);
            })?;
            ensure!(polled > 0, "the device has not answered");
        }
        Ok(())
    }
}

/// Runs about `requests` requests through both ends. Returns nanoseconds per request.
///
/// Another batch is always in flight, as if both ends were busy. A poll of a packed ring takes half of the
/// requests in flight, which is then one batch.
fn time_of_both(batch: usize, driver: &mut Driver, device: &mut DeviceEnd, requests: usize) -> Result<f64> {
    let rounds = requests / batch;
    driver.counted_submit(batch)?;
    let start = Instant::now();
    for _ in 0..rounds {
        driver.counted_submit(batch)?;
        device.poll(batch as u32);
        driver.counted_complete(batch)?;
    }
    let time = start.elapsed();
    device.poll(batch as u32);
    driver.counted_complete(batch)?;
    Ok(per_request(time, rounds * batch))
}

/// Runs about `requests` requests through the device's end. Returns nanoseconds per request.
fn time_of_device(batch: usize, driver: &mut Driver, device: &mut DeviceEnd, requests: usize) -> Result<f64> {
    let batches = FILL / batch;
    let clock = clock_cost();
    let (mut spent, mut done) = (Duration::ZERO, 0);
    while done < requests {
        for _ in 0..batches {
            driver.counted_submit(batch)?;
        }
        let start = Instant::now();
        for _ in 0..batches {
            done += device.poll(batch as u32) as usize;
        }
        spent += start.elapsed().saturating_sub(clock);
        driver.counted_complete(batches * batch)?;
    }
    Ok(per_request(spent, done))
}

/// Returns the time that it takes to read the clock.
fn clock_cost() -> Duration {
    (0..64).map(|_| Instant::now().elapsed()).min().unwrap_or_default()
}

fn per_request(spent: Duration, requests: usize) -> f64 {
    spent.as_nanos() as f64 / requests as f64
}

fn row(shape: Shape, plan: &Plan) -> Result<()> {
    let mut ends = DriverAndDevice::start(DISK_SIZE, shape.options())?;
    let mut driver = Driver::new(&ends)?;
    let runs = if plan.quick { 2 } else { 100 };
    let (mut boths, mut devices) = (Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let (mut least_both, mut least_device) = (f64::MAX, f64::MAX);
        for _ in 0..runs {
            least_both =
                least_both.min(time_of_both(shape.batch, &mut driver, &mut ends.device_end, REQUESTS)?);
            let device = time_of_device(shape.batch, &mut driver, &mut ends.device_end, REQUESTS)?;
            least_device = least_device.min(device);
        }
        boths.push(least_both);
        devices.push(least_device);
    }
    let ours = Spread::of(boths.iter().zip(&devices).map(|(both, device)| both - device));
    println!(
        "  {:<18} {:>5} {:>7.1} {:>7.1} {:>7.1}  {:>5.1} .. {:<5.1}",
        shape.name(),
        shape.batch,
        Spread::of(boths).median,
        Spread::of(devices).median,
        ours.median,
        ours.min,
        ours.max,
    );
    Ok(())
}

/// Runs the requests whose instructions are counted.
fn counted(shape: Shape) -> Result<()> {
    let mut ends = DriverAndDevice::start(DISK_SIZE, shape.options())?;
    let mut driver = Driver::new(&ends)?;
    time_of_both(shape.batch, &mut driver, &mut ends.device_end, COUNTED).map(drop)
}

fn main() -> Result<()> {
    let shapes = Shape::all();
    let plan = Plan::from_arguments();
    let load = |&shape: &Shape| {
        let name = format!("driver_path/{}/{}", shape.name().replace(", ", "/"), shape.batch);
        CountedLoad::new(name, COUNTED as u32, move || {
            if let Err(error) = counted(shape) {
                println!("{error:#}");
            }
        })
    };
    if !plan.quick && !print_instructions(&shapes.iter().map(load).collect::<Vec<_>>()) {
        return Ok(());
    }
    println!("reads of 4 KiB, ns for each, {} turns of each{}", plan.rounds, plan.remark());
    println!(
        "  {:<18} {:>5} {:>7} {:>7} {:>7}  {:>5} .. {:<5}",
        "", "batch", "both", "device", "driver", "least", "most"
    );
    for shape in shapes {
        row(shape, &plan)?;
    }
    println!("target: at most {TARGET_NS:.0} ns in a batch of {BATCH_MAX}{}", plan.remark());
    Ok(())
}
