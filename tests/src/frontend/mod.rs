//! A vhost-user-blk front-end with one method per message. It can also send bytes that the protocol
//! forbids.

pub mod card;
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

/// Time limit for steps that take a back-end a moment.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Protocol features that this front-end uses if the back-end offers them.
const PROTOCOL: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::LOG_SHMFD)
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::MTU)
    .union(ProtocolFeatures::INFLIGHT_SHMFD)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(ProtocolFeatures::DEVICE_STATE);

/// The back-end's answer to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The back-end accepted it.
    Done,
    /// The back-end refused it.
    Refused,
    /// The back-end closed the connection.
    Dropped,
}

/// A connection to a back-end.
pub struct Frontend {
    requester: kickless_vhost_user::Frontend,
    /// The same socket, for messages that the requester does not send or receive.
    socket: UnixStream,
    channel: Channel,
    offered: Features,
    features: Features,
    protocol: ProtocolFeatures,
}

impl Frontend {
    /// Connects as soon as a back-end listens.
    ///
    /// # Errors
    /// No back-end listens in time.
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

    /// Acknowledges the features of `wanted` that the back-end offers, and the protocol features that this
    /// front-end uses.
    ///
    /// # Errors
    /// The back-end does not answer, or refuses a feature that it offered.
    pub fn negotiate(&mut self, wanted: Features) -> Result<()> {
        self.negotiate_with(wanted, ProtocolFeatures::empty())
    }

    /// Does the same as [`Frontend::negotiate`], with these protocol features beside the usual ones.
    ///
    /// # Errors
    /// The back-end does not answer, refuses a feature that it offered, or does not offer one of `further`.
    pub fn negotiate_with(&mut self, wanted: Features, further: ProtocolFeatures) -> Result<()> {
        self.offered = Features::from_bits_retain(self.number(&Message::GetFeatures)?);
        ensure!(
            self.offered.contains(Features::PROTOCOL_FEATURES),
            "the back-end offers no protocol features"
        );
        let offered = ProtocolFeatures::from_bits_retain(self.number(&Message::GetProtocolFeatures)?);
        ensure!(offered.contains(further), "the back-end does not offer {:?}", further - offered);
        self.protocol = offered & (PROTOCOL | further);
        self.send(&Message::SetProtocolFeatures(self.protocol))?;
        self.order(&Message::SetOwner)?;
        self.set_features((wanted | Features::PROTOCOL_FEATURES) & self.offered)
    }

    /// Returns the features that the back-end offered.
    pub fn offered(&self) -> Features {
        self.offered
    }

    /// Returns the features that this front-end acknowledged.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Sends SET_FEATURES with exactly these features.
    ///
    /// # Errors
    /// They are refused.
    pub fn set_features(&mut self, features: Features) -> Result<()> {
        self.order(&Message::SetFeatures(features))?;
        self.features = features;
        Ok(())
    }

    /// Sends a message without a request for an acknowledgement.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send(&mut self, message: &Message) -> Result<()> {
        self.requester.send(message, false, &limit())?;
        Ok(())
    }

    /// Sends a message and returns its reply.
    ///
    /// # Errors
    /// The message has no reply, or the connection is closed.
    pub fn ask(&mut self, message: &Message) -> Result<Reply> {
        let reply = self.requester.call(message, self.acknowledges(), &limit());
        reply.with_context(|| format!("{message:?}"))?.with_context(|| format!("{message:?} has no reply"))
    }

    /// Sends a message and returns the number in its reply.
    ///
    /// # Errors
    /// The back-end sends another answer, or none.
    pub fn number(&mut self, message: &Message) -> Result<u64> {
        match self.ask(message)? {
            Reply::U64(number) => Ok(number),
            other => bail!("the answer to {message:?} is {other:?}"),
        }
    }

    /// Sends a message that the back-end must accept.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn order(&mut self, message: &Message) -> Result<()> {
        match self.attempt(message)? {
            Answer::Done => Ok(()),
            answer => bail!("{message:?}: {answer:?}"),
        }
    }

    /// Sends a message and returns the back-end's answer. Without REPLY_ACK, a message without a reply of
    /// its own counts as accepted.
    ///
    /// # Errors
    /// There is no answer.
    pub fn attempt(&mut self, message: &Message) -> Result<Answer> {
        match self.requester.call(message, self.acknowledges(), &limit()) {
            Ok(Some(Reply::U64(0)) | None) => Ok(Answer::Done),
            Ok(Some(Reply::U64(_) | Reply::Config(None) | Reply::Inflight(_, None))) => Ok(Answer::Refused),
            Ok(Some(Reply::Log { mmap_size: 0, .. })) => Ok(Answer::Refused),
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

    /// Returns whether the reply to `code` comes within `time`. [`Frontend::send`] has sent the request.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn replies_within(&mut self, code: Code, time: Duration) -> Result<bool> {
        match self.requester.recv_reply(code, &Wait::FOREVER.at_most(time)) {
            Ok(_) => Ok(true),
            Err(Error::Interrupted) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends any header with any bytes and any number of descriptors.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send_raw(&mut self, header: &Header, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_part(&[&header.to_bytes(), payload].concat(), fds)
    }

    /// Sends any bytes and any number of descriptors.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send_part(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        ensure!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
        let sent = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        self.socket.write_all(bytes.get(sent..).unwrap_or_default())?;
        Ok(())
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.socket.write_all(bytes)?)
    }

    /// Returns the back-end's answer to raw bytes: the number in its reply, or the end of the connection. A
    /// reply without payload refuses a request for a file descriptor.
    ///
    /// # Errors
    /// There is no answer.
    pub fn answer_to_raw(&mut self) -> Result<Answer> {
        match self.channel.recv(&limit()) {
            Ok(Some(frame)) if !frame.payload.is_empty() && frame.payload.iter().all(|byte| *byte == 0) => {
                Ok(Answer::Done)
            }
            Ok(Some(_)) => Ok(Answer::Refused),
            Ok(None) => Ok(Answer::Dropped),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the configuration space.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn config(&mut self) -> Result<blk::Config> {
        // Reads only the part that old back-ends have, too. They refuse to read beyond it.
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

    /// Sets `writeback` in the configuration space.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_writeback(&mut self, writeback: bool) -> Result<()> {
        let (offset, data) = (blk::CONFIG_WRITEBACK as u32, vec![writeback.into()]);
        self.order(&Message::SetConfig(Config { offset, data, ..Config::default() }))
    }

    /// Sends SET_MEM_TABLE with exactly these regions.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn share(&mut self, memory: &[&Ram]) -> Result<()> {
        let regions = memory.iter().map(|ram| ram.region_and_file());
        self.order(&Message::SetMemTable(regions.collect::<Result<_>>()?))
    }

    /// Sends ADD_MEM_REG.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn add(&mut self, ram: &Ram) -> Result<()> {
        let (region, file) = ram.region_and_file()?;
        self.order(&Message::AddMemReg(region, file))
    }

    /// Sends REM_MEM_REG.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn remove(&mut self, region: MemoryRegion) -> Result<()> {
        self.order(&Message::RemMemReg(region))
    }

    /// Sends all messages that set up a queue, start it and enable it.
    ///
    /// # Errors
    /// The back-end refuses a message.
    pub fn start(&mut self, queue: &Queue) -> Result<()> {
        self.start_disabled(queue)?;
        self.enable(queue, true)
    }

    /// Sends the whole set-up of a queue, and starts it. A queue that is new stays disabled.
    ///
    /// # Errors
    /// Something is refused.
    pub fn start_disabled(&mut self, queue: &Queue) -> Result<()> {
        let index = queue.index().into();
        self.order(&Message::SetVringNum(VringState { index, num: queue.size().into() }))?;
        self.order(&Message::SetVringBase(VringState { index, num: queue.base() }))?;
        self.order(&Message::SetVringAddr(addresses(queue)))?;
        self.set_call(queue)?;
        self.order(&Message::SetVringErr(descriptor(queue, queue.err().as_fd())?))?;
        self.set_kick(queue)
    }

    /// Sends SET_VRING_CALL with the queue's eventfd.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_call(&mut self, queue: &Queue) -> Result<()> {
        self.order(&Message::SetVringCall(descriptor(queue, queue.call().as_fd())?))
    }

    /// Sends SET_VRING_KICK with the queue's eventfd.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn set_kick(&mut self, queue: &Queue) -> Result<()> {
        self.order(&Message::SetVringKick(descriptor(queue, queue.kick_fd().as_fd())?))
    }

    /// Sends SET_VRING_ENABLE.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn enable(&mut self, queue: &Queue, enable: bool) -> Result<()> {
        self.order(&Message::SetVringEnable { index: queue.index().into(), enable })
    }

    /// Sends GET_VRING_BASE, which stops a queue. Returns the index of the first available entry that the
    /// device has not taken, or for a packed ring its position. The queue continues there when it starts
    /// again.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn stop(&mut self, queue: &mut Queue) -> Result<u16> {
        self.stop_by(queue, &Message::GetVringBase { index: queue.index().into() })
    }

    /// Sends GET_VRING_BASE_SKIP_DRAIN, which stops a queue and leaves requests in the in-flight buffer.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn suspend(&mut self, queue: &mut Queue) -> Result<u16> {
        self.stop_by(queue, &Message::GetVringBaseSkipDrain { index: queue.index().into() })
    }

    fn stop_by(&mut self, queue: &mut Queue, message: &Message) -> Result<u16> {
        match self.ask(message)? {
            Reply::VringBase(VringState { index, num }) if index == u32::from(queue.index()) => {
                queue.set_base(num);
                if queue.positions().is_none() {
                    return Ok(u16::try_from(num)?);
                }
                let (taken, used) = (num as u16, (num >> 16) as u16);
                ensure!(taken == used, "the ring stopped with {taken:#x} taken and {used:#x} used");
                Ok(taken)
            }
            other => bail!("the answer to {message:?} is {other:?}"),
        }
    }
}

fn limit() -> Wait<'static> {
    Wait::FOREVER.at_most(LIMIT)
}

/// Returns the SET_VRING_ADDR argument of a queue.
pub fn addresses(queue: &Queue) -> VringAddr {
    let [desc_addr, avail_addr, used_addr] = queue.user_addresses();
    VringAddr { index: queue.index().into(), desc_addr, avail_addr, used_addr, ..VringAddr::default() }
}

/// Returns a descriptor of a queue in the form of messages.
///
/// # Errors
/// The process is out of descriptors, or the queue's index does not fit.
pub fn descriptor(queue: &Queue, fd: BorrowedFd<'_>) -> Result<VringFd> {
    let fd: OwnedFd = fd.try_clone_to_owned()?;
    Ok(VringFd { index: u8::try_from(queue.index())?, fd: Some(fd) })
}
