//! A vhost-user-blk front-end: the messages, each a step of its own, and bytes that the protocol forbids.

pub mod inflight;
pub mod iommu;
pub mod log;
pub mod machine;
pub mod served;
pub mod state;

use std::io::{ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use kickless_spec::blk;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest as Code, ProtocolFeatures};
use kickless_vhost_user::{
    Channel, Config, Error, FrontendMessage as Message, Header, MemoryRegion, Reply, VringAddr, VringFd,
    VringState, Wait,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use zerocopy::{FromZeros, IntoBytes};

use crate::driver::Queue;
use crate::driver::memory::Ram;

/// Safety net for everything that a back-end does in a moment.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The protocol features that this front-end uses where they are offered.
const PROTOCOL: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::LOG_SHMFD)
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::INFLIGHT_SHMFD)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(ProtocolFeatures::DEVICE_STATE);

/// How a back-end took a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It said yes.
    Done,
    /// It said no.
    Refused,
    /// It dropped the connection.
    Dropped,
}

/// A connection to a back-end.
pub struct Frontend {
    requester: kickless_vhost_user::Frontend,
    /// The same socket, for what the requester would not send or receive.
    socket: UnixStream,
    channel: Channel,
    offered: Features,
    features: Features,
    protocol: ProtocolFeatures,
}

impl Frontend {
    /// Connects, once somebody listens there.
    ///
    /// # Errors
    /// Nobody does in time.
    pub fn connect(path: &Path) -> Result<Frontend> {
        let deadline = Instant::now() + LIMIT;
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(error)
                    if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
                        && Instant::now() < deadline =>
                {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
            }
        };
        Ok(Frontend {
            requester: kickless_vhost_user::Frontend::new(socket.try_clone()?),
            channel: Channel::new(socket.try_clone()?),
            socket,
            offered: Features::empty(),
            features: Features::empty(),
            protocol: ProtocolFeatures::empty(),
        })
    }

    /// Negotiates: of `wanted`, what is offered, and the protocol features that this front-end uses.
    ///
    /// # Errors
    /// The back-end does not answer, or refuses what it offered.
    pub fn negotiate(&mut self, wanted: Features) -> Result<()> {
        self.offered = Features::from_bits_retain(self.number(&Message::GetFeatures)?);
        ensure!(self.offered.contains(Features::PROTOCOL_FEATURES), "no protocol features are offered");
        let offered = ProtocolFeatures::from_bits_retain(self.number(&Message::GetProtocolFeatures)?);
        self.send(&Message::SetProtocolFeatures(offered & PROTOCOL))?;
        self.protocol = offered & PROTOCOL;
        self.order(&Message::SetOwner)?;
        self.set_features((wanted | Features::PROTOCOL_FEATURES) & self.offered)
    }

    /// The features that were offered.
    pub fn offered(&self) -> Features {
        self.offered
    }

    /// The features that were taken.
    pub fn features(&self) -> Features {
        self.features
    }

    /// SET_FEATURES with exactly these.
    ///
    /// # Errors
    /// They are refused.
    pub fn set_features(&mut self, features: Features) -> Result<()> {
        self.order(&Message::SetFeatures(features))?;
        self.features = features;
        Ok(())
    }

    /// Sends a message without asking for an acknowledgement.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn send(&mut self, message: &Message) -> Result<()> {
        self.requester.send(message, false, &limit())?;
        Ok(())
    }

    /// Sends a message and returns its reply.
    ///
    /// # Errors
    /// The message has none, or the connection is gone.
    pub fn ask(&mut self, message: &Message) -> Result<Reply> {
        let reply = self.requester.call(message, self.acknowledges(), &limit());
        reply.with_context(|| format!("{message:?}"))?.with_context(|| format!("{message:?} has no reply"))
    }

    /// The number with which a message is answered.
    ///
    /// # Errors
    /// It is answered otherwise, or not at all.
    pub fn number(&mut self, message: &Message) -> Result<u64> {
        match self.ask(message)? {
            Reply::U64(number) => Ok(number),
            other => bail!("{message:?} is answered by {other:?}"),
        }
    }

    /// Sends a message that must be carried out.
    ///
    /// # Errors
    /// It is refused.
    pub fn order(&mut self, message: &Message) -> Result<()> {
        match self.attempt(message)? {
            Answer::Done => Ok(()),
            answer => bail!("{message:?}: {answer:?}"),
        }
    }

    /// Sends a message and tells how the back-end takes it. Without REPLY_ACK, one that has no reply of its own counts as
    /// carried out.
    ///
    /// # Errors
    /// There is no answer.
    pub fn attempt(&mut self, message: &Message) -> Result<Answer> {
        match self.requester.call(message, self.acknowledges(), &limit()) {
            Ok(Some(Reply::U64(0)) | None) => Ok(Answer::Done),
            Ok(Some(Reply::U64(_) | Reply::Config(None))) => Ok(Answer::Refused),
            Ok(Some(Reply::Inflight(_, None) | Reply::Userfault(None) | Reply::SharedObject(None))) => {
                Ok(Answer::Refused)
            }
            Ok(Some(Reply::DeviceState(kickless_vhost_user::DeviceStateReply::Refused(_)))) => {
                Ok(Answer::Refused)
            }
            Ok(Some(_)) => Ok(Answer::Done),
            Err(Error::Closed) => Ok(Answer::Dropped),
            Err(error) => Err(anyhow!(error).context(format!("{message:?}"))),
        }
    }

    fn acknowledges(&self) -> bool {
        self.protocol.contains(ProtocolFeatures::REPLY_ACK)
    }

    /// Whether the reply to `code`, which was asked for with [`Frontend::send`], comes within `time`.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn replies_within(&mut self, code: Code, time: Duration) -> Result<bool> {
        match self.requester.recv_reply(code, &Wait::FOREVER.at_most(time)) {
            Ok(_) => Ok(true),
            Err(Error::Interrupted) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a head, whatever it says, and bytes and descriptors with it, whatever their number.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn send_raw(&mut self, header: &Header, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = [&header.to_bytes(), payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        ensure!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        self.socket.write_all(bytes.get(sent..).unwrap_or_default())?;
        Ok(())
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.socket.write_all(bytes)?)
    }

    /// How the back-end took what was sent raw: the number in its reply, or the end of the connection.
    ///
    /// # Errors
    /// There is no answer.
    pub fn answer_to_raw(&mut self) -> Result<Answer> {
        match self.channel.recv(&limit()) {
            Ok(Some(frame)) if frame.payload.iter().all(|byte| *byte == 0) => Ok(Answer::Done),
            Ok(Some(_)) => Ok(Answer::Refused),
            Ok(None) => Ok(Answer::Dropped),
            Err(error) => Err(error.into()),
        }
    }

    /// The configuration space.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn config(&mut self) -> Result<blk::Config> {
        // The part that every virtio-blk device has had for long: what old back-ends refuse lies behind it.
        let data = vec![0; std::mem::offset_of!(blk::Config, max_secure_erase_sectors)];
        match self.ask(&Message::GetConfig(Config { data, ..Config::default() }))? {
            Reply::Config(Some(config)) => {
                let mut space = blk::Config::new_zeroed();
                let known = config.data.len().min(size_of_val(&space));
                space.as_mut_bytes()[..known].copy_from_slice(&config.data[..known]);
                Ok(space)
            }
            _ => bail!("GET_CONFIG is refused"),
        }
    }

    /// Switches `writeback` in the configuration space.
    ///
    /// # Errors
    /// It is refused.
    pub fn set_writeback(&mut self, writeback: bool) -> Result<()> {
        let (offset, data) = (blk::CONFIG_WRITEBACK as u32, vec![writeback.into()]);
        self.order(&Message::SetConfig(Config { offset, data, ..Config::default() }))
    }

    /// SET_MEM_TABLE: shares these, and nothing else.
    ///
    /// # Errors
    /// It is refused.
    pub fn share(&mut self, memory: &[&Ram]) -> Result<()> {
        let regions = memory.iter().map(|ram| ram.region_and_file());
        self.order(&Message::SetMemTable(regions.collect::<Result<_>>()?))
    }

    /// ADD_MEM_REG.
    ///
    /// # Errors
    /// It is refused.
    pub fn add(&mut self, ram: &Ram) -> Result<()> {
        let (region, file) = ram.region_and_file()?;
        self.order(&Message::AddMemReg(region, file))
    }

    /// REM_MEM_REG.
    ///
    /// # Errors
    /// It is refused.
    pub fn remove(&mut self, region: MemoryRegion) -> Result<()> {
        self.order(&Message::RemMemReg(region))
    }

    /// Tells everything about a queue, and starts and enables it.
    ///
    /// # Errors
    /// Something is refused.
    pub fn start(&mut self, queue: &Queue) -> Result<()> {
        let index = queue.index().into();
        self.order(&Message::SetVringNum(VringState { index, num: queue.size().into() }))?;
        self.order(&Message::SetVringBase(VringState { index, num: queue.base() }))?;
        self.order(&Message::SetVringAddr(addresses(queue)))?;
        self.set_call(queue)?;
        self.order(&Message::SetVringErr(descriptor(queue, queue.err().as_fd())?))?;
        self.set_kick(queue)?;
        self.enable(queue, true)
    }

    /// SET_VRING_CALL with the queue's.
    ///
    /// # Errors
    /// It is refused.
    pub fn set_call(&mut self, queue: &Queue) -> Result<()> {
        self.order(&Message::SetVringCall(descriptor(queue, queue.call().as_fd())?))
    }

    /// SET_VRING_KICK with the queue's.
    ///
    /// # Errors
    /// It is refused.
    pub fn set_kick(&mut self, queue: &Queue) -> Result<()> {
        self.order(&Message::SetVringKick(descriptor(queue, queue.kick_fd().as_fd())?))
    }

    /// SET_VRING_ENABLE.
    ///
    /// # Errors
    /// It is refused.
    pub fn enable(&mut self, queue: &Queue, enable: bool) -> Result<()> {
        self.order(&Message::SetVringEnable { index: queue.index().into(), enable })
    }

    /// GET_VRING_BASE: stops a queue, and returns the index of the first available entry that was not taken; of a packed ring,
    /// its place. Starting the queue again goes on from there.
    ///
    /// # Errors
    /// It is refused.
    pub fn stop(&mut self, queue: &mut Queue) -> Result<u16> {
        match self.ask(&Message::GetVringBase { index: queue.index().into() })? {
            Reply::VringBase(VringState { index, num }) if index == u32::from(queue.index()) => {
                queue.set_base(num);
                if queue.places().is_none() {
                    return Ok(u16::try_from(num)?);
                }
                let (taken, used) = (num as u16, (num >> 16) as u16);
                ensure!(taken == used, "it stops with {taken:#x} taken and {used:#x} used");
                Ok(taken)
            }
            other => bail!("GET_VRING_BASE is answered by {other:?}"),
        }
    }
}

fn limit() -> Wait<'static> {
    Wait::FOREVER.at_most(LIMIT)
}

/// SET_VRING_ADDR of a queue.
pub fn addresses(queue: &Queue) -> VringAddr {
    let [desc_addr, avail_addr, used_addr] = queue.user_addresses();
    VringAddr { index: queue.index().into(), desc_addr, avail_addr, used_addr, ..VringAddr::default() }
}

/// A descriptor of a queue, as messages carry it.
///
/// # Errors
/// The process is out of descriptors, or the queue's index does not fit.
pub fn descriptor(queue: &Queue, fd: BorrowedFd<'_>) -> Result<VringFd> {
    let fd: OwnedFd = fd.try_clone_to_owned()?;
    Ok(VringFd { index: u8::try_from(queue.index())?, fd: Some(fd) })
}
