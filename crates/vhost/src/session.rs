//! A session: one connection to a front-end.

mod hand_over;

use crate::channel::{Channel, Waits};
use crate::error::{Ended, HOW_TO_SHARE, RequestError};
use crate::inflight::Inflight;
use crate::iotlb::Translations;
use crate::memory::Memory;
use crate::negotiation::{self, Negotiated};
use crate::rings::{self, Rings};
use crate::setup::{self, Setup};
use crate::slot::Slot;
use crate::state::Bounds;
use crate::statistics::Statistics;
use crate::transfer::Transfers;
use crate::wait::{self, Cancellation};
use kickless_device::{Call, Device, DeviceMessage, Driver, Executor, Kick, Leave, Update};
use kickless_memory::{Gpa, Mapper, SLOTS_MAX, UserAddr};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest, ProtocolFeatures};
use kickless_vhost_user::{
    AfterRefusal, Backend, DeviceStateReply, Error, Expects, FrontendMessage as Message, Header, LogBase,
    Received, Reply, RequestMessage, VringAddr, VringFd, VringState, Wait,
};
use kickless_virtqueue::device::Addresses;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use tracing::{debug, warn};

/// A connection to a front-end, and all settings that it has made.
pub(crate) struct Session {
    backend: Backend,
    device: Arc<dyn Device>,
    statistics: Arc<Statistics>,
    negotiated: Negotiated,
    /// Maps the descriptors that the front-end shares.
    mapper: Mapper,
    memory: Memory,
    rings: Rings,
    transfers: Transfers,
    /// Tells the front-end of misses, and of changes to the configuration space.
    channel: Channel,
    /// `Some` once a vIOMMU has been negotiated.
    translations: Option<Translations>,
    /// The session knows the driver. Either it is new, and its front-end reads the configuration space before
    /// it starts a ring, or it ran before the front-end connected.
    driver_known: bool,
    /// The device's kicks and requests before this session.
    totals_before: (u64, u64),
    /// The number of changes of what [`Session::give`] gives.
    changes: u64,
    /// The bytes of half messages, of the front-end and on the back-end's channel, at the last change.
    half_received: (usize, Option<usize>),
}

impl Session {
    pub(crate) fn new(
        backend: Backend,
        device: Arc<dyn Device>,
        executor: Arc<dyn Executor>,
        statistics: Arc<Statistics>,
        mapper: Mapper,
    ) -> Self {
        Self {
            backend,
            rings: Rings::new(device.clone(), executor, statistics.clone()),
            device,
            totals_before: statistics.totals(),
            statistics,
            negotiated: Negotiated::default(),
            memory: Memory::new(mapper.clone()),
            mapper,
            transfers: Transfers::default(),
            channel: Channel::default(),
            translations: None,
            driver_known: false,
            changes: 0,
            half_received: (0, None),
        }
    }

    /// Begins. `stops` has the index at which each ring stopped before the session.
    pub(crate) fn begin(&mut self, stops: &[Option<u16>]) {
        self.rings.set_stops(stops);
        self.device.connected();
    }

    /// Serves until the front-end leaves or the session ends for another reason. No ring runs afterwards.
    /// Returns the index at which each ring has stopped, and whether the session has closed the device.
    ///
    /// Parks in `slot` when it is asked to.
    pub(crate) fn run(
        mut self: Box<Self>,
        waits: &mut Waits<'_>,
        slot: &Slot<Box<Self>>,
    ) -> (Result<(), Ended>, Vec<Option<u16>>, bool) {
        let ended = loop {
            match self.serve(waits) {
                Ok(Pause::Asked) => {
                    self.note_half_messages();
                    let Some(parked) = slot.park(Some(self)) else {
                        // A coordinator gives back the session that it took.
                        return (Err(Ended::Stopped), Vec::new(), false);
                    };
                    self = parked;
                }
                Ok(Pause::Left) | Err(Ended::Left) => break Ok(()),
                Err(ended) => break Err(ended),
            }
        };
        let stopped = self.rings.stop_all();
        self.warn_of_private_memory();
        let stops = self.rings.stops();
        let closed = self.rings.reset(false);
        if let Some(translations) = &self.translations {
            translations.log();
        }
        slot.add_changes(self.changes + 1);
        // A device that keeps its resources is more than the reason of the end.
        (stopped.and(closed).and(ended), stops, self.rings.has_closed)
    }

    /// Warns if the front-end has probably shared memory that it has mapped privately (QEMU: `share=off`).
    /// The guest's writes are not in the file then. The rings stay empty here, and only the driver's kicks
    /// arrive. QEMU itself kicks each ring that it starts, so the kicks alone say nothing.
    fn warn_of_private_memory(&self) {
        let ((kicks, requests), before) = (self.statistics.totals(), self.totals_before);
        let only_kicked = kicks > before.0 && requests == before.1;
        if only_kicked
            && self.rings.all_untouched(self.negotiated.packed())
            && self.memory.begins_blank(&self.rings.areas())
        {
            let name = self.device.words().name;
            warn!(
                "the guest kicked and no request was in its rings; if it waits for its {name}, {HOW_TO_SHARE}"
            );
        }
    }

    fn serve(&mut self, waits: &mut Waits<'_>) -> Result<Pause, Ended> {
        loop {
            let served = self.channel.serve_until(
                self.backend.as_fd(),
                &*self.device,
                self.translations.as_mut(),
                &self.rings,
                waits,
            );
            served.map_err(Ended::Host)?;
            let stop = waits.stop;
            match self.backend.recv(&Wait::until(stop).or_until(waits.asked)) {
                Ok(None) => return Ok(Pause::Left),
                Ok(Some(received)) => self.answer(received, stop)?,
                Err(Error::Interrupted) if wait::is_readable(stop) => return Err(Ended::Stopped),
                Err(Error::Interrupted) => return Ok(Pause::Asked),
                Err(Error::Rejected { header, cause }) => {
                    let code = Message::code_from(header.request);
                    self.refuse(&header, code.map_or("unknown request", Message::name), &cause)?;
                }
                Err(error) => return Err(error.into()),
            }
            self.changes += 1;
        }
    }

    /// Carries out a message and answers it.
    fn answer(&mut self, received: Received<Message>, stop: BorrowedFd<'_>) -> Result<(), Ended> {
        let (header, expects) = (received.header, received.expects());
        let name = Message::name(received.message.code());
        debug!(request = ?received.message, "from the front-end");
        match self.carry_out(received.message, stop) {
            Ok(Some(reply)) => self.backend.reply(&header, &reply, &reply_timeout())?,
            Ok(None) if expects == Expects::Ack && self.acknowledges() => {
                self.backend.ack(&header, true, &reply_timeout())?;
            }
            Ok(None) => {}
            Err(RequestError::Ended(ended)) => return Err(ended),
            Err(refusal) => self.refuse(&header, name, &refusal)?,
        }
        self.rings.close_if_unused()?;
        let (queues_max, queue_size_max) = (self.device.queues_max(), self.device.queue_size_max());
        let bounds = Bounds { queues_max, queue_size_max };
        // The state has the choices of its driver, which no later GET_CONFIG forgets.
        self.driver_known |= self.transfers.run(&mut self.rings, &bounds, &Wait::until(stop));
        Ok(())
    }

    fn acknowledges(&self) -> bool {
        self.negotiated.protocol.contains(ProtocolFeatures::REPLY_ACK)
    }

    /// Refuses a message, or ends the session if the message has no reply.
    fn refuse(
        &mut self,
        header: &Header,
        name: &'static str,
        why: &dyn std::fmt::Display,
    ) -> Result<(), Ended> {
        let code = Message::code_from(header.request);
        let has_reply = !matches!(Message::refusal(code, false), kickless_vhost_user::Refusal::NotExpected);
        let hears = has_reply || (header.needs_reply() && self.acknowledges());
        let is_refused =
            if code == Some(FrontendRequest::SetLogBase) && header.needs_reply() && self.describes_log() {
                let none = Reply::Log { mmap_size: 0, mmap_offset: 0 };
                self.backend.reply(header, &none, &reply_timeout())?;
                true
            } else {
                hears && self.backend.refuse(header, &reply_timeout())? == AfterRefusal::Continue
            };
        if is_refused {
            warn!(request = name, error = %why, "message refused");
            return Ok(());
        }
        Err(Ended::Refused { message: name, why: why.to_string() })
    }

    fn carry_out(&mut self, message: Message, stop: BorrowedFd<'_>) -> Result<Option<Reply>, RequestError> {
        let done = |()| Ok(None);
        let number = |value: u64| Ok(Some(Reply::U64(value)));
        let cancellation = Cancellation { stop, connection: self.backend.as_fd() };
        match message {
            Message::GetFeatures => number(self.negotiated.offered(&*self.device).bits()),
            Message::SetFeatures(features) => self.set_features(features).and_then(done),
            Message::GetProtocolFeatures => number(negotiation::protocol_features(&*self.device).bits()),
            Message::SetProtocolFeatures(protocol) => {
                self.negotiated.set_protocol(&*self.device, protocol).and_then(done)
            }
            Message::GetQueueNum => number(self.device.queues_max().into()),
            Message::NetSetMtu(mtu) => {
                self.pass_to_device(ProtocolFeatures::MTU, DeviceMessage::SetMtu(mtu)).and_then(done)
            }
            Message::SendRarp(mac) => {
                self.pass_to_device(ProtocolFeatures::RARP, DeviceMessage::SendRarp(mac)).and_then(done)
            }
            // A connection has only one possible owner, and closing it gives it up.
            Message::SetOwner | Message::ResetOwner => Ok(None),
            Message::ResetDevice => self.reset().and_then(done),

            Message::SetMemTable(regions) => {
                self.memory.set(&regions, &mut self.rings, cancellation).and_then(done)
            }
            Message::GetMaxMemSlots => number(SLOTS_MAX as u64),
            Message::AddMemReg(region, file) => {
                self.negotiated.need(ProtocolFeatures::CONFIGURE_MEM_SLOTS)?;
                self.memory.add(&region, &file, &mut self.rings, cancellation).and_then(done)
            }
            Message::RemMemReg(region) => {
                self.negotiated.need(ProtocolFeatures::CONFIGURE_MEM_SLOTS)?;
                self.memory.remove(&region, &mut self.rings, cancellation).and_then(done)
            }

            Message::SetBackendReqFd(socket) => {
                self.negotiated.need(ProtocolFeatures::BACKEND_REQ)?;
                self.channel.set(socket, self.translations.as_mut()).and_then(done)
            }
            Message::IotlbMsg(message) => {
                let translations = self.translations.as_mut().ok_or(RequestError::NoIommu)?;
                translations.message(&message, self.memory.view().map(), &mut self.rings, cancellation)?;
                number(0)
            }

            Message::SetLogBase(base) => self.set_log_base(base).map(Some),
            Message::SetLogFd(fd) => {
                self.rings.set_logged(Call::new(fd).map_err(RequestError::Descriptor)?).and_then(done)
            }

            Message::GetConfig(config) => {
                let bytes = config_offset(config.offset).saturating_add(config.data.len());
                if let Some(max) = self.device.protocol_features().config_bytes_max
                    && bytes > max
                {
                    return Err(RequestError::OtherKind { bytes, own: self.device.words().name });
                }
                if !std::mem::replace(&mut self.driver_known, true) {
                    self.device.reset(Driver::Fresh);
                    self.rings.expects_new_driver = true;
                }
                let mut data = vec![0; config.data.len()];
                self.device.read_config(config_offset(config.offset), &mut data);
                Ok(Some(Reply::Config(Some(config.answer(&data)))))
            }
            Message::SetConfig(config) => {
                self.driver_known = true;
                Ok(self.device.write_config(config_offset(config.offset), &config.data).map(|()| None)?)
            }

            Message::SetVringNum(state) => self.set_vring_num(state).and_then(done),
            Message::SetVringBase(state) => self.set_vring_base(state).and_then(done),
            Message::SetVringAddr(addr) => self.set_vring_addr(&addr).and_then(done),
            Message::GetVringBase { index } => self.get_vring_base(index, false).map(Some),
            Message::GetVringBaseSkipDrain { index } => {
                self.negotiated.need(ProtocolFeatures::GET_VRING_BASE_SKIP_DRAIN)?;
                self.get_vring_base(index, true).map(Some)
            }
            Message::SetVringKick(kick) => self.set_vring_kick(kick).and_then(done),
            Message::SetVringCall(call) => self.set_vring_call(call).and_then(done),
            Message::SetVringErr(err) => self.set_vring_err(err).and_then(done),
            Message::SetVringEnable { index, enable } => self.set_vring_enable(index, enable).and_then(done),
            Message::GetInflightFd(wanted) => {
                self.negotiated.need(ProtocolFeatures::INFLIGHT_SHMFD)?;
                let max = (self.device.queues_max(), self.device.queue_size_max());
                let packed = self.negotiated.features_set.then(|| self.negotiated.packed());
                let (made, fd) = Inflight::make(wanted, max, packed)?;
                Ok(Some(Reply::Inflight(made, Some(fd))))
            }
            Message::SetInflightFd(described, fd) => {
                self.negotiated.need(ProtocolFeatures::INFLIGHT_SHMFD)?;
                self.rings.all_stopped()?;
                self.rings.inflight = Some(Inflight::take(described, &fd, &self.mapper)?);
                Ok(None)
            }
            Message::SetDeviceStateFd(state, fd) => {
                self.negotiated.need(ProtocolFeatures::DEVICE_STATE)?;
                self.transfers.prepare(state, fd, &self.rings, self.negotiated.packed())?;
                Ok(Some(Reply::DeviceState(DeviceStateReply::Accepted)))
            }
            Message::CheckDeviceState => {
                self.negotiated.need(ProtocolFeatures::DEVICE_STATE)?;
                number((!self.transfers.check()?).into())
            }
            Message::VringKick { index } => self.vring_kick(index).and_then(done),
            _ => Err(RequestError::NotOffered),
        }
    }

    /// Passes a message to the device, if the device offers the protocol feature and it was negotiated.
    fn pass_to_device(&self, feature: ProtocolFeatures, message: DeviceMessage) -> Result<(), RequestError> {
        if !self.device.protocol_features().offered.contains(feature) {
            return Err(RequestError::NotOffered);
        }
        self.negotiated.need(feature)?;
        Ok(self.device.message(message)?)
    }

    fn start_or_stop(&mut self, index: u16) -> Result<(), RequestError> {
        // A front-end that chooses whether requests may stay says it after it has disabled the ring.
        let (features, leave) = (self.negotiated.features, self.negotiated.leave(true));
        self.rings.start_or_stop(index, self.memory.view(), features, leave)
    }

    /// Sets the features. Rings that run keep those that they were started with, except logging.
    fn set_features(&mut self, features: Features) -> Result<(), RequestError> {
        self.negotiated.set_features(&*self.device, features)?;
        if self.negotiated.iommu() {
            self.need_translations()?;
        }
        self.flush_if_stopped();
        self.memory.set_logging(features.contains(Features::LOG_ALL), &mut self.rings)?;
        if self.negotiated.always_enabled() {
            self.rings.each_setup(|setup| setup.enabled = true);
            (0..self.device.queues_max()).try_for_each(|index| self.start_or_stop(index))?;
        }
        Ok(())
    }

    /// Makes the table of translations, unless there is one.
    fn need_translations(&mut self) -> Result<(), RequestError> {
        if self.translations.is_none() {
            let translations = Translations::new().map_err(RequestError::Descriptor)?;
            self.rings.iommu = Some(translations.iommu());
            self.translations = Some(translations);
        }
        Ok(())
    }

    /// Drops all translations if no ring runs, because the front-end reports no invalidations then.
    fn flush_if_stopped(&mut self) {
        if let Some(translations) = &mut self.translations
            && !self.rings.any_running()
        {
            translations.flush();
        }
    }

    fn set_log_base(&mut self, base: LogBase) -> Result<Reply, RequestError> {
        self.negotiated.need(ProtocolFeatures::LOG_SHMFD)?;
        let LogBase::Shared { mmap_size, mmap_offset, fd: Some(file) } = base else {
            return Err(RequestError::NoLog);
        };
        self.memory.set_log_base(&file, mmap_offset, mmap_size, &mut self.rings)?;
        Ok(if self.describes_log() { Reply::Log { mmap_size, mmap_offset } } else { Reply::U64(0) })
    }

    /// Returns whether the front-end reads a description of the log in the reply to SET_LOG_BASE, and not a
    /// number. The specification has no payload there, and QEMU accepts any. The crate `vhost`, which Cloud
    /// Hypervisor uses, reads a number before its version 0.16 and a description since then, and does not
    /// find the next message after another length. Cloud Hypervisor negotiates DEVICE_STATE since it has that
    /// version.
    fn describes_log(&self) -> bool {
        self.negotiated.protocol.contains(ProtocolFeatures::DEVICE_STATE)
    }

    fn reset(&mut self) -> Result<(), RequestError> {
        self.negotiated.need(ProtocolFeatures::RESET_DEVICE)?;
        self.rings.stop_all()?;
        self.flush_if_stopped();
        // No request is in flight in rings that start anew, so the buffer does not describe them.
        self.rings.inflight = None;
        self.rings.reset(self.negotiated.always_enabled())?;
        self.device.reset(Driver::SameFrontEnd);
        Ok(())
    }

    fn set_vring_num(&mut self, state: VringState) -> Result<(), RequestError> {
        let index = self.rings.index(state.index)?;
        let max = self.device.queue_size_max();
        let size = match u16::try_from(state.num) {
            Ok(size) if size <= max => size,
            _ => return Err(RequestError::SizeTooLarge { size: state.num, max }),
        };
        rings::options(size, self.negotiated.features)?;
        self.while_stopped(index)?.setup.size = Some(size);
        self.start_or_stop(index)
    }

    fn set_vring_base(&mut self, state: VringState) -> Result<(), RequestError> {
        let index = self.rings.index(state.index)?;
        let (packed, has_left) = (self.negotiated.packed(), self.negotiated.leave(true) == Leave::Unfinished);
        let base = Setup::index_of_base(state.num, packed, has_left).ok_or(RequestError::Base(state.num))?;
        self.while_stopped(index)?.setup.set_base(base);
        Ok(())
    }

    /// Returns a ring whose set-up is about to change. Stops the ring if it is disabled and drained: a
    /// front-end that resets its device with SET_VRING_ENABLE alone believes that the ring has stopped.
    ///
    /// # Errors
    /// The ring runs and is enabled.
    fn while_stopped(&mut self, index: u16) -> Result<&mut rings::Ring, RequestError> {
        if self.rings.is_running(index) {
            if self.rings.get(index).setup.enabled {
                return Err(RequestError::Running(index));
            }
            self.stop_ring(index, Leave::Nothing)?;
        }
        Ok(self.rings.get(index))
    }

    /// Stops a ring. It starts again with the next kick descriptor.
    fn stop_ring(&mut self, index: u16, leave: Leave) -> Result<(), RequestError> {
        let was_running = self.rings.is_running(index);
        self.rings.stop(index, leave)?;
        if leave == Leave::Nothing && !was_running {
            self.rings.complete_left(index, self.memory.view(), self.negotiated.features)?;
        }
        self.flush_if_stopped();
        let ring = self.rings.get(index);
        ring.setup.started = false;
        ring.kick = None;
        Ok(())
    }

    fn set_vring_addr(&mut self, addr: &VringAddr) -> Result<(), RequestError> {
        let index = self.rings.index(addr.index)?;
        let addresses = Addresses {
            desc: UserAddr(addr.desc_addr),
            avail: UserAddr(addr.avail_addr),
            used: UserAddr(addr.used_addr),
            log: addr.log.then_some(Gpa(addr.log_guest_addr)),
        };
        let areas = setup::areas(addresses, self.negotiated.features);
        let view = self.memory.view();
        // The specification sets no order for SET_VRING_NUM, SET_VRING_ADDR and SET_MEM_TABLE. Areas that
        // cannot be checked now are checked when the ring starts.
        if let Some(size) = self.rings.get(index).setup.size
            && !view.map().slots().is_empty()
        {
            let options = rings::options(size, self.negotiated.features)?;
            rings::check_areas(index, view, &areas, &options)?;
        }
        self.rings.get(index).setup.addresses = Some(addresses);
        self.rings.update(index, Update::Addresses(areas))?;
        self.start_or_stop(index)
    }

    /// Stops a ring, and closes the device with the last one. `is_suspended`: the message is
    /// GET_VRING_BASE_SKIP_DRAIN.
    fn get_vring_base(&mut self, index: u32, is_suspended: bool) -> Result<Reply, RequestError> {
        let checked = self.rings.index(index)?;
        self.stop_ring(checked, self.negotiated.leave(is_suspended))?;
        let packed = self.negotiated.packed();
        let num = self.rings.get(checked).setup.base(packed);
        // Before the answer: once a virtual machine has stopped, another process may get the disk. If writes
        // did not reach it, the front-end gets no answer, so that a migration fails and loses nothing.
        self.rings.close_if_unused()?;
        Ok(Reply::VringBase(VringState { index, num }))
    }

    fn set_vring_kick(&mut self, kick: VringFd) -> Result<(), RequestError> {
        let index = self.rings.index(kick.index.into())?;
        let kick = Kick::new(kick.fd.ok_or(RequestError::NoKick)?).map_err(RequestError::Descriptor)?;
        let theirs = kick.try_clone().map_err(RequestError::Descriptor)?;
        self.driver_known = true;
        let ring = self.rings.get(index);
        ring.kick = Some(kick);
        ring.setup.started = true;
        self.rings.update(index, Update::Kick(Some(theirs)))?;
        self.start_or_stop(index)
    }

    fn set_vring_call(&mut self, call: VringFd) -> Result<(), RequestError> {
        let index = self.rings.index(call.index.into())?;
        let (ours, theirs) = duplicate(call)?;
        self.rings.get(index).call = ours;
        Ok(self.rings.update(index, Update::Call(theirs))?)
    }

    fn set_vring_err(&mut self, err: VringFd) -> Result<(), RequestError> {
        let index = self.rings.index(err.index.into())?;
        let (ours, theirs) = duplicate(err)?;
        self.rings.get(index).err = ours;
        Ok(self.rings.update(index, Update::Err(theirs))?)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<(), RequestError> {
        let index = self.rings.index(index)?;
        self.rings.get(index).setup.enabled = enable;
        self.start_or_stop(index)
    }

    fn vring_kick(&mut self, index: u32) -> Result<(), RequestError> {
        let index = self.rings.index(index)?;
        if self.rings.is_running(index) {
            return Ok(self.rings.update(index, Update::Poll)?);
        }
        self.statistics.kicks_ignored.add(1);
        debug!(ring = index, "kick for a ring that does not run ignored");
        Ok(())
    }
}

/// The reason for which a session serves no messages.
enum Pause {
    /// The front-end has left.
    Left,
    /// The session is asked to park, and is between two messages.
    Asked,
}

/// Returns the time in which a front-end must read an answer. A request to stop does not shorten it.
fn reply_timeout() -> Wait<'static> {
    Wait::FOREVER.at_most(Duration::from_secs(5))
}

/// Returns an offset in the configuration space. Cloud Hypervisor reads a disk's from 0x100 on in its
/// versions until January 2026: a driver finds the space there in the registers of virtio-mmio (virtio 1.3,
/// section 4.2.2). Nothing else is there, because no device has so many bytes of configuration.
fn config_offset(offset: u32) -> usize {
    const REGISTERS: u32 = 0x100;
    (if offset < REGISTERS { offset } else { offset - REGISTERS }) as usize
}

/// Duplicates a descriptor, for the session and for the worker. Both are `None` if none was sent.
fn duplicate(sent: VringFd) -> Result<(Option<Call>, Option<Call>), RequestError> {
    let Some(fd) = sent.fd else { return Ok((None, None)) };
    let ours = Call::new(fd).map_err(RequestError::Descriptor)?;
    let theirs = ours.try_clone().map_err(RequestError::Descriptor)?;
    Ok((Some(ours), Some(theirs)))
}
