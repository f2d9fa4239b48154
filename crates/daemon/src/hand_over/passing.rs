//! A device of the old process on its way to the new one.

use std::fmt::Display;
use std::time::Instant;

use kickless_handover::{Giving, OldEnd, v1};
use kickless_vhost::{HandOverError, Parked};
use tracing::error;

use super::PREPARE_WAIT;
use super::config::give_listener;
use crate::served_device::{DeviceRef, ServedDevice};

/// Returns the sentence that a device cannot be handed over.
fn refusal(device: &ServedDevice, why: impl Display) -> String {
    format!("the device {} cannot be handed over: {why}", device.config().name().unwrap_or("of this process"))
}

/// Looks at the medium of a device. Another program may have changed a disk that no guest uses, and the next
/// process would find another one than this process knows.
pub(super) fn look(device: &ServedDevice) {
    device.config().span().in_scope(|| device.device().refresh());
}

/// Makes a device ready for the pause, while its rings run. Can wait for its medium.
pub(super) fn settle(device: &ServedDevice) -> Result<(), String> {
    let settled = device.config().span().in_scope(|| device.device().settle());
    settled.map_err(|why| refusal(device, why))
}

/// A device that passes. Dropping it changes nothing: [`Passing::go_on`] lets the device go on.
pub(super) struct Passing {
    number: u32,
    device: DeviceRef,
    /// The changes of the session and of the device when they were given last.
    given: Option<(u64, u64)>,
    parked: Option<Parked>,
    /// All rings are asked to park.
    is_parking: bool,
    has_iommu: bool,
    /// Its front-end has left, and the device with it.
    has_left: bool,
}

impl Passing {
    /// Takes a device. `number` is its position in the plan.
    ///
    /// # Errors
    /// The device cannot be handed over.
    pub(super) fn new(number: u32, device: DeviceRef) -> Result<Self, String> {
        let passing = Self {
            number,
            device,
            given: None,
            parked: None,
            is_parking: false,
            has_iommu: false,
            has_left: false,
        };
        if passing.device.keeps_disk() {
            return Err(passing.refusal("it keeps its disk, because some writes did not reach it"));
        }
        match passing.device.device().refuses() {
            Some(why) => Err(passing.refusal(&why)),
            None => Ok(passing),
        }
    }

    /// Returns the device.
    pub(super) fn device(&self) -> &ServedDevice {
        &self.device
    }

    fn refusal(&self, why: impl Display) -> String {
        refusal(&self.device, why)
    }

    /// Gives the device for the first time, unless it gives slowly. Its session is parked for a moment. Tells
    /// the new process if the device has left instead.
    pub(super) fn give_first(
        &mut self,
        end: &mut OldEnd,
        park: Instant,
        deadline: Instant,
    ) -> Result<(), String> {
        let parked = match self.ask().wait(park) {
            Ok(parked) => parked,
            Err(HandOverError::Ended) => return self.leave(end, deadline),
            Err(why) => return Err(self.refusal(why)),
        };
        self.has_iommu = parked.has_iommu();
        if self.device.device().gives_slowly() {
            return Ok(());
        }
        let record = self.record(&parked)?;
        parked.go_on();
        end.device(self.number, record, deadline).map_err(|error| error.to_string())
    }

    /// Tells the new process that the device has left.
    fn leave(&mut self, end: &mut OldEnd, deadline: Instant) -> Result<(), String> {
        self.has_left = true;
        end.gone(self.number, deadline).map_err(|error| error.to_string())
    }

    /// Returns whether its front-end has left, and the device with it.
    pub(super) fn has_left(&self) -> bool {
        self.has_left
    }

    /// Returns the record of the device, and notes what it is of.
    fn record(&mut self, parked: &Parked) -> Result<kickless_handover::Record, String> {
        let device = self.device.device();
        let mut to = Giving::default();
        let changes = (parked.changes(), device.changes());
        let session = parked.give(&mut to).map_err(|why| self.refusal(why))?;
        let own = device.give(&mut to).map_err(|why| self.refusal(why))?;
        let listener = self.device.listener().map(|listener| give_listener(listener, &mut to)).transpose();
        let listener = listener.map_err(|why| self.refusal(why))?;
        self.given = Some(changes);
        to.record(&v1::Device { listener, session, own }).map_err(|why| self.refusal(why))
    }

    /// Returns whether rings may wait for translations, which only a running session asks for.
    pub(super) fn has_iommu(&self) -> bool {
        self.has_iommu
    }

    /// Asks the session to park.
    pub(super) fn ask(&self) -> kickless_vhost::ParkRequest {
        self.device.server().park()
    }

    /// Waits until the session is parked. Tells the new process if the device has left instead.
    pub(super) fn park(
        &mut self,
        request: kickless_vhost::ParkRequest,
        end: &mut OldEnd,
        deadline: Instant,
    ) -> Result<(), String> {
        match request.wait(deadline) {
            Ok(parked) => self.parked = Some(parked),
            Err(HandOverError::Ended) => self.leave(end, deadline)?,
            Err(why) => return Err(self.refusal(why)),
        }
        Ok(())
    }

    /// Gives the device again, if it has changed since.
    pub(super) fn give_changes(&mut self, end: &mut OldEnd, deadline: Instant) -> Result<(), String> {
        // A device that gives slowly comes last.
        if self.given.is_none() && !self.is_parking {
            return Ok(());
        }
        let Some(parked) = self.parked.take() else { return Ok(()) };
        let is_same = self.given == Some((parked.changes(), self.device.device().changes()));
        let record = if is_same { None } else { Some(self.record(&parked)) };
        self.parked = Some(parked);
        match record.transpose()? {
            Some(record) => end.device(self.number, record, deadline).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    /// Returns whether the device gives what takes longer than a pause.
    pub(super) fn gives_slowly(&self) -> bool {
        self.parked.is_some() && self.device.device().gives_slowly()
    }

    /// Parks the rings of a device that gives slowly, and gives it.
    pub(super) fn give_slowly(&mut self, end: &mut OldEnd, deadline: Instant) -> Result<(), String> {
        self.hold();
        if !self.is_parked(deadline)? {
            return Err(self.too_slow());
        }
        self.give_changes(end, Instant::now() + PREPARE_WAIT)
    }

    /// Begins the pause of this device: stops its threads, and asks its rings to park.
    pub(super) fn hold(&mut self) {
        if let (Some(parked), false) = (&mut self.parked, self.is_parking) {
            self.is_parking = true;
            self.device.device().hold();
            parked.park_rings();
        }
    }

    /// Waits until all rings are parked, up to a deadline. Returns whether they are.
    pub(super) fn is_parked(&mut self, deadline: Instant) -> Result<bool, String> {
        match self.parked.as_mut().map(|parked| parked.wait_for_rings(deadline)) {
            Some(Err(why)) => Err(self.refusal(why)),
            Some(Ok(is_parked)) => Ok(is_parked),
            None => Ok(true),
        }
    }

    /// Returns the sentence about a ring that is not parked.
    pub(super) fn too_slow(&self) -> String {
        let ring = self.parked.as_ref().and_then(Parked::unparked_ring).unwrap_or_default();
        self.refusal(format!("requests of its ring {ring} did not complete in time"))
    }

    /// Gives what has changed until the pause. All rings are parked.
    pub(super) fn give_final(
        &mut self,
        end: &mut OldEnd,
        parked_ns: u64,
        deadline: Instant,
    ) -> Result<(), String> {
        let Some(parked) = &mut self.parked else { return Ok(()) };
        let (mut to, mut state) = (Giving::default(), v1::Final { parked_ns, ..v1::Final::default() });
        let given = parked.give_final(&mut state);
        given.map_err(|why| self.refusal(why))?;
        state.tokens = self.device.limiter().until_full();
        state.is_drained = self.device.is_drained();
        state.own = self.device.device().give_final(&mut to).map_err(|why| self.refusal(why))?;
        let record = to.record(&state).map_err(|why| self.refusal(why))?;
        end.final_record(self.number, record, deadline).map_err(|error| error.to_string())
    }

    /// Lets the device go on.
    pub(super) fn go_on(self) {
        let span = self.device.config().span();
        if let Err(error) = span.in_scope(|| self.device.device().take_back()) {
            span.in_scope(|| error!(%error, "the device cannot go on, and is no longer served"));
            self.device.stop();
        }
        // Rings and sessions go on with this.
        drop(self.parked);
    }
}
