//! The replies of both sides.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::{
    self as wire, BackendRequest, DEVICE_STATE_ERROR_MASK, FrontendRequest as Code, NO_FD, SHMEM_REGIONS_MAX,
};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

use crate::body::{Body, Encoded, field};
use crate::error::MessageError;
use crate::message::ReplyTo;
use crate::payload::{Config, Inflight, MemoryRegion, VringState};

/// The back-end's reply to a [`FrontendMessage`](crate::FrontendMessage).
#[derive(Debug)]
pub enum Reply {
    /// A number, or an acknowledgement: zero for success.
    ///
    /// The reply to SET_LOG_BASE is one too. The specification gives that reply no payload. QEMU accepts any
    /// payload, and other front-ends require the number. So we send it with a number, and receive it without
    /// one as 0.
    U64(u64),
    /// The index at which a ring was stopped.
    VringBase(VringState),
    /// The configuration space, from [`Config::answer`]; `None` on failure.
    Config(Option<Config>),
    /// The parameters of the session, with its number. They are opaque, as in the request.
    CryptoSession(Vec<u8>),
    /// The userfaultfd; `None` on failure.
    Userfault(Option<OwnedFd>),
    /// The reply to SET_MEM_TABLE in postcopy mode: the regions with their addresses in the back-end.
    MemTable(Vec<MemoryRegion>),
    /// The reply to ADD_MEM_REG in postcopy mode: the region with its address in the back-end.
    MemRegion(MemoryRegion),
    /// The in-flight buffer and its file. On failure the size is zero and there is no file.
    Inflight(Inflight, Option<OwnedFd>),
    /// The dma-buf; `None` on failure.
    SharedObject(Option<OwnedFd>),
    /// Whether and how the device's state can be transferred.
    DeviceState(DeviceStateReply),
    /// The sizes of the shared memory regions in bytes, by `shmid`, at most [`SHMEM_REGIONS_MAX`]. An unused
    /// region has size zero. Zeroes at the end are dropped when a reply is received.
    ShmemConfig(Vec<u64>),
}

/// The reply to [`SetDeviceStateFd`](crate::FrontendMessage::SetDeviceStateFd).
#[derive(Debug)]
pub enum DeviceStateReply {
    /// The back-end will use the front-end's channel.
    Accepted,
    /// The front-end has to use this channel instead.
    Instead(OwnedFd),
    /// The transfer is impossible. The error is not zero.
    Refused(u8),
}

impl ReplyTo<Code> for Reply {
    fn decode(code: Code, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let body = Body { request: code.name(), payload, fds };
        let number = payload.len() == size_of::<u64>();
        Ok(match code {
            Code::SetLogBase if payload.is_empty() => body.nothing().map(|()| Self::U64(0))?,
            Code::SetMemTable if !number => {
                body.no_fds()?;
                Self::MemTable(body.regions()?)
            }
            Code::AddMemReg if !number => {
                body.no_fds()?;
                Self::MemRegion(body.region()?)
            }
            Code::GetVringBase | Code::GetVringBaseSkipDrain => Self::VringBase(body.vring_state()?),
            Code::GetConfig if payload.is_empty() => body.nothing().map(|()| Self::Config(None))?,
            Code::GetConfig => Self::Config(Some(body.config()?)),
            Code::CreateCryptoSession => {
                body.no_fds()?;
                Self::CryptoSession(payload.to_vec())
            }
            Code::PostcopyAdvise => {
                body.size(0)?;
                Self::Userfault(body.optional_fd()?)
            }
            Code::GetInflightFd => {
                let inflight = body.inflight()?;
                let fd = body.optional_fd()?;
                if (inflight.mmap_size == 0) != fd.is_none() {
                    let rule = "expected a file descriptor if and only if it is not 0";
                    return Err(field(code.name(), "mmap_size", inflight.mmap_size, rule));
                }
                Self::Inflight(inflight, fd)
            }
            // The specification gives no payload. libvhost-user sends the request's payload back.
            Code::GetSharedObject => Self::SharedObject(body.optional_fd()?),
            Code::SetDeviceStateFd => Self::DeviceState(device_state(body)?),
            Code::GetShmemConfig => Self::ShmemConfig(shmem_config(body)?),
            _ => Self::U64(body.u64()?),
        })
    }

    fn encode(&self) -> Encoded<'_> {
        match self {
            Self::U64(value) => Encoded::u64(*value),
            Self::VringBase(state) => Encoded::vring_state(state.index, state.num),
            Self::Config(Some(config)) => Encoded::config(config),
            Self::Config(None) => Encoded::default(),
            Self::CryptoSession(session) => Encoded { payload: session.clone(), fds: Vec::new() },
            Self::Userfault(fd) | Self::SharedObject(fd) => Encoded::default().fds(fd),
            Self::MemTable(regions) => Encoded::regions(regions.iter()),
            Self::MemRegion(region) => Encoded::region(region),
            Self::Inflight(inflight, fd) => Encoded::plain(wire::Inflight::from(inflight)).fds(fd),
            Self::DeviceState(DeviceStateReply::Accepted) => Encoded::u64(NO_FD),
            Self::DeviceState(DeviceStateReply::Instead(fd)) => Encoded::u64(0).fds([fd]),
            Self::DeviceState(DeviceStateReply::Refused(error)) => Encoded::u64(NO_FD | u64::from(*error)),
            Self::ShmemConfig(sizes) => {
                let mut table = [U64::ZERO; SHMEM_REGIONS_MAX];
                table.iter_mut().zip(sizes).for_each(|(entry, size)| *entry = (*size).into());
                let used = table.iter().filter(|size| **size != U64::ZERO).count();
                let header = wire::ShmemConfigHeader { num_regions: (used as u32).into(), padding: 0.into() };
                Encoded { payload: [header.as_bytes(), table.as_bytes()].concat(), fds: Vec::new() }
            }
        }
    }

    fn answers(&self, code: Code) -> bool {
        match self {
            Self::VringBase(_) => matches!(code, Code::GetVringBase | Code::GetVringBaseSkipDrain),
            Self::Config(_) => code == Code::GetConfig,
            Self::CryptoSession(_) => code == Code::CreateCryptoSession,
            Self::Userfault(_) => code == Code::PostcopyAdvise,
            Self::MemTable(_) => code == Code::SetMemTable,
            Self::MemRegion(_) => code == Code::AddMemReg,
            Self::Inflight(..) => code == Code::GetInflightFd,
            Self::SharedObject(_) => code == Code::GetSharedObject,
            Self::DeviceState(_) => code == Code::SetDeviceStateFd,
            Self::ShmemConfig(_) => code == Code::GetShmemConfig,
            Self::U64(_) => !matches!(
                code,
                Code::GetVringBase
                    | Code::GetVringBaseSkipDrain
                    | Code::GetConfig
                    | Code::CreateCryptoSession
                    | Code::PostcopyAdvise
                    | Code::GetInflightFd
                    | Code::GetSharedObject
                    | Code::SetDeviceStateFd
                    | Code::GetShmemConfig
            ),
        }
    }

    fn ack(status: u64) -> Self {
        Self::U64(status)
    }
}

fn device_state(body: Body<'_>) -> Result<DeviceStateReply, MessageError> {
    let request = body.request;
    let value = body.read::<U64>(size_of::<U64>())?.get();
    match (value & DEVICE_STATE_ERROR_MASK, value & NO_FD != 0) {
        (0, false) => body.one_fd().map(DeviceStateReply::Instead),
        (0, true) => body.no_fds().map(|()| DeviceStateReply::Accepted),
        (error, true) => body.no_fds().map(|()| DeviceStateReply::Refused(error as u8)),
        (_, false) => Err(field(request, "status", value, "an error that brings a file descriptor")),
    }
}

fn shmem_config(body: Body<'_>) -> Result<Vec<u64>, MessageError> {
    body.no_fds()?;
    let request = body.request;
    body.size(size_of::<wire::ShmemConfigHeader>() + SHMEM_REGIONS_MAX * size_of::<U64>())?;
    let (header, sizes) = body.payload.split_at(size_of::<wire::ShmemConfigHeader>());
    let count = wire::ShmemConfigHeader::read_from_bytes(header).unwrap_or_default().num_regions.get();
    if count as usize > SHMEM_REGIONS_MAX {
        return Err(field(request, "number of regions", count.into(), "expected at most 256"));
    }
    let (entries, _) = sizes.as_chunks::<8>();
    let mut sizes: Vec<u64> = entries.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    while sizes.last() == Some(&0) {
        sizes.pop();
    }
    Ok(sizes)
}

/// The front-end's reply to a [`BackendMessage`](crate::BackendMessage).
#[derive(Debug)]
pub enum FrontendReply {
    /// An acknowledgement: zero for success.
    Ack(u64),
    /// The dma-buf, or a status that is not zero.
    SharedObject(Result<OwnedFd, u64>),
}

impl ReplyTo<BackendRequest> for FrontendReply {
    fn decode(code: BackendRequest, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let body = Body { request: code.name(), payload, fds };
        if code != BackendRequest::SharedObjectLookup {
            return body.u64().map(Self::Ack);
        }
        match body.read::<U64>(size_of::<U64>())?.get() {
            0 => body.one_fd().map(|fd| Self::SharedObject(Ok(fd))),
            status => body.no_fds().map(|()| Self::SharedObject(Err(status))),
        }
    }

    fn encode(&self) -> Encoded<'_> {
        match self {
            Self::Ack(status) | Self::SharedObject(Err(status)) => Encoded::u64(*status),
            Self::SharedObject(Ok(fd)) => Encoded::u64(0).fds([fd]),
        }
    }

    fn answers(&self, code: BackendRequest) -> bool {
        matches!(self, Self::SharedObject(_)) == (code == BackendRequest::SharedObjectLookup)
    }

    fn ack(status: u64) -> Self {
        Self::Ack(status)
    }
}
