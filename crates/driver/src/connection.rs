//! The front-end's side of vhost-user: one connection to a back-end, from the first message to the last.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures as Protocol;
use kickless_vhost_user::{
    BackendMessage, Config, Error as Wire, Frontend, FrontendMessage as Message, FrontendResponder, Received,
    Reply, RequestMessage as _, VringAddr, VringFd, VringState, Wait,
};
use rustix::net::{Shutdown, shutdown};
use zerocopy::{FromBytes, IntoBytes};

use crate::choice::Choice;
use crate::error::Error;
use crate::event::Event;
use crate::memory::{Region, TABLE_MAX};

/// The protocol features that the driver uses if they are offered.
const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIGURE_MEM_SLOTS);
/// The number of messages to read from the back-end's own channel before other work has its turn.
const BACKEND_MESSAGES_MAX: usize = 32;

/// The wishes of a driver for its back-end.
#[derive(Clone, Copy)]
pub(crate) struct Wishes<'a> {
    pub(crate) socket: &'a Path,
    pub(crate) reply_timeout: Duration,
    pub(crate) packed: Choice,
    pub(crate) event_idx: Choice,
    pub(crate) indirect: Choice,
    pub(crate) in_order: Choice,
    /// The protocol features of the kind of device that the driver uses if they are offered.
    pub(crate) protocol: Protocol,
    /// The driver cannot do without the configuration space.
    pub(crate) needs_config: bool,
    /// The features that the driver does not use if there is no configuration space.
    pub(crate) of_config: Features,
    /// Chooses the features of the kind of device from those that are offered.
    pub(crate) device_features: &'a dyn Fn(Features) -> Result<Features, Error>,
}

/// The size, format and addresses of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSetup {
    pub(crate) size: u16,
    pub(crate) packed: bool,
    pub(crate) desc: u64,
    pub(crate) driver: u64,
    pub(crate) device: u64,
}

/// A connection after negotiation.
#[derive(Debug)]
pub(crate) struct Connection {
    frontend: Frontend,
    requests: Option<FrontendResponder>,
    pub(crate) features: Features,
    protocol: Protocol,
    /// The number of queues that the back-end has.
    pub(crate) queues_max: usize,
    /// The number of memory regions that the back-end accepts.
    pub(crate) regions_max: usize,
    limit: Duration,
    deadline: Option<Instant>,
}

impl Connection {
    /// Connects, with retries until the deadline, and negotiates.
    pub(crate) fn open(wishes: Wishes<'_>, deadline: Instant) -> Result<Self, Error> {
        let mut connection = Self::new(wishes, connect_by(wishes.socket, deadline)?);
        connection.negotiate(wishes, None)?;
        Ok(connection)
    }

    /// Connects again, in one attempt, and requires the features of the first connection.
    ///
    /// Until [`Connection::clear_deadline`], the connection waits for no reply beyond the deadline.
    pub(crate) fn open_again(wishes: Wishes<'_>, deadline: Instant, known: Features) -> Result<Self, Error> {
        let mut connection = Self::new(wishes, connect_by(wishes.socket, Instant::now())?);
        connection.deadline = Some(deadline);
        connection.negotiate(wishes, Some(known))?;
        Ok(connection)
    }

    fn new(wishes: Wishes<'_>, socket: OwnedFd) -> Self {
        Self {
            frontend: Frontend::new(socket),
            requests: None,
            features: Features::empty(),
            protocol: Protocol::empty(),
            queues_max: 1,
            regions_max: TABLE_MAX,
            limit: wishes.reply_timeout,
            deadline: None,
        }
    }

    /// Removes the deadline.
    pub(crate) fn clear_deadline(&mut self) {
        self.deadline = None;
    }

    fn negotiate(&mut self, wishes: Wishes<'_>, known: Option<Features>) -> Result<(), Error> {
        let offered = Features::from_bits_retain(self.number(&Message::GetFeatures)?);
        let mut features = match known {
            None => choose(offered, wishes)?,
            Some(known) if offered.contains(known) => known,
            Some(_) => return Err(Error::Incompatible { what: "fewer features" }),
        };
        let offered = Protocol::from_bits_retain(self.number(&Message::GetProtocolFeatures)?);
        if wishes.needs_config && !offered.contains(Protocol::CONFIG) {
            return Err(Error::NotOffered { what: "its configuration space" });
        }
        if !offered.contains(Protocol::CONFIG) {
            features.remove(wishes.of_config);
            if known.is_some_and(|known| known != features) {
                return Err(Error::Incompatible { what: "no configuration space" });
            }
        }
        let mut wanted = (PROTOCOL | wishes.protocol) & offered;
        // Without acknowledgements, the driver cannot know whether the back-end accepted a region.
        if !offered.contains(Protocol::REPLY_ACK) {
            wanted.remove(Protocol::CONFIGURE_MEM_SLOTS);
        }
        self.command(&Message::SetProtocolFeatures(wanted))?;
        self.protocol = wanted;
        self.command(&Message::SetOwner)?;
        self.command(&Message::SetFeatures(features))?;
        self.features = features;
        if wanted.contains(Protocol::MQ) {
            self.queues_max = usize::try_from(self.number(&Message::GetQueueNum)?).unwrap_or(usize::MAX);
            if self.queues_max == 0 {
                return Err(Error::NotOffered { what: "a queue" });
            }
        }
        if wanted.contains(Protocol::CONFIGURE_MEM_SLOTS) {
            let slots = self.number(&Message::GetMaxMemSlots)?;
            self.regions_max = usize::try_from(slots).unwrap_or(usize::MAX).max(1);
        }
        if wanted.contains(Protocol::BACKEND_REQ) {
            let (ours, theirs) =
                UnixStream::pair().map_err(|source| Error::Os { what: "a socket pair", source })?;
            self.command(&Message::SetBackendReqFd(theirs.into()))?;
            self.requests = Some(FrontendResponder::new(ours));
        }
        Ok(())
    }

    /// Returns whether this protocol feature was negotiated.
    pub(crate) fn has(&self, feature: Protocol) -> bool {
        self.protocol.contains(feature)
    }

    /// Reads the first `needs` bytes of the configuration space. All fields after them are zero.
    pub(crate) fn config<T: FromBytes + IntoBytes>(&mut self, needs: usize) -> Result<T, Error> {
        let ask = Config { data: vec![0; needs], ..Config::default() };
        match self.query(&Message::GetConfig(ask))? {
            Reply::Config(Some(config)) => {
                let mut space = T::new_zeroed();
                let len = config.data.len();
                if len < needs {
                    return Err(Error::ConfigTooShort { len, needs });
                }
                if config.offset != 0 || len > needs || config.spare > 0 {
                    return Err(Error::WrongAnswer { request: "GET_CONFIG" });
                }
                if let Some(place) = space.as_mut_bytes().get_mut(..len) {
                    place.copy_from_slice(&config.data);
                }
                Ok(space)
            }
            Reply::Config(None) => Err(Error::Refused { request: "GET_CONFIG" }),
            _ => Err(Error::WrongAnswer { request: "GET_CONFIG" }),
        }
    }

    /// Writes these bytes at `offset` of the configuration space.
    pub(crate) fn set_config(&mut self, offset: u32, data: Vec<u8>) -> Result<(), Error> {
        self.command(&Message::SetConfig(Config { offset, data, ..Config::default() }))
    }

    /// Tells the back-end the MTU of a network card.
    pub(crate) fn set_mtu(&mut self, mtu: u16) -> Result<(), Error> {
        self.command(&Message::NetSetMtu(mtu.into()))
    }

    /// Returns whether the back-end accepts single regions, without the whole table.
    pub(crate) fn has_slots(&self) -> bool {
        self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS)
    }

    /// Shares all regions with the back-end. A back-end without slots replaces its table; one with slots must
    /// not know any yet.
    pub(crate) fn share(&mut self, regions: &[Arc<Region>]) -> Result<(), Error> {
        if self.has_slots() {
            return regions.iter().try_for_each(|region| self.add(region));
        }
        let regions = regions.iter().map(|region| Ok((region.message(), region.duplicate()?)));
        self.command(&Message::SetMemTable(regions.collect::<Result<_, Error>>()?))
    }

    /// Shares one more region.
    pub(crate) fn add(&mut self, region: &Region) -> Result<(), Error> {
        self.command(&Message::AddMemReg(region.message(), region.duplicate()?))
    }

    /// Removes a region.
    pub(crate) fn remove(&mut self, region: &Region) -> Result<(), Error> {
        self.command(&Message::RemMemReg(region.message()))
    }

    /// Starts a queue at its beginning.
    pub(crate) fn start(
        &mut self,
        queue: u8,
        ring: &RingSetup,
        kick: &Event,
        call: &Event,
        error: &Event,
    ) -> Result<(), Error> {
        let index = u32::from(queue);
        // A packed ring has two indices, each with its wrap counter, which begins at one.
        let base = if ring.packed { 0x8000_8000 } else { 0 };
        self.command(&Message::SetVringNum(VringState { index, num: ring.size.into() }))?;
        self.command(&Message::SetVringBase(VringState { index, num: base }))?;
        self.command(&Message::SetVringAddr(VringAddr {
            index,
            desc_addr: ring.desc,
            avail_addr: ring.driver,
            used_addr: ring.device,
            ..VringAddr::default()
        }))?;
        let descriptor =
            |event: &Event| Ok::<_, Error>(VringFd { index: queue, fd: Some(event.duplicate()?) });
        self.command(&Message::SetVringCall(descriptor(call)?))?;
        self.command(&Message::SetVringErr(descriptor(error)?))?;
        self.command(&Message::SetVringKick(descriptor(kick)?))?;
        self.command(&Message::SetVringEnable { index, enable: true })
    }

    /// Stops a queue. Nothing of it is in flight when this returns.
    pub(crate) fn stop(&mut self, queue: u8) -> Result<(), Error> {
        match self.query(&Message::GetVringBase { index: queue.into() })? {
            Reply::VringBase(_) => Ok(()),
            _ => Err(Error::WrongAnswer { request: "GET_VRING_BASE" }),
        }
    }

    /// Returns the channel for the back-end's own messages, the first time.
    pub(crate) fn take_requests(&mut self) -> Option<FrontendResponder> {
        self.requests.take()
    }

    /// Sends a message and returns its reply.
    fn query(&mut self, message: &Message) -> Result<Reply, Error> {
        let request = message.code().name();
        let reply = self.exchange(message)?;
        reply.ok_or(Error::WrongAnswer { request })
    }

    fn number(&mut self, message: &Message) -> Result<u64, Error> {
        match self.query(message)? {
            Reply::U64(number) => Ok(number),
            _ => Err(Error::WrongAnswer { request: message.code().name() }),
        }
    }

    /// Sends a message and waits for its acknowledgement. Without acknowledgements, assumes success.
    fn command(&mut self, message: &Message) -> Result<(), Error> {
        match self.exchange(message)? {
            None | Some(Reply::U64(0)) => Ok(()),
            Some(Reply::U64(_)) => Err(Error::Refused { request: message.code().name() }),
            Some(_) => Err(Error::WrongAnswer { request: message.code().name() }),
        }
    }

    fn exchange(&mut self, message: &Message) -> Result<Option<Reply>, Error> {
        let request = message.code().name();
        let acknowledged = self.protocol.contains(Protocol::REPLY_ACK);
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = left.map_or(self.limit, |left| left.min(self.limit));
        let wait = Wait::FOREVER.at_most(limit);
        self.frontend.call(message, acknowledged, &wait).map_err(|source| match source {
            Wire::Interrupted | Wire::SendInterrupted { .. } => Error::NoAnswer { request, limit },
            source => Error::Protocol { request, source },
        })
    }
}

/// Ends the connection, even if a process that forked has a copy of it: back-ends serve one at a time.
impl Drop for Connection {
    fn drop(&mut self) {
        // Fails only if the back-end has ended it.
        let _ = shutdown(&self.frontend, Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.frontend.as_fd()
    }
}

/// Serves the back-end's own channel without waiting. Returns whether the back-end reported a change of the
/// configuration space.
///
/// # Errors
/// The channel cannot be used any more.
pub(crate) fn serve(requests: &mut FrontendResponder) -> Result<bool, Wire> {
    let mut changed = false;
    for _ in 0..BACKEND_MESSAGES_MAX {
        match requests.recv(&Wait::never()) {
            Ok(Some(received)) if matches!(received.message, BackendMessage::ConfigChange) => {
                changed = true;
                requests.ack(&received.header, true, &Wait::never())?;
            }
            Ok(Some(Received { header, .. })) | Err(Wire::Rejected { header, .. }) => {
                requests.refuse(&header, &Wait::never())?;
            }
            Err(Wire::Interrupted) => return Ok(changed),
            Ok(None) => return Err(Wire::Closed),
            Err(error) => return Err(error),
        }
    }
    Ok(changed)
}

/// Connects without sleeping in the kernel: a listener with a full backlog could block us there.
fn connect_by(path: &Path, deadline: Instant) -> Result<OwnedFd, Error> {
    let mut pause = Duration::from_millis(1);
    loop {
        match kickless_opener::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(error) if is_absent(&error) && Instant::now() < deadline => {}
            Err(source) => return Err(Error::Connect { path: path.to_owned(), source }),
        }
        thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Returns whether a back-end may listen there a moment later.
fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, NotFound, WouldBlock};
    matches!(error.kind(), NotFound | ConnectionRefused | WouldBlock | Interrupted)
}

/// Chooses the features to use from those that are offered.
fn choose(offered: Features, wishes: Wishes<'_>) -> Result<Features, Error> {
    for (feature, what) in [
        (Features::VERSION_1, "VIRTIO_F_VERSION_1"),
        (Features::PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES"),
    ] {
        if !offered.contains(feature) {
            return Err(Error::NotOffered { what });
        }
    }
    let mut features = Features::VERSION_1 | Features::PROTOCOL_FEATURES;
    features |= (wishes.device_features)(offered)?;
    for (choice, feature, what) in [
        (wishes.packed, Features::RING_PACKED, "VIRTIO_F_RING_PACKED"),
        (wishes.event_idx, Features::EVENT_IDX, "VIRTIO_F_EVENT_IDX"),
        (wishes.indirect, Features::INDIRECT_DESC, "VIRTIO_F_INDIRECT_DESC"),
        (wishes.in_order, Features::IN_ORDER, "VIRTIO_F_IN_ORDER"),
    ] {
        features.set(feature, choice.decide(offered.contains(feature), what)?);
    }
    Ok(features)
}

/// The longest duration that is used. Longer ones make no difference, and clocks cannot overflow with this
/// one.
const TIME_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the time after `time`.
pub(crate) fn deadline_after(time: Duration) -> Instant {
    Instant::now() + time.min(TIME_MAX)
}
