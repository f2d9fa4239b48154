//! The end of the process that gives.

use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_handover::v1::{Passed, Phase, Plan, Planned};
use kickless_handover::{Decision, Giving, HandedOver, OldEnd};
use kickless_sync::lock;
use rustix::time::{ClockId, clock_gettime};

use super::config::{give_listener, written};
use super::fault::{End, step};
use super::passing::{self, Passing};
use super::{Beside, PAUSE_WAIT, PREPARE_WAIT, STORE_WAIT, UPGRADES};
use crate::device_status::DeviceState;
use crate::registry::Registry;
use crate::served_device::ServedDevice;

/// The longest time that a freeze waits for changes that go on.
const FREEZE_WAIT: Duration = Duration::from_secs(10);
/// The longest time until a session is parked. It parks between two messages.
const PARK_WAIT: Duration = Duration::from_secs(2);
/// The threads that look at disks, and sync them, before the pause.
const SETTLERS: usize = 16;
/// The time of a look at a ring, after all other rings were looked at.
const LOOK: Duration = Duration::from_millis(1);

/// All devices of a process that serves none any more. It must end now, and run no destructor.
#[derive(Debug)]
pub struct Given {
    /// The number of devices.
    pub devices: usize,
    channel: HandedOver,
}

impl Given {
    /// Waits until the new process lets this one end, or has ended.
    pub fn wait_for_release(&self, deadline: Instant) {
        self.channel.wait_for_release(deadline);
    }
}

/// Gives all devices to the process at the other end of `channel`. Waits until that one serves, or until this
/// one goes on. Requests in flight have the time `drain` to complete. `to_store`: that process only keeps
/// them, for another one, so disks are written back as at an end.
///
/// # Errors
/// This process goes on. The error is one sentence, which the other process has too.
pub fn hand_over(
    registry: &Registry,
    beside: &Beside,
    channel: OwnedFd,
    drain: Duration,
    to_store: bool,
) -> Result<Given, String> {
    let mut end = OldEnd::new(channel);
    let freeze = registry.freeze(Instant::now() + FREEZE_WAIT).map_err(|why| why.to_string());
    let freeze = match step(End::Old, 1).and(freeze) {
        Ok(freeze) => freeze,
        Err(why) => {
            end.refuse(&why);
            return Err(why);
        }
    };
    let mut passing = Vec::new();
    let prepared = prepare(registry, beside, &mut end, &mut passing, drain)
        .and_then(|()| pause(&mut end, &mut passing, drain, to_store))
        .and_then(|()| step(End::Old, 10));
    let wait = if to_store { STORE_WAIT } else { PAUSE_WAIT };
    let decision = match prepared {
        Ok(()) => end.offer(Instant::now() + wait),
        Err(why) => {
            passing.into_iter().for_each(Passing::go_on);
            end.refuse(&why);
            return Err(why);
        }
    };
    match decision {
        Decision::Taken(channel) => {
            let devices = passing.len();
            // Dropping these would let the rings go on, which are those of another process.
            mem::forget((passing, freeze));
            // It is too late for an error.
            let _ = step(End::Old, 12);
            Ok(Given { devices, channel })
        }
        Decision::Kept(why) => {
            passing.into_iter().for_each(Passing::go_on);
            Err(why.to_string())
        }
    }
}

/// Does all that can be done while rings run.
fn prepare(
    registry: &Registry,
    beside: &Beside,
    end: &mut OldEnd,
    passing: &mut Vec<Passing>,
    drain: Duration,
) -> Result<(), String> {
    let deadline = || Instant::now() + PREPARE_WAIT;
    let (plan, giving) = plan(registry, beside, passing)?;
    let record = giving.record(&plan).map_err(|error| error.to_string())?;
    step(End::Old, 2)?;
    end.plan(passing.len() as u32, record, deadline()).map_err(|error| error.to_string())?;
    step(End::Old, 3)?;
    for_all(passing, |device| {
        passing::look(device);
        Ok(())
    })?;
    for device in &mut *passing {
        device.give_first(end, Instant::now() + PARK_WAIT, deadline())?;
        step(End::Old, 4)?;
    }
    step(End::Old, 5)?;
    for_all(passing, passing::settle)?;
    let park = Instant::now() + PARK_WAIT;
    for has_iommu in [false, true] {
        // All are asked before the first is waited for.
        let of_these =
            passing.iter_mut().filter(|device| !device.has_left() && device.has_iommu() == has_iommu);
        let asked: Vec<_> = of_these.map(|device| (device.ask(), device)).collect();
        for (request, device) in asked {
            device.park(request, end, park)?;
        }
    }
    step(End::Old, 6)?;
    for device in &mut *passing {
        device.give_changes(end, park)?;
    }
    for device in passing.iter_mut().filter(|device| device.gives_slowly()) {
        device.give_slowly(end, Instant::now() + drain)?;
    }
    step(End::Old, 7)
}

/// Returns the plan, with all devices in the order in which they were added. Takes those that are served.
fn plan(registry: &Registry, beside: &Beside, passing: &mut Vec<Passing>) -> Result<(Plan, Giving), String> {
    let mut giving = Giving::default();
    let mut devices = Vec::new();
    for status in registry.list() {
        let name = status.config.name().unwrap_or_default();
        let phase = match status.state {
            DeviceState::Unavailable => Phase::Unavailable { error: status.error.unwrap_or_default() },
            DeviceState::Ended => {
                if let Some(error) = registry.keeps_disk(name) {
                    return Err(error.to_string());
                }
                Phase::Ended { error: status.error }
            }
            DeviceState::Opening | DeviceState::Removing => {
                return Err(format!("the device {name} is being added or removed"));
            }
            DeviceState::Free | DeviceState::Connected | DeviceState::Drained | DeviceState::Stopped => {
                let device = registry.served(name).map_err(|error| error.to_string())?;
                passing.push(Passing::new(devices.len() as u32, device)?);
                Phase::Served
            }
        };
        let is_inherited = status.is_inherited;
        devices.push(Planned { config: written(&status.config)?, is_inherited, phase });
    }
    let of_file = beside.of_file.iter().map(written).collect::<Result<_, _>>()?;
    let control = beside.control.iter().map(|listener| give_listener(listener, &mut giving));
    let control = control.collect::<Result<_, _>>()?;
    let (version, log_filter) = (env!("CARGO_PKG_VERSION").to_owned(), beside.log_filter.clone());
    let passed = registry.passed_sockets().map_err(|error| error.to_string())?.into_iter();
    let passed =
        passed.map(|(name, socket)| Ok(Passed { name, listener: give_listener(&socket, &mut giving)? }));
    let passed = passed.collect::<Result<_, String>>()?;
    let watchdog_us = beside.watchdog.map(|interval| interval.as_micros() as u64);
    let counters = [(UPGRADES.to_owned(), registry.upgrades())].into();
    Ok((Plan { version, devices, of_file, control, passed, log_filter, watchdog_us, counters }, giving))
}

/// Does this for all devices, several at a time.
fn for_all(
    passing: &[Passing],
    each: impl Fn(&ServedDevice) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let devices: Vec<_> = passing.iter().map(Passing::device).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    thread::scope(|scope| {
        let work = || {
            while let Some(device) = devices.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(why) = each(device) {
                    lock(&failed).get_or_insert(why);
                }
            }
        };
        // Without further threads, this one does all.
        for _ in 1..SETTLERS.min(devices.len()) {
            let _ = thread::Builder::new().name("settle".into()).spawn_scoped(scope, work);
        }
        work();
    });
    failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
}

/// Parks all rings, and gives each device as soon as its own are parked.
fn pause(
    end: &mut OldEnd,
    passing: &mut [Passing],
    drain: Duration,
    writes_back: bool,
) -> Result<(), String> {
    let parked_ns = monotonic_ns();
    let deadline = Instant::now() + drain;
    passing.iter_mut().for_each(Passing::hold);
    step(End::Old, 8)?;
    let mut left: Vec<&mut Passing> = passing.iter_mut().collect();
    while !left.is_empty() {
        let mut still = Vec::with_capacity(left.len());
        let count = left.len();
        for device in left {
            match device.is_parked(Instant::now())? {
                true => {
                    if writes_back {
                        passing::settle(device.device())?;
                    }
                    device.give_final(end, parked_ns, deadline + PAUSE_WAIT)?;
                    step(End::Old, 9)?;
                }
                false => still.push(device),
            }
        }
        left = still;
        let has_none_parked = left.len() == count;
        if let Some(slow) = left.first_mut().filter(|_| has_none_parked) {
            if Instant::now() >= deadline {
                return Err(slow.too_slow());
            }
            slow.is_parked((Instant::now() + LOOK).min(deadline))?;
        }
    }
    Ok(())
}

/// Returns the time on the clock that all processes share.
pub(super) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
