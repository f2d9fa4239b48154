//! Runs our driver against a back-end that answers at random. Each request must end once, every call must
//! return, and the device must touch only the driver's own memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use kickless_driver::{Buffer, Choice, Completion, Disk, Error, Options, Queue, Request, Waiting};
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_testing::pattern;
use kickless_tests::block_on::block_on;
use kickless_tests::hostile_backend::faults::Rules;
use kickless_tests::hostile_backend::{HostileBackend, returns_in_time};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Number of requests through each interface.
const REQUESTS: u64 = 60;

fn options(backend: &HostileBackend, seed: u64) -> Options {
    let choice = |bit: u64| if seed >> bit & 1 == 0 { Choice::Auto } else { Choice::Off };
    Options {
        queues: 1 + (seed % 2) as u16,
        queue_size: 4 << (seed % 4),
        packed: choice(0),
        in_order: choice(1),
        event_idx: choice(2),
        indirect: choice(3),
        waiting: if seed.is_multiple_of(5) {
            Waiting::Spin(Duration::from_millis(1))
        } else {
            Waiting::Sleep
        },
        buffer_memory: 4 << 20,
        reconnect_limit: Duration::from_millis(if seed.is_multiple_of(3) { 0 } else { 150 }),
        reply_timeout: Duration::from_millis(500),
        ..Options::new(backend.socket())
    }
}

fn blocking(disk: &Disk, seed: u64) {
    for round in 0..REQUESTS {
        let at = (seed + round * 7) % 200 * 512;
        let _ = disk.write_at(&pattern(seed, 1024), at);
        let _ = disk.read_at(&mut [0; 1536], at);
        match round % 16 {
            0 => drop(disk.flush()),
            1 => drop(disk.get_id()),
            2 => drop(disk.size()),
            3 => drop(disk.set_writeback(round % 32 == 3)),
            _ => {}
        }
    }
}

fn futures(disk: &Disk, seed: u64) {
    for round in 0..REQUESTS {
        let Ok(buffer) = disk.buffer(512) else { continue };
        let finished = block_on(disk.start(Request::read((seed + round) % 100 * 512, buffer)));
        // The request returns its memory in any case.
        assert_eq!(finished.data.len(), 512);
        if let Ok(buffer) = disk.buffer(512) {
            // Drops the future of a request in flight.
            let mut dropped = Box::pin(disk.start(Request::write(0, buffer)));
            let _ = dropped.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

fn polling(queue: &Queue, disk: &Disk) {
    let mut ends = vec![0u32; REQUESTS as usize];
    let mut submitted = vec![false; REQUESTS as usize];
    let mut counted = 0;
    let mut handed = 0;
    let mut next = 0;
    let mut each = |completion: Completion| {
        ends[completion.token as usize] += 1;
        handed += 1;
        assert_eq!(completion.data.len(), 512);
    };
    loop {
        if let Some(place) = submitted.get_mut(next)
            && let Ok(buffer) = disk.buffer(512)
        {
            let request = Request::read(next as u64 % 100 * 512, buffer).token(next as u64);
            match queue.submit_one(request) {
                Ok(()) => *place = true,
                Err(refused) if matches!(refused.error, Error::Full) => {
                    counted += queue.wait(1, Some(Duration::from_millis(20)), &mut each).unwrap_or(0);
                    continue;
                }
                Err(refused) => assert_eq!(refused.request.into_data().len(), 512),
            }
            next += 1;
        } else {
            // Either all requests have completed, or the disk is dead and has none left.
            match queue.wait(4, Some(Duration::from_millis(20)), &mut each) {
                Ok(count) => counted += count,
                Err(_) => break,
            }
            if counted == submitted.iter().filter(|submitted| **submitted).count() {
                break;
            }
        }
    }
    assert_eq!(counted, handed, "the count differs from the completions handed out");
    for (token, (ends, submitted)) in ends.iter().zip(submitted).enumerate() {
        assert_eq!(*ends, u32::from(submitted), "request {token}");
    }
}

/// Fills memory that no request uses. A change there is a mistake of the driver.
fn canary(buffer: &mut Buffer) -> Vec<u8> {
    let bytes = pattern(99, buffer.len());
    buffer.write(0, &bytes);
    bytes
}

/// Uses one disk from connecting to closing. Returns whether it connected.
fn life(seed: u64) -> bool {
    let mut rules = Rules { chaos: Some(seed), ..Rules::default() };
    if seed.is_multiple_of(7) {
        rules.protocol.remove(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
    }
    let backend = HostileBackend::start(rules).unwrap();
    let Ok(disk) = Disk::connect(options(&backend, seed)) else { return false };
    let mut before = disk.buffer(4096).unwrap();
    let mut after = disk.buffer(8192).unwrap();
    let (first, second) = (canary(&mut before), canary(&mut after));
    let file = memfd_create("mine", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 16).unwrap();
    let registered = disk.register(&file, 0, 1 << 16);
    thread::scope(|scope| {
        scope.spawn(|| blocking(&disk, seed));
        scope.spawn(|| futures(&disk, seed));
        scope.spawn(|| polling(&disk.queue(0), &disk));
        if disk.queues() > 1 {
            scope.spawn(|| polling(&disk.queue(1), &disk));
        }
    });
    assert!(before.to_vec() == first && after.to_vec() == second, "the driver wrote to memory of no request");
    let mut bytes = vec![1; 1 << 16];
    assert_eq!(rustix::io::pread(&file, &mut bytes, 0), Ok(1 << 16));
    assert!(bytes.iter().all(|byte| *byte == 0), "the driver wrote to memory of no request");
    drop(registered);
    true
}

/// Runs consecutive seeds. `KICKLESS_CHAOS_SEED` and `KICKLESS_CHAOS_RUNS` select others.
#[test]
fn random_answers_end_each_request_once() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    let (seed, runs) = (number("KICKLESS_CHAOS_SEED", 1), number("KICKLESS_CHAOS_RUNS", 100));
    let mut connected = 0;
    for seed in seed..seed + runs {
        println!("seed {seed}");
        connected += u64::from(returns_in_time(move || life(seed)));
    }
    assert!(runs < 10 || connected > runs / 2, "only {connected} of {runs} got past the handshake");
}
