//! Serves the messages of one connection of the hostile back-end.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use kickless_memory::{Gpa, Map, Slot, UserAddr, View};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{ConfigHeader, FrontendRequest as Code, ProtocolFeatures};
use kickless_vhost_user::{
    Backend, Expects, FrontendMessage as Message, HEADER_SIZE, Header, MemoryRegion, PAYLOAD_MAX, Received,
    Reply, ReplyTo, RequestMessage, VringState,
};
use kickless_virtqueue::device::{Addresses, Options};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use zerocopy::IntoBytes;

use crate::hostile_backend::backend_state::BackendState;
use crate::hostile_backend::chaos::Chaos;
use crate::hostile_backend::faults::AnswerFault;
use crate::hostile_backend::ring::{Events, Ring};

/// The driver's set-up of a ring.
#[derive(Default)]
struct RingSetup {
    size: u16,
    base: u16,
    addresses: Addresses,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    enabled: bool,
}

/// One connection.
pub(crate) struct Session<'a> {
    shared: &'a BackendState,
    socket: UnixStream,
    backend: Backend,
    slots: Vec<Slot>,
    view: Arc<View>,
    features: Features,
    protocol: ProtocolFeatures,
    ring_setups: BTreeMap<u32, RingSetup>,
    rings: BTreeMap<u32, Ring>,
    chaos: Option<Chaos>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(shared: &'a BackendState, socket: UnixStream) -> Result<Session<'a>> {
        let connection = shared.connections.load(Ordering::Acquire);
        let chaos = shared.rules().chaos.map(|seed| Chaos::new(seed, connection));
        Ok(Session {
            shared,
            backend: Backend::new(socket.try_clone()?),
            socket,
            slots: Vec::new(),
            view: Arc::default(),
            features: Features::empty(),
            protocol: ProtocolFeatures::empty(),
            ring_setups: BTreeMap::new(),
            rings: BTreeMap::new(),
            chaos,
        })
    }

    /// Serves until the driver closes the connection.
    pub(crate) fn run(&mut self) -> Result<()> {
        loop {
            let (message, kicked) = self.wait()?;
            if message {
                match self.backend.recv(&self.shared.until_stopped())? {
                    Some(received) => self.answer(received)?,
                    None => return Ok(()),
                }
            }
            for index in kicked {
                if let Some(ring) = self.rings.get_mut(&index) {
                    match &mut self.chaos {
                        Some(chaos) => chaos.look(ring, self.shared)?,
                        None => ring.look(self.shared)?,
                    }
                }
            }
        }
    }

    /// Waits. Returns whether there is a message, and the rings that have a kick.
    fn wait(&mut self) -> Result<(bool, Vec<u32>)> {
        // A random answer may be missing and the driver may wait for it. The limit ends such a connection.
        let limit = self.chaos.as_ref().map(|_| Timespec { tv_sec: 0, tv_nsec: 30_000_000 });
        let watched = [self.socket.as_fd(), self.shared.stop.as_fd(), self.shared.leave.as_fd()];
        let mut fds = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).to_vec();
        let rings = || self.rings.iter().filter(|(_, ring)| !ring.halted);
        fds.extend(rings().map(|(_, ring)| PollFd::new(&ring.events.kick, PollFlags::IN)));
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) => bail!("nothing happens"),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        ensure!(!ready[1], "the test is over");
        ensure!(self.shared.leave.take() == 0, "the test closes the connection");
        let kicked = rings().zip(&ready[3..]).filter(|(_, ready)| **ready);
        Ok((ready[0], kicked.map(|((index, _), _)| *index).collect()))
    }

    fn answer(&mut self, received: Received<Message>) -> Result<()> {
        let (header, code) = (received.header, received.message.code());
        let acknowledged = received.expects() == Expects::Ack;
        let honest = self.carry_out(received.message)?;
        let honest = honest.or(acknowledged.then_some(Reply::U64(0)));
        let fault = self.shared.rules().answers.iter().find(|(of, _)| *of == code).map(|(_, fault)| *fault);
        let fault = fault.or_else(|| self.chaos.as_mut()?.answer());
        let Some(reply) = honest else {
            ensure!(fault != Some(AnswerFault::Closed), "a fault closes the connection");
            return Ok(());
        };
        match fault {
            None => Ok(self.backend.reply(&header, &reply, &self.shared.until_stopped())?),
            Some(fault) => self.fault(fault, &header, &reply),
        }
    }

    fn fault(&mut self, fault: AnswerFault, to: &Header, honest: &Reply) -> Result<()> {
        let mut payload = honest.encode().payload;
        let mut header = Header::reply(to.request, payload.len());
        let mut fds = 0;
        match fault {
            AnswerFault::Refused => {
                payload =
                    if to.request == Code::GetConfig.raw() { Vec::new() } else { 1u64.as_bytes().to_vec() };
            }
            AnswerFault::Closed | AnswerFault::Half => {}
            AnswerFault::Silence => return Ok(()),
            AnswerFault::OfAnother => header.request = to.request % 40 + 1,
            AnswerFault::Short => drop(payload.pop()),
            AnswerFault::Long => payload.extend([0; 9]),
            AnswerFault::Version => header.flags ^= 3,
            AnswerFault::Huge => {}
            AnswerFault::Request => header.flags &= !kickless_spec::vhost_user::FLAG_REPLY,
            AnswerFault::Fd => fds = 1,
            AnswerFault::Fds => fds = 9,
            AnswerFault::Offset => {
                if let Some(offset) = payload.first_mut() {
                    *offset ^= 1;
                }
            }
            AnswerFault::Less | AnswerFault::More => {
                let len = if fault == AnswerFault::Less { 20u8 } else { 61 };
                payload.resize(size_of::<ConfigHeader>() + usize::from(len), 0);
                payload[offset_of!(ConfigHeader, size)] = len;
            }
        }
        header.size = if fault == AnswerFault::Huge { PAYLOAD_MAX as u32 + 1 } else { payload.len() as u32 };
        let mut bytes = [header.to_bytes().as_slice(), &payload].concat();
        match fault {
            AnswerFault::Closed => bytes.clear(),
            AnswerFault::Half => bytes.truncate(HEADER_SIZE / 2),
            _ => {}
        }
        let file = std::fs::File::open("/dev/null")?;
        send_with(&self.socket, &bytes, &vec![file.as_fd(); fds])?;
        ensure!(!matches!(fault, AnswerFault::Closed | AnswerFault::Half), "a fault closes the connection");
        Ok(())
    }

    /// Performs a message as an honest back-end does. Returns its reply if the message has one of its own.
    fn carry_out(&mut self, message: Message) -> Result<Option<Reply>> {
        let number = |value| Ok(Some(Reply::U64(value)));
        let rules = self.shared.rules().clone();
        match message {
            Message::GetFeatures => return number(rules.features.bits()),
            Message::GetProtocolFeatures => return number(rules.protocol.bits()),
            Message::GetQueueNum => return number(rules.queues),
            Message::GetMaxMemSlots => return number(rules.slots),
            Message::SetFeatures(features) => {
                self.check(rules.features.contains(features), "features that were not offered");
                self.features = features;
                self.shared.acked.store(features.bits(), Ordering::Release);
            }
            Message::SetProtocolFeatures(protocol) => {
                self.check(rules.protocol.contains(protocol), "protocol features that were not offered");
                self.protocol = protocol;
            }
            Message::SetOwner => {}
            Message::SetBackendReqFd(channel) => *self.shared.channel() = Some(channel),
            Message::GetConfig(config) => {
                let space = rules.card.as_ref().map_or(rules.config.as_bytes(), IntoBytes::as_bytes);
                let start = (config.offset as usize).min(space.len());
                let data = space[start..].iter().copied().take(config.data.len());
                return Ok(Some(Reply::Config(Some(config.answer(&data.collect::<Vec<_>>())))));
            }
            Message::SetConfig(_) | Message::NetSetMtu(_) => {}
            Message::SetMemTable(regions) => {
                self.slots.clear();
                regions.iter().try_for_each(|(region, file)| self.share(region, file))?;
                self.view = Arc::new(View::new(Map::new(self.slots.clone())?));
            }
            Message::AddMemReg(region, file) => {
                self.share(&region, &file)?;
                self.view = Arc::new(View::new(Map::new(self.slots.clone())?));
            }
            Message::RemMemReg(region) => {
                self.slots.retain(|slot| slot.gpa() != Gpa(region.guest_addr));
                self.view = Arc::new(View::new(Map::new(self.slots.clone())?));
            }
            message => return self.carry_out_for_ring(message),
        }
        Ok(None)
    }

    fn share(&mut self, region: &MemoryRegion, file: &OwnedFd) -> Result<()> {
        self.shared.keep_fd(file)?;
        let (gpa, user) = (Gpa(region.guest_addr), UserAddr(region.user_addr));
        self.slots.push(Slot::map(file, region.mmap_offset, gpa, user, region.size)?);
        Ok(())
    }

    fn check(&self, holds: bool, otherwise: &str) {
        if !holds {
            self.shared.faults().push(otherwise.to_owned());
        }
    }

    fn carry_out_for_ring(&mut self, message: Message) -> Result<Option<Reply>> {
        match message {
            Message::SetVringNum(VringState { index, num }) => {
                self.ring_setup(index).size = u16::try_from(num)?
            }
            Message::SetVringBase(VringState { index, num }) => self.ring_setup(index).base = num as u16,
            Message::SetVringAddr(addr) => {
                self.ring_setup(addr.index).addresses = Addresses {
                    desc: UserAddr(addr.desc_addr),
                    avail: UserAddr(addr.avail_addr),
                    used: UserAddr(addr.used_addr),
                    log: None,
                };
            }
            Message::SetVringCall(vring) => {
                vring.fd.iter().try_for_each(|fd| self.shared.keep_fd(fd))?;
                self.ring_setup(vring.index.into()).call = vring.fd;
            }
            Message::SetVringErr(vring) => {
                vring.fd.iter().try_for_each(|fd| self.shared.keep_fd(fd))?;
                self.ring_setup(vring.index.into()).err = vring.fd;
            }
            Message::SetVringKick(vring) => {
                vring.fd.iter().try_for_each(|fd| self.shared.keep_fd(fd))?;
                self.ring_setup(vring.index.into()).kick = vring.fd;
            }
            Message::SetVringEnable { index, enable } => {
                self.ring_setup(index).enabled = enable;
                self.start(index)?;
            }
            Message::GetVringBase { index } => {
                let num = self.rings.remove(&index).map_or(0, |ring| ring.base());
                return Ok(Some(Reply::VringBase(VringState { index, num })));
            }
            other => bail!("the driver must not send {other:?}"),
        }
        Ok(None)
    }

    fn ring_setup(&mut self, index: u32) -> &mut RingSetup {
        self.ring_setups.entry(index).or_default()
    }

    fn start(&mut self, index: u32) -> Result<()> {
        let features = self.features;
        let RingSetup { size, base, addresses, kick, call, err, enabled } = self.ring_setup(index);
        let (size, base, addresses) = (*size, *base, *addresses);
        let has = |feature| features.contains(feature);
        let (event_idx, indirect) = (has(Features::EVENT_IDX), has(Features::INDIRECT_DESC));
        let options = match has(Features::RING_PACKED) {
            true => Options::packed(size, event_idx, indirect),
            false => Options::new(size, event_idx, indirect),
        };
        let options = options?.with_in_order(has(Features::IN_ORDER));
        ensure!(*enabled, "disabled");
        let kick = kick.take().context("no kick")?;
        let events = Events { kick, call: call.take(), err: err.take() };
        let mut ring = Ring::new(&self.view, &addresses, options, base, events)?;
        // A device looks at a ring when it starts, without a kick.
        match &mut self.chaos {
            Some(chaos) => chaos.look(&mut ring, self.shared)?,
            None => ring.look(self.shared)?,
        }
        ring.call();
        self.rings.insert(index, ring);
        Ok(())
    }
}

/// Sends bytes. The descriptors go with the first byte.
fn send_with(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
    if !bytes.is_empty() {
        let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        ensure!(sent == bytes.len(), "the socket is full");
    }
    Ok(())
}
