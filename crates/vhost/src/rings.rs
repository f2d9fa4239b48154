//! The rings of a session: their set-up, and the running tasks.

mod hand_over;

pub(crate) use hand_over::PreparedTask;

use crate::error::{Ended, RequestError};
use crate::inflight::Inflight;
use crate::setup::{self, Setup, Shape};
use crate::state::{RingState, SavedState};
use crate::statistics::Statistics;
use crate::wait;
use kickless_device::{
    Areas, Call, Device, Disabled, Driver, Executor, InvalidState, Iommu, Kick, Leave, QueueTask, Stopped,
    TaskHandle, Update, Vring, VringParts,
};
use kickless_memory::{Iova, View};
use kickless_spec::features::Features;
use kickless_spec::ring::{avail_len, desc_len, used_len};
use kickless_virtqueue::device::{Addresses, Metadata, Options};
use std::io;
use std::iter::zip;
use std::ops::Range;
use std::sync::Arc;
use tracing::{debug, error, warn};

/// A ring. The session keeps duplicates of the running task's descriptors, because the ring can stop and
/// start again without new ones.
#[derive(Default)]
pub(crate) struct Ring {
    pub(crate) setup: Setup,
    pub(crate) kick: Option<Kick>,
    pub(crate) call: Option<Call>,
    pub(crate) err: Option<Call>,
    running: Option<Box<dyn TaskHandle>>,
    /// The features with which the task runs. Only valid while the ring runs.
    features: Features,
    /// The running task serves requests. Otherwise it drains the ring. Only valid while the ring runs.
    serves: bool,
    /// Requests were in the ring when it stopped.
    had_work: bool,
    /// The ring stopped and left requests in the in-flight buffer.
    has_left: bool,
}

/// All rings of a session, and the resources that they need to run.
pub(crate) struct Rings {
    rings: Vec<Ring>,
    device: Arc<dyn Device>,
    executor: Arc<dyn Executor>,
    statistics: Arc<Statistics>,
    /// The descriptor that is signalled when pages were marked in the log.
    pub(crate) logged: Option<Call>,
    /// The vIOMMU of the rings, once one was negotiated.
    pub(crate) iommu: Option<Iommu>,
    /// The buffer in which rings record their requests in flight.
    pub(crate) inflight: Option<Inflight>,
    /// The device is open: from the first ring that runs until no ring is started.
    open: bool,
    /// The device was closed, and not opened since.
    pub(crate) has_closed: bool,
    /// The front-end seems to have a new driver. The first ring to start shows whether this is so.
    pub(crate) expects_new_driver: bool,
}

impl Rings {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        executor: Arc<dyn Executor>,
        statistics: Arc<Statistics>,
    ) -> Self {
        let rings = (0..device.queues_max()).map(|_| Ring::default()).collect();
        Self {
            rings,
            device,
            executor,
            statistics,
            logged: None,
            iommu: None,
            inflight: None,
            open: false,
            has_closed: false,
            expects_new_driver: false,
        }
    }

    /// Ends requests in flight that wait for a remote server within a bounded time. Rings go on.
    pub(crate) fn limit_remote_waits(&self) {
        self.device.limit_remote_waits();
    }

    /// Checks the ring index of a message.
    pub(crate) fn index(&self, index: u32) -> Result<u16, RequestError> {
        match u16::try_from(index) {
            Ok(checked) if usize::from(checked) < self.rings.len() => Ok(checked),
            _ => Err(RequestError::Index {
                index,
                count: self.rings.len(),
                option: self.device.words().rings_option,
            }),
        }
    }

    /// Returns the ring with this checked index.
    pub(crate) fn get(&mut self, index: u16) -> &mut Ring {
        &mut self.rings[usize::from(index)]
    }

    /// Changes the set-up of all rings.
    pub(crate) fn each_setup(&mut self, mut set: impl FnMut(&mut Setup)) {
        self.rings.iter_mut().for_each(|ring| set(&mut ring.setup));
    }

    pub(crate) fn is_running(&self, index: u16) -> bool {
        self.rings[usize::from(index)].running.is_some()
    }

    /// Returns the handles of running tasks.
    fn running(&self) -> impl Iterator<Item = &dyn TaskHandle> {
        self.rings.iter().filter_map(|ring| ring.running.as_deref())
    }

    /// Returns whether any ring runs.
    pub(crate) fn any_running(&self) -> bool {
        self.running().next().is_some()
    }

    /// Returns the ranges of addresses that are in the areas of rings.
    pub(crate) fn areas(&self) -> Vec<Range<u64>> {
        let set_up = self.rings.iter().filter_map(|ring| ring.setup.size.zip(ring.setup.addresses));
        let areas = set_up.flat_map(|(size, addresses)| {
            // The areas of a packed ring are no longer.
            let lens = [desc_len(size), avail_len(size, true), used_len(size, true)];
            zip([addresses.desc, addresses.avail, addresses.used], lens)
        });
        areas.map(|(start, len)| start.0..start.0.saturating_add(len as u64)).collect()
    }

    /// Carries out SET_LOG_FD: each ring signals this descriptor when it marks pages that were not marked.
    pub(crate) fn set_logged(&mut self, logged: Call) -> Result<(), RequestError> {
        let answers: Vec<_> = self
            .running()
            .map(|running| Ok(running.update(Update::Logged(Some(logged.try_clone()?)))))
            .collect::<io::Result<_>>()
            .map_err(RequestError::Descriptor)?;
        self.logged = Some(logged);
        Ok(answers.iter().try_for_each(|from| wait::answer(from, "a change of all rings", None))?)
    }

    /// Returns whether rings were set up and none has moved past its initial index or has had a request in
    /// it. For stopped rings.
    pub(crate) fn all_untouched(&self, packed: bool) -> bool {
        let mut set_up = self.rings.iter().filter(|ring| ring.setup.addresses.is_some()).peekable();
        set_up.peek().is_some() && !set_up.any(|ring| ring.had_work || ring.setup.is_resumed(packed))
    }

    /// Starts, stops, enables or drains a ring, as its set-up says. One that stops may leave requests.
    pub(crate) fn start_or_stop(
        &mut self,
        index: u16,
        view: &Arc<View>,
        features: Features,
        leave: Leave,
    ) -> Result<(), RequestError> {
        let wanted = self.rings[usize::from(index)].setup.runs(self.device.disabled(index));
        match (wanted, self.is_running(index)) {
            (Some((size, addresses)), false) => self.start(index, size, addresses, view, features),
            (Some(_), true) => Ok(self.enable(index)?),
            (None, true) => Ok(self.stop(index, leave)?),
            (None, false) => Ok(()),
        }
    }

    /// Makes a running ring serve requests or drain, as its set-up says. Returns when that is in force.
    fn enable(&mut self, index: u16) -> Result<(), Ended> {
        let ring = self.get(index);
        let enabled = ring.setup.enabled;
        if std::mem::replace(&mut ring.serves, enabled) == enabled {
            return Ok(());
        }
        self.update(index, Update::Enable(enabled))
    }

    fn start(
        &mut self,
        index: u16,
        size: u16,
        addresses: Addresses,
        view: &Arc<View>,
        features: Features,
    ) -> Result<(), RequestError> {
        let options = options(size, features)?;
        // Before the device is opened, so that a front-end's mistake has no other effect.
        let areas = setup::areas(addresses, features);
        check_areas(index, view, &areas, &options)?;
        let shape = Shape { size, packed: options.is_packed() };
        if let Some(loaded) = self.get(index).setup.loaded.filter(|loaded| *loaded != shape) {
            return Err(RequestError::Shape { index, shape, loaded });
        }
        let parts = self.vring_parts(index, options, areas, view)?;
        let next_avail = parts.next_avail;
        if !self.open {
            let packed = options.is_packed();
            if std::mem::take(&mut self.expects_new_driver)
                && self.rings.iter().any(|ring| ring.setup.is_resumed(packed))
            {
                self.device.reset(Driver::Unknown);
            }
            self.device.open().map_err(|source| RequestError::Start { index, source })?;
            self.open = true;
        }
        let vring = Vring::new(parts).map_err(|source| RequestError::Areas { index, source })?;
        let mut task = self
            .device
            .start_queue(vring, features)
            .map_err(|source| RequestError::Start { index, source })?;
        let ring = &mut self.rings[usize::from(index)];
        ring.features = features;
        ring.serves = ring.setup.enabled;
        if self.device.disabled(index) == Disabled::Drained {
            task.set_enabled(ring.serves);
        }
        self.spawn(index, task)?;
        debug!(ring = index, size, next_avail, "ring runs");
        Ok(())
    }

    /// Runs the task of a ring. Drops what an earlier run has left to it.
    fn spawn(&mut self, index: u16, task: Box<dyn QueueTask>) -> Result<(), Ended> {
        let handle = self.executor.spawn(task).map_err(|error| {
            error!(ring = index, %error, "no worker accepts a ring");
            Ended::Worker
        })?;
        let ring = self.get(index);
        ring.running = Some(handle);
        ring.setup.unpublished = Vec::new();
        ring.setup.loaded = None;
        ring.has_left = false;
        Ok(())
    }

    /// Returns the in-flight buffer, if rings of this size have room in it.
    ///
    /// With QEMU's virtio-mmio, a guest chooses sizes up to 1024, and QEMU makes the buffer for the property
    /// `queue-size`. A larger ring goes on without a buffer.
    fn inflight_of(&self, size: u16) -> Option<&Inflight> {
        self.inflight.as_ref().filter(|inflight| size <= inflight.queue_size())
    }

    /// Returns the parts of a ring that is set up.
    fn vring_parts(
        &self,
        index: u16,
        options: Options,
        areas: Areas,
        view: &Arc<View>,
    ) -> Result<VringParts, RequestError> {
        let size = options.size();
        let records = match (self.inflight_of(size), &self.inflight) {
            (Some(inflight), _) => Some(inflight.records(index, &options)?),
            (None, Some(small)) => {
                warn!(
                    ring = index,
                    size,
                    room = small.queue_size(),
                    "the hypervisor's in-flight buffer has no room for this ring, which goes on without it: a kill of \
                     this process loses its requests in flight; give the hypervisor's device queue-size={size}"
                );
                None
            }
            (None, None) => None,
        };
        let ring = &self.rings[usize::from(index)];
        let clone = |fd: &Option<Call>| {
            fd.as_ref().map(Call::try_clone).transpose().map_err(RequestError::Descriptor)
        };
        Ok(VringParts {
            index,
            options,
            areas,
            iommu: self.iommu.clone().filter(|_| matches!(areas, Areas::Iova(_))),
            next_avail: ring.setup.next_avail(options.is_packed()),
            is_unconfirmed: ring.setup.is_unconfirmed(options.is_packed()),
            unpublished: ring.setup.unpublished.clone(),
            inflight: records,
            view: view.clone(),
            kick: ring.kick.as_ref().map(Kick::try_clone).transpose().map_err(RequestError::Descriptor)?,
            call: clone(&ring.call)?,
            err: clone(&ring.err)?,
            logged: clone(&self.logged)?,
            counters: self.statistics.queue(index),
        })
    }

    /// Stops a ring, if it runs. Afterwards nothing of it is in flight, except what it has left in the
    /// in-flight buffer, and its set-up has the index at which it stopped.
    pub(crate) fn stop(&mut self, index: u16, leave: Leave) -> Result<(), Ended> {
        let ring = self.get(index);
        if let Some(running) = ring.running.take() {
            let stopped = wait::answer(&running.stop_leaving(leave), "a ring to drain", Some(index))?;
            debug!(
                ring = index,
                next_avail = stopped.next_avail,
                left = stopped.left,
                unpublished = stopped.unpublished.len(),
                "ring stopped"
            );
            self.record_stop(index, stopped);
        }
        Ok(())
    }

    /// Completes the requests that a ring has left when it stopped: runs it for a moment.
    ///
    /// QEMU disables a ring before it asks for its base, and says only then whether requests may stay.
    pub(crate) fn complete_left(
        &mut self,
        index: u16,
        view: &Arc<View>,
        features: Features,
    ) -> Result<(), RequestError> {
        let ring = self.get(index);
        let (has_left, setup) = (ring.has_left, &ring.setup);
        if let (true, Some((size, addresses))) = (has_left, setup.size.zip(setup.addresses)) {
            self.start(index, size, addresses, view, features)?;
            self.stop(index, Leave::Nothing)?;
        }
        Ok(())
    }

    /// Stops all running rings at once, so that the session only waits for the slowest. They leave failed
    /// requests that wait for an operator, because the front-end keeps the in-flight buffer and may come
    /// back.
    pub(crate) fn stop_all(&mut self) -> Result<(), Ended> {
        let stopping: Vec<_> = (0u16..)
            .zip(&mut self.rings)
            .filter_map(|(index, ring)| ring.running.take().map(|running| (index, running)))
            .map(|(index, running)| (index, running.stop_leaving(Leave::Failed), running))
            .collect();
        // Even if one worker has ended, wait for the others: their requests may still write to memory.
        let mut ended = Ok(());
        for (index, stopped, _running) in stopping {
            match wait::answer(&stopped, "a ring to drain", Some(index)) {
                Ok(stopped) => self.record_stop(index, stopped),
                Err(error) => ended = Err(error),
            }
        }
        ended
    }

    /// Returns the index at which each ring stopped last. `None` if it did not stop, or if the driver was not
    /// shown all completions.
    pub(crate) fn stops(&self) -> Vec<Option<u16>> {
        let stop = |ring: &Ring| ring.setup.stopped_at.filter(|_| ring.setup.unpublished.is_empty());
        self.rings.iter().map(stop).collect()
    }

    /// Sets the index at which each ring stopped in an earlier session.
    pub(crate) fn set_stops(&mut self, stops: &[Option<u16>]) {
        for (ring, stop) in self.rings.iter_mut().zip(stops) {
            ring.setup.stopped_at = *stop;
        }
    }

    /// Returns the state of the device and of all rings that were set up.
    ///
    /// # Errors
    /// A ring runs.
    pub(crate) fn save(&self, packed: bool) -> Result<SavedState, RequestError> {
        self.all_stopped()?;
        let rings = (0u16..).zip(&self.rings).filter_map(|(index, ring)| ring.setup.save(index));
        Ok(SavedState { packed, device: self.device.save(), rings: rings.collect() })
    }

    /// Loads the state of a device and its rings. If the size of a ring contradicts the state, its start
    /// fails.
    ///
    /// # Errors
    /// The state is not valid for this device, which is unchanged then.
    pub(crate) fn load(&mut self, state: SavedState) -> Result<(), InvalidState> {
        self.device.load(&state.device)?;
        // The choices of its driver are known.
        self.expects_new_driver = false;
        for ring in state.rings {
            let RingState { index, .. } = ring;
            self.get(index).setup.load(ring, state.packed);
        }
        Ok(())
    }

    /// Checks that no ring runs.
    ///
    /// # Errors
    /// A ring runs.
    pub(crate) fn all_stopped(&self) -> Result<(), RequestError> {
        match (0u16..).zip(&self.rings).find(|(_, ring)| ring.running.is_some()) {
            Some((index, _)) => Err(RequestError::Running(index)),
            None => Ok(()),
        }
    }

    /// Closes the device if no ring is started.
    ///
    /// # Errors
    /// The device keeps its resources. It is not tried again, until the next session opens it or the process
    /// ends.
    pub(crate) fn close_if_unused(&mut self) -> Result<(), Ended> {
        if self.open && !self.rings.iter().any(|ring| ring.setup.started || ring.running.is_some()) {
            self.open = false;
            self.has_closed = false;
            self.device.close().map_err(Ended::NotClosed)?;
            self.has_closed = true;
        }
        Ok(())
    }

    /// Resets the set-up of stopped rings. Keeps the descriptors of calls and errors, because a front-end
    /// sends them once for each ring, and possibly before it resets the device.
    ///
    /// # Errors
    /// The device cannot be closed.
    pub(crate) fn reset(&mut self, enabled: bool) -> Result<(), Ended> {
        for ring in &mut self.rings {
            ring.setup = Setup { enabled, ..Setup::default() };
            ring.kick = None;
            ring.has_left = false;
        }
        self.close_if_unused()
    }

    /// Applies an update to a ring, if it runs, and waits until it is in force.
    pub(crate) fn update(&mut self, index: u16, update: Update) -> Result<(), Ended> {
        match &self.get(index).running {
            Some(running) => wait::answer(&running.update(update), "a change of a ring", Some(index)),
            None => Ok(()),
        }
    }

    /// Records where a ring has stopped. It waits for no translation any more.
    fn record_stop(&mut self, index: u16, stopped: Stopped) {
        let ring = self.get(index);
        ring.had_work |= stopped.has_work;
        ring.has_left = stopped.left > 0;
        ring.setup.resume(stopped);
        if let Some(iommu) = &self.iommu {
            iommu.misses.forget(index);
        }
    }

    /// Sends an update to a ring, if it runs, without waiting.
    pub(crate) fn send_update(&self, index: u16, update: Update) {
        if let Some(running) = self.rings.get(usize::from(index)).and_then(|ring| ring.running.as_ref()) {
            drop(running.update(update));
        }
    }

    /// Sends an update to all running rings, without waiting.
    pub(crate) fn send_update_to_all(&self, update: impl Fn() -> Update) {
        for running in self.running() {
            drop(running.update(update()));
        }
    }

    /// Applies an update to all running rings, and waits until it is in force.
    pub(crate) fn update_all(&mut self, update: impl Fn() -> Update) -> Result<(), Ended> {
        let answers: Vec<_> = self.running().map(|running| running.update(update())).collect();
        answers.iter().try_for_each(|from| wait::answer(from, "a change of all rings", None))
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        if let Err(error) = self.stop_all() {
            error!(%error, "rings of this session could not be stopped");
        }
        if let Err(error) = self.reset(false) {
            error!(%error, "the device could not be closed");
        }
    }
}

/// Returns the options of a ring of this size.
pub(crate) fn options(size: u16, features: Features) -> Result<Options, RequestError> {
    let has = |feature| features.contains(feature);
    let (event_idx, indirect) = (has(Features::EVENT_IDX), has(Features::INDIRECT_DESC));
    let options = match has(Features::RING_PACKED) {
        true => Options::packed(size, event_idx, indirect),
        false => Options::new(size, event_idx, indirect),
    };
    Ok(options?.with_in_order(has(Features::IN_ORDER)))
}

/// Checks whether the areas are in guest memory. Behind a vIOMMU, this is not known yet. There it only checks
/// the alignment, because whole pages are translated.
pub(crate) fn check_areas(
    index: u16,
    view: &Arc<View>,
    areas: &Areas,
    options: &Options,
) -> Result<(), RequestError> {
    match areas {
        Areas::User(addresses) => {
            let mapped = Metadata::map(view, addresses, options);
            let starts = [addresses.desc, addresses.avail, addresses.used];
            mapped.map(drop).map_err(|source| {
                match starts.iter().find(|start| view.map().gpa_of(**start).is_none()) {
                    Some(addr) => RequestError::NotShared { index, addr: *addr },
                    None => RequestError::Areas { index, source },
                }
            })
        }
        Areas::Iova(addresses) => {
            let starts = [addresses.desc, addresses.avail, addresses.used];
            let is_aligned = |(start, align): (Iova, usize)| start.0.is_multiple_of(align as u64);
            let aligned = starts.into_iter().zip(options.area_aligns()).all(is_aligned);
            aligned.then_some(()).ok_or(RequestError::Misaligned { index })
        }
    }
}
