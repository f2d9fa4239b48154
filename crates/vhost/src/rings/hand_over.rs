//! Rings as records for the next process, and rings of such records.

use super::{Ring, Rings, options};
use crate::error::{Ended, HandOverError, RequestError};
use crate::setup::{self, Setup, Shape};
use kickless_device::{Call, Disabled, Kick, Position, QueueTask, Vring};
use kickless_handover::v1::{self, RingFinal};
use kickless_handover::{Fd, Given, Giving};
use kickless_memory::{Gpa, UserAddr, View};
use kickless_spec::features::Features;
use kickless_sync::mpsc::Receiver;
use kickless_virtqueue::device::{Addresses, UnpublishedUsed};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tracing::debug;

/// The task of a ring that another process still serves, or has parked.
pub(crate) struct PreparedTask {
    index: u16,
    task: Box<dyn QueueTask>,
}

impl Rings {
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Asks all running rings to park.
    pub(crate) fn park(&self) -> Vec<(u16, Receiver<Position>)> {
        let running =
            (0..).zip(&self.rings).filter_map(|(index, ring)| Some((index, ring.running.as_ref()?)));
        running.map(|(index, task)| (index, task.park())).collect()
    }

    /// Lets all rings go on, whether they are parked or not yet.
    pub(crate) fn unpark(&self) {
        self.running().for_each(|task| task.unpark());
    }

    /// Returns the rings of which anything is set.
    pub(crate) fn give(&self, to: &mut Giving) -> Result<Vec<v1::Ring>, HandOverError> {
        let rings = (0..).zip(&self.rings).filter(|(_, ring)| !ring.is_blank());
        rings.map(|(index, ring)| Ok(ring.give(index, to)?)).collect()
    }

    /// Returns where the same rings continue.
    pub(crate) fn give_final(
        &self,
        positions: &BTreeMap<u16, Position>,
    ) -> Result<Vec<RingFinal>, HandOverError> {
        let rings = (0..).zip(&self.rings).filter(|(_, ring)| !ring.is_blank());
        let at_last = |(index, ring): (u16, &Ring)| match (&ring.running, positions.get(&index)) {
            (None, _) => Ok(ring.stopped_final(index)),
            (Some(_), None) => Err(HandOverError::RingRuns(index)),
            (Some(_), Some(position))
                if position.in_flight > 0
                    && ring.setup.size.and_then(|size| self.inflight_of(size)).is_none() =>
            {
                Err(HandOverError::Kept { index, requests: position.in_flight })
            }
            (Some(_), Some(position)) => Ok(ring.parked_final(index, position)),
        };
        rings.map(at_last).collect()
    }

    /// Takes the set-up of rings. None of them runs.
    pub(crate) fn restore(&mut self, from: &[v1::Ring], given: &mut Given) -> Result<(), RequestError> {
        let size_max = self.device.queue_size_max();
        for ring in from {
            let index = self.index(ring.index.into())?;
            let loaded = ring.loaded.map(|loaded| loaded.size);
            if let Some(size) = ring.size.into_iter().chain(loaded).find(|size| *size > size_max) {
                return Err(RequestError::SizeTooLarge { size: size.into(), max: size_max });
            }
            self.rings[usize::from(index)] = Ring::restore(ring, given)?;
        }
        Ok(())
    }

    /// Makes the task of a ring that runs in the other process. Its areas and its in-flight buffer are not
    /// touched, and it has no position yet.
    pub(crate) fn prepare(
        &mut self,
        from: &v1::Ring,
        view: &Arc<View>,
        offered: Features,
    ) -> Result<PreparedTask, RequestError> {
        let index = from.index;
        let features = Features::from_bits_retain(from.runs_with.unwrap_or_default());
        let unknown = features - offered;
        if !unknown.is_empty() {
            return Err(RequestError::Features(unknown));
        }
        let disabled = self.device.disabled(index);
        let setup = &self.rings[usize::from(index)].setup;
        let (size, addresses) = setup.runs(disabled).ok_or(RequestError::NotSetUp(index))?;
        if self.rings[usize::from(index)].kick.is_none() {
            return Err(RequestError::NoKick);
        }
        // The front-end can take a ring out of the memory while it runs. So the areas are checked when they
        // are mapped, as after such a change.
        let areas = setup::areas(addresses, features);
        let mut parts = self.vring_parts(index, options(size, features)?, areas, view)?;
        parts.is_unconfirmed = false;
        let mut task = self
            .device
            .start_queue(Vring::unmapped(parts), features)
            .map_err(|source| RequestError::Start { index, source })?;
        let ring = self.get(index);
        ring.features = features;
        ring.serves = ring.setup.enabled;
        let serves = ring.serves;
        if disabled == Disabled::Drained {
            task.set_enabled(serves);
        }
        Ok(PreparedTask { index, task })
    }

    /// Takes the places where the rings continue.
    pub(crate) fn receive_final(
        &mut self,
        from: &[RingFinal],
        tasks: &mut [PreparedTask],
    ) -> Result<(), RequestError> {
        for at_last in from {
            let index = self.index(at_last.index.into())?;
            let ring = self.get(index);
            ring.receive_final(at_last);
            if let Some(PreparedTask { task, .. }) = tasks.iter_mut().find(|task| task.index == index) {
                let next_avail = at_last.next_avail.ok_or(RequestError::NotSetUp(index))?;
                let unpublished = std::mem::take(&mut ring.setup.unpublished);
                let is_broken = at_last.is_broken;
                task.vring().begin_at(&Position { next_avail, in_flight: 0, unpublished, is_broken });
            }
        }
        Ok(())
    }

    /// Starts the tasks. No other process uses the rings any more.
    pub(crate) fn begin_restored(&mut self, tasks: Vec<PreparedTask>, is_open: bool) -> Result<(), Ended> {
        self.open = is_open;
        for PreparedTask { index, mut task } in tasks {
            task.vring().begin();
            self.spawn(index, task)?;
            debug!(ring = index, "ring goes on");
        }
        Ok(())
    }
}

impl Ring {
    /// Returns whether nothing of the ring is set.
    fn is_blank(&self) -> bool {
        let has_fd = self.kick.is_some() || self.call.is_some() || self.err.is_some();
        !has_fd && !self.had_work && !self.has_left && self.setup == Setup::default()
    }

    fn give(&self, index: u16, to: &mut Giving) -> io::Result<v1::Ring> {
        let Setup { size, addresses, loaded, started: is_started, enabled: is_enabled, .. } = self.setup;
        let addresses = addresses.map(|Addresses { desc, avail, used, log }| v1::Addresses {
            desc: desc.0,
            avail: avail.0,
            used: used.0,
            log: log.map(|log| log.0),
        });
        let loaded = loaded.map(|Shape { size, packed }| v1::Shape { size, is_packed: packed });
        let mut fd = |fd: Option<&dyn AsFd>| fd.map(|fd| to.fd(fd)).transpose();
        Ok(v1::Ring {
            index,
            size,
            addresses,
            loaded,
            is_started,
            is_enabled,
            runs_with: self.running.as_ref().map(|_| self.features.bits()),
            kick: fd(self.kick.as_ref().map(|kick| kick as _))?,
            call: fd(self.call.as_ref().map(|call| call as _))?,
            err: fd(self.err.as_ref().map(|err| err as _))?,
        })
    }

    fn stopped_final(&self, index: u16) -> RingFinal {
        let Setup { next_avail, stopped_at, unpublished, .. } = &self.setup;
        let (had_work, has_left) = (self.had_work, self.has_left);
        let unpublished = completions(unpublished);
        RingFinal {
            index,
            next_avail: *next_avail,
            stopped_at: *stopped_at,
            unpublished,
            is_broken: false,
            had_work,
            has_left,
        }
    }

    fn parked_final(&self, index: u16, position: &Position) -> RingFinal {
        let next_avail = Some(position.next_avail);
        RingFinal {
            next_avail,
            stopped_at: next_avail,
            unpublished: completions(&position.unpublished),
            is_broken: position.is_broken,
            ..self.stopped_final(index)
        }
    }

    fn restore(from: &v1::Ring, given: &mut Given) -> Result<Self, RequestError> {
        let addresses = from.addresses.map(|v1::Addresses { desc, avail, used, log }| Addresses {
            desc: UserAddr(desc),
            avail: UserAddr(avail),
            used: UserAddr(used),
            log: log.map(Gpa),
        });
        let loaded = from.loaded.map(|v1::Shape { size, is_packed }| Shape { size, packed: is_packed });
        let setup = Setup {
            size: from.size,
            addresses,
            loaded,
            started: from.is_started,
            enabled: from.is_enabled,
            ..Setup::default()
        };
        Ok(Self {
            setup,
            kick: take(from.kick, given, Kick::new)?,
            call: take(from.call, given, Call::new)?,
            err: take(from.err, given, Call::new)?,
            ..Self::default()
        })
    }

    fn receive_final(&mut self, from: &RingFinal) {
        (self.setup.next_avail, self.setup.stopped_at) = (from.next_avail, from.stopped_at);
        let used = |completion: &v1::Completion| UnpublishedUsed {
            id: completion.id,
            len: completion.len,
            descriptors: completion.descriptors,
        };
        self.setup.unpublished = from.unpublished.iter().map(used).collect();
        (self.had_work, self.has_left) = (from.had_work, from.has_left);
    }
}

fn completions(unpublished: &[UnpublishedUsed]) -> Vec<v1::Completion> {
    let completion =
        |used: &UnpublishedUsed| v1::Completion { id: used.id, len: used.len, descriptors: used.descriptors };
    unpublished.iter().map(completion).collect()
}

/// Takes a descriptor and checks it as one that the front-end sends.
fn take<T>(
    fd: Option<Fd>,
    given: &mut Given,
    accept: impl FnOnce(OwnedFd) -> io::Result<T>,
) -> Result<Option<T>, RequestError> {
    let Some(fd) = fd else { return Ok(None) };
    accept(given.fd(fd)?).map(Some).map_err(RequestError::Descriptor)
}
