//! Requests of the front-end.

use std::os::fd::OwnedFd;

use kickless_spec::features::Features;
use kickless_spec::vhost_user::{
    self as wire, FrontendRequest as Code, ProtocolFeatures, TransferDirection, TransferPhase,
};

use crate::body::{Body, Encoded, field};
use crate::error::MessageError;
use crate::message::{Expects, Refusal, RequestMessage};
use crate::payload::{
    Config, DeviceState, Inflight, Iotlb, LogBase, MemoryRegion, VringAddr, VringFd, VringState,
};
use crate::reply::{DeviceStateReply, Reply};

/// A request of the front-end. [`FrontendRequest`](Code) describes each request.
#[derive(Debug)]
#[non_exhaustive]
pub enum FrontendMessage {
    /// Replies [`Reply::U64`].
    GetFeatures,
    /// The features to use.
    SetFeatures(Features),
    /// A session starts.
    SetOwner,
    /// Deprecated.
    ResetOwner,
    /// The regions, each with its file.
    SetMemTable(Vec<(MemoryRegion, OwnedFd)>),
    /// The dirty log. Replies [`Reply::U64`] if it has a file descriptor.
    SetLogBase(LogBase),
    /// An eventfd to signal after marking.
    SetLogFd(OwnedFd),
    /// The size of a ring.
    SetVringNum(VringState),
    /// The addresses of a ring.
    SetVringAddr(VringAddr),
    /// The index at which a ring begins.
    SetVringBase(VringState),
    /// Replies [`Reply::VringBase`].
    GetVringBase {
        /// The ring to stop.
        index: u32,
    },
    /// Replies [`Reply::VringBase`]. Requests in flight stay in the in-flight buffer.
    GetVringBaseSkipDrain {
        /// The ring to stop.
        index: u32,
    },
    /// The eventfd of kicks. Without one, the ring must be polled.
    SetVringKick(VringFd),
    /// The eventfd of calls. Without one, the driver polls.
    SetVringCall(VringFd),
    /// The eventfd of errors.
    SetVringErr(VringFd),
    /// Replies [`Reply::U64`].
    GetProtocolFeatures,
    /// The protocol features to use.
    SetProtocolFeatures(ProtocolFeatures),
    /// Replies [`Reply::U64`].
    GetQueueNum,
    /// Enable or disable a ring.
    SetVringEnable {
        /// The ring.
        index: u32,
        /// Whether to enable the ring.
        enable: bool,
    },
    /// Announce the guest with this MAC address.
    SendRarp([u8; 6]),
    /// The MTU of the host in bytes.
    NetSetMtu(u64),
    /// The socket for requests of the back-end.
    SetBackendReqFd(OwnedFd),
    /// Replies [`Reply::U64`].
    IotlbMsg(Iotlb),
    /// The part to read; its bytes have no meaning. Replies [`Reply::Config`].
    GetConfig(Config),
    /// The part to write.
    SetConfig(Config),
    /// `num_queues` and `queue_size` of the requested buffer. Replies [`Reply::Inflight`].
    GetInflightFd(Inflight),
    /// The buffer, from an earlier reply to [`GetInflightFd`](Self::GetInflightFd).
    SetInflightFd(Inflight, OwnedFd),
    /// Disable all rings and reset the device.
    ResetDevice,
    /// A kick in band.
    VringKick {
        /// The ring.
        index: u32,
    },
    /// Replies [`Reply::U64`].
    GetMaxMemSlots,
    /// A region to add, and its file.
    AddMemReg(MemoryRegion, OwnedFd),
    /// A region to remove, identified by guest address, user address and size. Some front-ends send file
    /// descriptors with it, which are closed.
    RemMemReg(MemoryRegion),
    /// The transfer, and one end of the channel for it. Replies [`Reply::DeviceState`].
    SetDeviceStateFd(DeviceState, OwnedFd),
    /// Replies [`Reply::U64`].
    CheckDeviceState,
}

impl RequestMessage for FrontendMessage {
    type Code = Code;
    type Reply = Reply;

    fn code(&self) -> Code {
        match self {
            Self::GetFeatures => Code::GetFeatures,
            Self::SetFeatures(_) => Code::SetFeatures,
            Self::SetOwner => Code::SetOwner,
            Self::ResetOwner => Code::ResetOwner,
            Self::SetMemTable(_) => Code::SetMemTable,
            Self::SetLogBase(_) => Code::SetLogBase,
            Self::SetLogFd(_) => Code::SetLogFd,
            Self::SetVringNum(_) => Code::SetVringNum,
            Self::SetVringAddr(_) => Code::SetVringAddr,
            Self::SetVringBase(_) => Code::SetVringBase,
            Self::GetVringBase { .. } => Code::GetVringBase,
            Self::GetVringBaseSkipDrain { .. } => Code::GetVringBaseSkipDrain,
            Self::SetVringKick(_) => Code::SetVringKick,
            Self::SetVringCall(_) => Code::SetVringCall,
            Self::SetVringErr(_) => Code::SetVringErr,
            Self::GetProtocolFeatures => Code::GetProtocolFeatures,
            Self::SetProtocolFeatures(_) => Code::SetProtocolFeatures,
            Self::GetQueueNum => Code::GetQueueNum,
            Self::SetVringEnable { .. } => Code::SetVringEnable,
            Self::SendRarp(_) => Code::SendRarp,
            Self::NetSetMtu(_) => Code::NetSetMtu,
            Self::SetBackendReqFd(_) => Code::SetBackendReqFd,
            Self::IotlbMsg(_) => Code::IotlbMsg,
            Self::GetConfig(_) => Code::GetConfig,
            Self::SetConfig(_) => Code::SetConfig,
            Self::GetInflightFd(_) => Code::GetInflightFd,
            Self::SetInflightFd(..) => Code::SetInflightFd,
            Self::ResetDevice => Code::ResetDevice,
            Self::VringKick { .. } => Code::VringKick,
            Self::GetMaxMemSlots => Code::GetMaxMemSlots,
            Self::AddMemReg(..) => Code::AddMemReg,
            Self::RemMemReg(_) => Code::RemMemReg,
            Self::SetDeviceStateFd(..) => Code::SetDeviceStateFd,
            Self::CheckDeviceState => Code::CheckDeviceState,
        }
    }

    fn decode(number: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let code = Code::from_raw(number).ok_or(MessageError::UnknownRequest { number })?;
        let body = Body { request: code.name(), payload, fds };
        Ok(match code {
            Code::GetFeatures => body.nothing().map(|()| Self::GetFeatures)?,
            Code::SetFeatures => Self::SetFeatures(Features::from_bits_retain(body.u64()?)),
            Code::SetOwner => body.nothing().map(|()| Self::SetOwner)?,
            Code::ResetOwner => body.nothing().map(|()| Self::ResetOwner)?,
            Code::SetMemTable => Self::SetMemTable(mem_table(body)?),
            Code::SetLogBase => Self::SetLogBase(log_base(body)?),
            Code::SetLogFd => Self::SetLogFd(body.fd()?),
            Code::SetVringNum => Self::SetVringNum(body.vring_state()?),
            Code::SetVringAddr => Self::SetVringAddr(body.vring_addr()?),
            Code::SetVringBase => Self::SetVringBase(body.vring_state()?),
            Code::GetVringBase => Self::GetVringBase { index: body.vring_state()?.index },
            Code::GetVringBaseSkipDrain => Self::GetVringBaseSkipDrain { index: body.vring_state()?.index },
            Code::SetVringKick => Self::SetVringKick(body.vring_fd()?),
            Code::SetVringCall => Self::SetVringCall(body.vring_fd()?),
            Code::SetVringErr => Self::SetVringErr(body.vring_fd()?),
            Code::GetProtocolFeatures => body.nothing().map(|()| Self::GetProtocolFeatures)?,
            Code::SetProtocolFeatures => {
                Self::SetProtocolFeatures(ProtocolFeatures::from_bits_retain(body.u64()?))
            }
            Code::GetQueueNum => body.nothing().map(|()| Self::GetQueueNum)?,
            Code::SetVringEnable => {
                body.vring_switch().map(|(index, enable)| Self::SetVringEnable { index, enable })?
            }
            Code::SendRarp => {
                let [a, b, c, d, e, f, ..] = body.u64()?.to_le_bytes();
                Self::SendRarp([a, b, c, d, e, f])
            }
            Code::NetSetMtu => Self::NetSetMtu(body.u64()?),
            Code::SetBackendReqFd => Self::SetBackendReqFd(body.fd()?),
            Code::IotlbMsg => Self::IotlbMsg(body.iotlb()?),
            Code::GetConfig => Self::GetConfig(body.config()?),
            Code::SetConfig => Self::SetConfig(body.config()?),
            Code::GetInflightFd => {
                body.no_fds()?;
                Self::GetInflightFd(body.inflight()?)
            }
            Code::SetInflightFd => Self::SetInflightFd(body.inflight()?, body.one_fd()?),
            Code::ResetDevice => body.nothing().map(|()| Self::ResetDevice)?,
            Code::VringKick => Self::VringKick { index: body.vring_state()?.index },
            Code::GetMaxMemSlots => body.nothing().map(|()| Self::GetMaxMemSlots)?,
            Code::AddMemReg => Self::AddMemReg(body.region()?, body.one_fd()?),
            Code::RemMemReg => {
                let region = body.region()?;
                body.optional_fd()?;
                Self::RemMemReg(region)
            }
            Code::SetDeviceStateFd => {
                let (transfer, fd) = body.with_fd()?;
                Self::SetDeviceStateFd(device_state(code.name(), transfer)?, fd)
            }
            Code::CheckDeviceState => body.nothing().map(|()| Self::CheckDeviceState)?,
            _ => return Err(MessageError::Unsupported { request: code.name() }),
        })
    }

    fn encode(&self) -> Encoded<'_> {
        match self {
            Self::GetFeatures
            | Self::SetOwner
            | Self::ResetOwner
            | Self::GetProtocolFeatures
            | Self::GetQueueNum
            | Self::ResetDevice
            | Self::GetMaxMemSlots
            | Self::CheckDeviceState => Encoded::default(),
            Self::SetFeatures(features) => Encoded::u64(features.bits()),
            Self::SetProtocolFeatures(features) => Encoded::u64(features.bits()),
            Self::SetMemTable(table) => {
                Encoded::regions(table.iter().map(|(region, _)| region)).fds(table.iter().map(|(_, fd)| fd))
            }
            Self::SetLogBase(LogBase::Address(address)) => Encoded::u64(*address),
            Self::SetLogBase(LogBase::Shared { mmap_size, mmap_offset, fd }) => {
                let (mmap_size, mmap_offset) = ((*mmap_size).into(), (*mmap_offset).into());
                Encoded::plain(wire::Log { mmap_size, mmap_offset }).fds(fd)
            }
            Self::SetLogFd(fd) | Self::SetBackendReqFd(fd) => Encoded::default().fds([fd]),
            Self::SetVringNum(state) | Self::SetVringBase(state) => {
                Encoded::vring_state(state.index, state.num)
            }
            Self::SetVringAddr(addr) => Encoded::vring_addr(addr),
            Self::GetVringBase { index }
            | Self::GetVringBaseSkipDrain { index }
            | Self::VringKick { index } => Encoded::vring_state(*index, 0),
            Self::SetVringKick(vring) | Self::SetVringCall(vring) | Self::SetVringErr(vring) => {
                Encoded::vring_fd(vring)
            }
            Self::SetVringEnable { index, enable } => Encoded::vring_state(*index, (*enable).into()),
            Self::SendRarp([a, b, c, d, e, f]) => {
                Encoded::u64(u64::from_le_bytes([*a, *b, *c, *d, *e, *f, 0, 0]))
            }
            Self::NetSetMtu(mtu) => Encoded::u64(*mtu),
            Self::IotlbMsg(msg) => Encoded::iotlb(msg),
            Self::GetConfig(config) | Self::SetConfig(config) => Encoded::config(config),
            Self::GetInflightFd(inflight) => Encoded::plain(wire::Inflight::from(inflight)),
            Self::SetInflightFd(inflight, fd) => Encoded::plain(wire::Inflight::from(inflight)).fds([fd]),
            Self::AddMemReg(region, fd) => Encoded::region(region).fds([fd]),
            Self::RemMemReg(region) => Encoded::region(region),
            Self::SetDeviceStateFd(state, fd) => Encoded::plain(wire::DeviceStateTransfer {
                direction: (state.direction as u32).into(),
                phase: (state.phase as u32).into(),
            })
            .fds([fd]),
        }
    }

    fn code_from(number: u32) -> Option<Code> {
        Code::from_raw(number)
    }

    fn number(code: Code) -> u32 {
        code.raw()
    }

    fn name(code: Code) -> &'static str {
        code.name()
    }

    fn expects(&self, needs_reply: bool) -> Expects {
        let own = match self {
            Self::SetLogBase(LogBase::Shared { fd, .. }) => fd.is_some(),
            _ => has_reply(self.code()),
        };
        Expects::new(own, needs_reply)
    }

    fn refusal(code: Option<Code>, needs_reply: bool) -> Refusal<Reply> {
        match code {
            Some(Code::GetConfig) => Refusal::Reply(Reply::Config(None)),
            Some(Code::GetInflightFd) => Refusal::Reply(Reply::Inflight(Inflight::default(), None)),
            Some(Code::GetSharedObject | Code::PostcopyAdvise) => Refusal::Reply(Reply::NoFd),
            Some(Code::SetDeviceStateFd) => Refusal::Reply(Reply::DeviceState(DeviceStateReply::Refused(1))),
            Some(Code::IotlbMsg | Code::PostcopyEnd | Code::CheckDeviceState) => {
                Refusal::Reply(Reply::U64(1))
            }
            Some(code) if has_reply(code) => Refusal::Impossible,
            _ if needs_reply => Refusal::Reply(Reply::U64(1)),
            // With LOG_SHMFD the front-end waits, and without it does not. The message does not show which.
            Some(Code::SetLogBase) => Refusal::Impossible,
            _ => Refusal::NotExpected,
        }
    }
}

/// Returns whether the request always has a reply of its own.
fn has_reply(code: Code) -> bool {
    matches!(
        code,
        Code::GetFeatures
            | Code::GetVringBase
            | Code::GetVringBaseSkipDrain
            | Code::GetProtocolFeatures
            | Code::GetQueueNum
            | Code::IotlbMsg
            | Code::GetConfig
            | Code::CreateCryptoSession
            | Code::PostcopyAdvise
            | Code::PostcopyEnd
            | Code::GetInflightFd
            | Code::GetMaxMemSlots
            | Code::GetStatus
            | Code::GetSharedObject
            | Code::SetDeviceStateFd
            | Code::CheckDeviceState
            | Code::GetShmemConfig
    )
}

fn mem_table(body: Body<'_>) -> Result<Vec<(MemoryRegion, OwnedFd)>, MessageError> {
    let regions = body.regions()?;
    let (count, fds) = (regions.len(), body.fds.len());
    if count != fds {
        return Err(MessageError::RegionFds { request: body.request, regions: count, fds });
    }
    Ok(regions.into_iter().zip(body.fds).collect())
}

fn log_base(body: Body<'_>) -> Result<LogBase, MessageError> {
    if body.payload.len() == size_of::<u64>() {
        return body.u64().map(LogBase::Address);
    }
    let log: wire::Log = body.read(size_of::<wire::Log>())?;
    Ok(LogBase::Shared {
        mmap_size: log.mmap_size.get(),
        mmap_offset: log.mmap_offset.get(),
        fd: body.optional_fd()?,
    })
}

fn device_state(
    request: &'static str,
    transfer: wire::DeviceStateTransfer,
) -> Result<DeviceState, MessageError> {
    let (direction, phase) = (transfer.direction.get(), transfer.phase.get());
    Ok(DeviceState {
        direction: TransferDirection::from_raw(direction)
            .ok_or_else(|| field(request, "direction", direction.into(), "expected 0 or 1"))?,
        phase: TransferPhase::from_raw(phase)
            .ok_or_else(|| field(request, "phase", phase.into(), "expected 0"))?,
    })
}
