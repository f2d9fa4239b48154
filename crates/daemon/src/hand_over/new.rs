//! The end of the process that takes over.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kickless_device::Handed;
use kickless_handover::v1::{Device, Final, Passed, Phase, Plan, Planned};
use kickless_handover::{FromOld, NewEnd, Record, Shelved, Taken};
use kickless_sync::lock;
use kickless_vhost::Restored;
use tracing::{error, warn};

use super::config::{read, take_listener};
use super::fault::{End, step};
use super::old::monotonic_ns;
use super::{Beside, PAUSE_WAIT, PREPARE_WAIT, UPGRADES};
use crate::config::DeviceConfig;
use crate::registry::{OpenDevice, Prepared, Registry};
use crate::sentence::sentence;
use crate::socket::{Endpoint, PassedListener};

/// The devices that this process has taken over, and serves.
#[derive(Debug)]
pub struct TakenOver {
    /// The things that passed beside the devices.
    pub beside: Beside,
    /// The version of the program of the old process.
    pub version: String,
    /// The number of devices that are served.
    pub devices: usize,
    /// The time from the plan to the pause.
    pub prepared: Duration,
    /// The time from the beginning of the pause in the old process until all rings run in this one.
    pub stall: Duration,
    /// Lets the old process end, and tells when it has. `None` if the devices were in a store.
    pub taken: Option<Taken>,
}

/// A device of the plan.
struct Coming {
    config: DeviceConfig,
    /// The reservation of its name, until it is made, and again while it is made anew.
    opened: Option<OpenDevice>,
    made: Option<Made>,
}

/// A device that this process can serve as soon as the other one has stopped.
struct Made {
    /// The session and the rings. Dropped before the device.
    restored: Restored,
    prepared: Prepared,
    listener: Option<PassedListener>,
}

/// Takes all devices over from the process at the other end of `channel`, and serves them. The registry has
/// none, and has its pool. Calls `prepare` when it knows what passes beside the devices, and gives up if that
/// fails. `check` says at the last moment whether this process still may. `has_taken` is locked while this
/// process says that it serves, so a thread that has the lock knows whether it does, and can end the process
/// if not.
///
/// # Errors
/// The other process goes on, and knows the reason. This one must end now, without running destructors: they
/// would remove the names of sockets that the other one serves. The error is one sentence.
pub fn take_over(
    registry: &Arc<Registry>,
    channel: OwnedFd,
    prepare: &mut dyn FnMut(&Beside) -> Result<(), String>,
    check: impl FnOnce() -> Result<(), String>,
    has_taken: &Mutex<bool>,
) -> Result<TakenOver, String> {
    let (mut taking, mut end) = (Taking::new(registry), NewEnd::new(channel));
    let taken = match taking.receive_all(&mut end, prepare).and_then(|()| check()) {
        Ok(()) => {
            let mut has_taken = lock(has_taken);
            let taken = end.take(Instant::now() + PAUSE_WAIT).map_err(|error| error.to_string());
            *has_taken = taken.is_ok();
            taken
        }
        Err(why) => {
            end.refuse(&why);
            Err(why)
        }
    };
    match taken {
        Ok(taken) => Ok(taking.begin(Some(taken))),
        Err(why) => {
            // These have destructors that do harm.
            std::mem::forget(taking.devices);
            Err(why)
        }
    }
}

/// Serves the devices that a process has put into a store at its end ([`shelve()`](super::shelve())). The
/// registry has none, and has its pool. Devices that cannot go on, or are not there, are added as at a start.
///
/// # Errors
/// There is no plan, or it cannot be read. The registry has no devices.
pub fn take_shelved(registry: &Arc<Registry>, shelved: Shelved) -> Result<TakenOver, String> {
    let mut taking = Taking { lacks: Some(Vec::new()), ..Taking::new(registry) };
    taking.plan(shelved.plan.ok_or("there is no plan")?)?;
    for (number, (device, last)) in shelved.devices {
        if let Err(why) = taking.device(number, device).and_then(|()| taking.last(number, last)) {
            warn!("{why}");
        }
    }
    let mut lacks = taking.lacks.take().unwrap_or_default();
    let finals = taking.finals.clone();
    taking.devices.retain(|number, coming| {
        let has_come = finals.contains(number);
        if !has_come {
            lacks.push(coming.config.clone());
            coming.made.take().into_iter().for_each(|made| drop(made.unmake()));
        }
        has_come
    });
    let taken = taking.begin(None);
    for config in lacks {
        let span = config.span();
        if let Err(error) = registry.add_when_available(config) {
            span.in_scope(|| warn!(error = sentence(&error), "the device is not served any more"));
        }
    }
    Ok(taken)
}

struct Taking<'r> {
    registry: &'r Arc<Registry>,
    begun: Instant,
    plan: Plan,
    beside: Beside,
    /// The devices that are served, by their position in the plan.
    devices: BTreeMap<u32, Coming>,
    unavailable: Vec<(DeviceConfig, String)>,
    /// The devices in the order of their final records, which is that of their pauses.
    finals: Vec<u32>,
    /// The beginning of the pause, on the clock of all processes.
    parked_ns: u64,
    /// The time from the plan to the pause.
    prepared: Duration,
    /// Devices of a store that cannot be reserved. Otherwise, each of the plan has to be there.
    lacks: Option<Vec<DeviceConfig>>,
}

impl<'r> Taking<'r> {
    fn new(registry: &'r Arc<Registry>) -> Self {
        Self {
            registry,
            begun: Instant::now(),
            plan: Plan::default(),
            beside: Beside::default(),
            devices: BTreeMap::new(),
            unavailable: Vec::new(),
            finals: Vec::new(),
            parked_ns: 0,
            prepared: Duration::ZERO,
            lacks: None,
        }
    }

    /// Carries out the messages of the old process until all have come.
    fn receive_all(
        &mut self,
        end: &mut NewEnd,
        prepare: &mut dyn FnMut(&Beside) -> Result<(), String>,
    ) -> Result<(), String> {
        step(End::New, 1)?;
        loop {
            let message = end.receive(Instant::now() + PREPARE_WAIT).map_err(|error| error.to_string())?;
            match message {
                FromOld::Plan(record) => {
                    step(End::New, 2)?;
                    self.plan(record)?;
                    prepare(&self.beside)?;
                    step(End::New, 3)?;
                }
                FromOld::Device { number, record } => {
                    step(End::New, 4)?;
                    self.device(number, record)?;
                    step(End::New, 5)?;
                }
                FromOld::Gone { number } => {
                    let gone = self.devices.remove(&number).ok_or("a device is not in the plan")?;
                    drop(gone.made.map(Made::unmake));
                }
                FromOld::Final { number, record } => {
                    step(End::New, 8)?;
                    self.last(number, record)?;
                    step(End::New, 9)?;
                }
                FromOld::Last => return step(End::New, 10),
            }
            end.confirm(Instant::now() + PAUSE_WAIT).map_err(|error| error.to_string())?;
            if self.devices.values().all(|device| device.made.is_some()) && self.finals.is_empty() {
                step(End::New, 6)?;
            }
        }
    }

    /// Reserves the names of all devices, and takes the rights that they need.
    fn plan(&mut self, record: Record) -> Result<(), String> {
        let (plan, mut given) = record.read::<Plan>().map_err(|error| error.to_string())?;
        let is_unavailable = |of: &&Planned| matches!(of.phase, Phase::Unavailable { .. });
        let (count, max) = (plan.devices.iter().filter(is_unavailable).count(), self.registry.devices_max());
        if count > max {
            // Each has a thread.
            return Err(format!("it has {count} devices that are unavailable, and can have {max}"));
        }
        for Passed { name, listener } in &plan.passed {
            // A socket that the service manager has passed to this process itself is newer, and stays.
            self.registry.pass_socket(name.clone(), take_listener(listener.clone(), &mut given)?);
        }
        let known = self.registry.kinds().keys();
        for (number, planned) in (0..).zip(&plan.devices) {
            let Planned { config, is_inherited, phase } = planned;
            let config = read(config, self.registry.kinds(), &known)?;
            let name = config.name().unwrap_or_default();
            match phase {
                Phase::Served => {
                    let opened = self.registry.reserve(config.clone(), *is_inherited).map_err(|error| {
                        let option = error.option().map(|option| format!("{option}: ")).unwrap_or_default();
                        format!("the device {name} cannot be taken over: {option}{}", sentence(&error))
                    });
                    match (opened, &mut self.lacks) {
                        (Ok(opened), _) => {
                            self.devices.insert(number, Coming { config, opened: Some(opened), made: None });
                        }
                        (Err(why), Some(lacks)) => {
                            warn!("{why}");
                            lacks.push(config);
                        }
                        (Err(why), None) => return Err(why),
                    }
                }
                Phase::Unavailable { error } => self.unavailable.push((config, error.clone())),
                // It is served again if the configuration file has it.
                Phase::Ended { .. } => {}
            }
        }
        let kinds = self.registry.kinds();
        self.beside.of_file =
            plan.of_file.iter().map(|of| read(of, kinds, &known)).collect::<Result<_, _>>()?;
        let control = plan.control.iter().map(|listener| take_listener(listener.clone(), &mut given));
        self.beside.control = control.collect::<Result<_, _>>()?;
        self.beside.log_filter.clone_from(&plan.log_filter);
        self.beside.watchdog = plan.watchdog_us.map(Duration::from_micros);
        self.plan = plan;
        Ok(())
    }

    /// Makes a device, or makes it again.
    fn device(&mut self, number: u32, record: Record) -> Result<(), String> {
        let coming = self.devices.get_mut(&number).ok_or("a device is not in the plan")?;
        if let Some(made) = coming.made.take() {
            step(End::New, 7)?;
            coming.opened = Some(made.unmake());
        }
        let (name, span) = (coming.config.name().unwrap_or_default().to_owned(), coming.config.span());
        let opened = coming.opened.take().ok_or("a device is not in the plan")?;
        let made = span.in_scope(|| Made::new(self.registry, opened, record));
        coming.made = Some(made.map_err(|why| format!("the device {name} cannot be taken over: {why}"))?);
        Ok(())
    }

    /// Takes the last changes of a device.
    fn last(&mut self, number: u32, record: Record) -> Result<(), String> {
        if self.finals.is_empty() {
            self.prepared = self.begun.elapsed();
        }
        let coming = self.devices.get_mut(&number).ok_or("a device is not in the plan")?;
        let made = coming.made.as_mut().ok_or("a device is not made")?;
        let received = coming.config.span().in_scope(|| made.receive_final(record));
        let parked_ns = received.map_err(|why| {
            format!("the device {} cannot be taken over: {why}", coming.config.name().unwrap_or_default())
        })?;
        self.parked_ns = parked_ns;
        self.finals.push(number);
        Ok(())
    }

    /// Serves. `taken` is the right to do so, if the old process runs.
    fn begin(mut self, taken: Option<Taken>) -> TakenOver {
        // From here on, nothing of the old process runs, and nothing here may fail.
        let _ = step(End::New, 11);
        let mut all: Vec<Made> =
            self.finals.iter().filter_map(|number| self.devices.remove(number)?.made).collect();
        for made in &mut all {
            made.begin();
        }
        let ns = if self.finals.is_empty() { 0 } else { monotonic_ns().saturating_sub(self.parked_ns) };
        let devices = all.len();
        let (waiting, prepared): (Vec<_>, Vec<_>) = all.into_iter().map(Made::into_parts).unzip();
        self.registry.begin_handed(prepared);
        let before = self.plan.counters.get(UPGRADES).copied().unwrap_or_default();
        self.registry.set_upgrades(before.saturating_add(1));
        waiting.into_iter().for_each(Restored::go_on);
        for (config, why) in self.unavailable {
            self.registry.list_unavailable(config, why);
        }
        let _ = step(End::New, 12);
        TakenOver {
            beside: self.beside,
            version: self.plan.version,
            devices,
            prepared: self.prepared,
            stall: Duration::from_nanos(ns),
            taken,
        }
    }
}

impl Made {
    fn new(registry: &Registry, mut opened: OpenDevice, record: Record) -> Result<Self, String> {
        let (mut device, mut given) = record.read::<Device>().map_err(|error| error.to_string())?;
        let listener = device.listener.take().map(|listener| take_listener(listener, &mut given));
        let passed = registry.passed_socket(opened.config()).map_err(|error| error.to_string())?;
        let listener = passed.or(listener.transpose()?);
        let own = std::mem::take(&mut device.own);
        opened.make_handed(Handed { state: own, given: &mut given }).map_err(|error| sentence(&error))?;
        let served = registry.served_device(&mut opened).map_err(|error| sentence(&error))?;
        let served = match &listener {
            Some(listener) => served.with_listener(listener.try_clone().map_err(|error| error.to_string())?),
            None => served,
        };
        let restored = served.server().restore(&device, &mut given).map_err(|error| error.to_string())?;
        if listener.is_none() && device.session.is_none() {
            return Err("it has neither a socket nor a front-end".into());
        }
        let prepared = registry.prepare_handed(opened, served).map_err(|error| sentence(&error))?;
        Ok(Self { restored, prepared, listener })
    }

    /// Gives up what was made, for what is made instead. Nothing of it has an effect on the old process.
    fn unmake(self) -> OpenDevice {
        drop(self.restored);
        self.prepared.cancel()
    }

    /// Takes the last changes. Returns the beginning of the pause.
    fn receive_final(&mut self, record: Record) -> Result<u64, String> {
        let (mut state, given) = record.read::<Final>().map_err(|error| error.to_string())?;
        let served = self.prepared.served();
        let own = std::mem::take(&mut state.own);
        served.device().receive_final(own, &given).map_err(|error| error.to_string())?;
        self.restored.receive_final(&state).map_err(|error| error.to_string())?;
        served.limiter().set_until_full(&state.tokens);
        served.note_drained(state.is_drained);
        Ok(state.parked_ns)
    }

    /// Lets the device and its rings begin.
    fn begin(&mut self) {
        let served = self.prepared.served();
        served.device().begin();
        if let Err(error) = self.restored.begin() {
            // A worker has ended, so the program ends too.
            served.config().span().in_scope(|| error!(%error, "the rings cannot begin"));
        }
    }

    fn into_parts(self) -> (Restored, (Prepared, Endpoint)) {
        let endpoint = self.listener.map_or(Endpoint::Restored, PassedListener::into_endpoint);
        (self.restored, (self.prepared, endpoint))
    }
}
