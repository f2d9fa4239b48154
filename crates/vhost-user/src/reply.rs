//! The replies of both sides.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::{
    self as wire, BackendRequest, DEVICE_STATE_ERROR_MASK, FrontendRequest as Code, NO_FD,
};
use zerocopy::little_endian::U64;

use crate::body::{Body, Encoded, field};
use crate::error::MessageError;
use crate::message::ReplyTo;
use crate::payload::{Config, Inflight, VringState};

/// The back-end's reply to a [`FrontendMessage`](crate::FrontendMessage).
#[derive(Debug)]
#[non_exhaustive]
pub enum Reply {
    /// A number, or an acknowledgement: zero for success.
    ///
    /// Some back-ends reply to SET_LOG_BASE with a number, and others without any payload, which is decoded
    /// as 0.
    U64(u64),
    /// The log that was set. On failure the size is zero.
    ///
    /// The specification gives the reply to SET_LOG_BASE no payload. QEMU accepts any payload. The front-end
    /// of the crate `vhost` waits for this one since its version 0.16, and for a number before.
    Log {
        /// Bytes.
        mmap_size: u64,
        /// Offset in the file.
        mmap_offset: u64,
    },
    /// The index at which a ring was stopped.
    VringBase(VringState),
    /// The configuration space, from [`Config::answer`]; `None` on failure.
    Config(Option<Config>),
    /// The in-flight buffer and its file. On failure the size is zero and there is no file.
    Inflight(Inflight, Option<OwnedFd>),
    /// Whether and how the device's state can be transferred.
    DeviceState(DeviceStateReply),
    /// Nothing, which refuses a request for a file descriptor: POSTCOPY_ADVISE and GET_SHARED_OBJECT.
    NoFd,
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
        Ok(match code {
            Code::SetLogBase if payload.is_empty() => body.nothing().map(|()| Self::U64(0))?,
            Code::SetLogBase if payload.len() == size_of::<wire::Log>() => {
                let log: wire::Log = body.plain()?;
                Self::Log { mmap_size: log.mmap_size.get(), mmap_offset: log.mmap_offset.get() }
            }
            Code::GetVringBase | Code::GetVringBaseSkipDrain => Self::VringBase(body.vring_state()?),
            Code::GetConfig if payload.is_empty() => body.nothing().map(|()| Self::Config(None))?,
            Code::GetConfig => Self::Config(Some(body.config()?)),
            Code::GetInflightFd => {
                let inflight = body.inflight()?;
                let fd = body.optional_fd()?;
                if (inflight.mmap_size == 0) != fd.is_none() {
                    let rule = "expected a file descriptor if and only if it is not 0";
                    return Err(field(code.name(), "mmap_size", inflight.mmap_size, rule));
                }
                Self::Inflight(inflight, fd)
            }
            Code::SetDeviceStateFd => Self::DeviceState(device_state(body)?),
            Code::GetSharedObject | Code::PostcopyAdvise => body.nothing().map(|()| Self::NoFd)?,
            _ => Self::U64(body.u64()?),
        })
    }

    fn encode(&self) -> Encoded<'_> {
        match self {
            Self::U64(value) => Encoded::u64(*value),
            Self::VringBase(state) => Encoded::vring_state(state.index, state.num),
            Self::Log { mmap_size, mmap_offset } => {
                let (mmap_size, mmap_offset) = ((*mmap_size).into(), (*mmap_offset).into());
                Encoded::plain(wire::Log { mmap_size, mmap_offset })
            }
            Self::Config(Some(config)) => Encoded::config(config),
            Self::Config(None) | Self::NoFd => Encoded::default(),
            Self::Inflight(inflight, fd) => Encoded::plain(wire::Inflight::from(inflight)).fds(fd),
            Self::DeviceState(DeviceStateReply::Accepted) => Encoded::u64(NO_FD),
            Self::DeviceState(DeviceStateReply::Instead(fd)) => Encoded::u64(0).fds([fd]),
            Self::DeviceState(DeviceStateReply::Refused(error)) => Encoded::u64(NO_FD | u64::from(*error)),
        }
    }

    fn answers(&self, code: Code) -> bool {
        match self {
            Self::VringBase(_) => matches!(code, Code::GetVringBase | Code::GetVringBaseSkipDrain),
            Self::Log { .. } => code == Code::SetLogBase,
            Self::Config(_) => code == Code::GetConfig,
            Self::Inflight(..) => code == Code::GetInflightFd,
            Self::DeviceState(_) => code == Code::SetDeviceStateFd,
            Self::NoFd => matches!(code, Code::GetSharedObject | Code::PostcopyAdvise),
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

/// The front-end's reply to a [`BackendMessage`](crate::BackendMessage).
#[derive(Debug)]
#[non_exhaustive]
pub enum FrontendReply {
    /// An acknowledgement: zero for success.
    Ack(u64),
}

impl ReplyTo<BackendRequest> for FrontendReply {
    fn decode(code: BackendRequest, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        Body { request: code.name(), payload, fds }.u64().map(Self::Ack)
    }

    fn encode(&self) -> Encoded<'_> {
        let Self::Ack(status) = self;
        Encoded::u64(*status)
    }

    fn answers(&self, _: BackendRequest) -> bool {
        true
    }

    fn ack(status: u64) -> Self {
        Self::Ack(status)
    }
}
