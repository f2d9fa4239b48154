//! Requests of the back-end.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::{self as wire, BackendRequest as Code};

use crate::body::{Body, Encoded};
use crate::error::MessageError;
use crate::message::{Expects, Refusal, RequestMessage};
use crate::payload::{Iotlb, ShmemRange, Uuid, VringArea};
use crate::reply::FrontendReply;

/// A request of the back-end, on the socket of [`SetBackendReqFd`](crate::FrontendMessage::SetBackendReqFd).
/// [`BackendRequest`](Code) describes each request.
#[derive(Debug)]
pub enum BackendMessage {
    /// A miss or a failed access.
    IotlbMsg(Iotlb),
    /// The configuration space has changed.
    ConfigChange,
    /// A page to which the guest writes its kicks.
    VringHostNotifier(VringArea),
    /// A call in band.
    VringCall {
        /// The ring.
        index: u32,
    },
    /// An error in band.
    VringErr {
        /// The ring.
        index: u32,
    },
    /// This back-end exports an object.
    SharedObjectAdd(Uuid),
    /// This back-end no longer exports the object.
    SharedObjectRemove(Uuid),
    /// Replies [`FrontendReply::SharedObject`].
    SharedObjectLookup(Uuid),
    /// The range to map, and the file.
    ShmemMap(ShmemRange, OwnedFd),
    /// The range to unmap.
    ShmemUnmap(ShmemRange),
}

impl RequestMessage for BackendMessage {
    type Code = Code;
    type Reply = FrontendReply;

    fn code(&self) -> Code {
        match self {
            Self::IotlbMsg(_) => Code::IotlbMsg,
            Self::ConfigChange => Code::ConfigChangeMsg,
            Self::VringHostNotifier(_) => Code::VringHostNotifierMsg,
            Self::VringCall { .. } => Code::VringCall,
            Self::VringErr { .. } => Code::VringErr,
            Self::SharedObjectAdd(_) => Code::SharedObjectAdd,
            Self::SharedObjectRemove(_) => Code::SharedObjectRemove,
            Self::SharedObjectLookup(_) => Code::SharedObjectLookup,
            Self::ShmemMap(..) => Code::ShmemMap,
            Self::ShmemUnmap(_) => Code::ShmemUnmap,
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

    fn decode(number: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let code = Code::from_raw(number).ok_or(MessageError::UnknownRequest { number })?;
        let body = Body { request: code.name(), payload, fds };
        Ok(match code {
            Code::IotlbMsg => Self::IotlbMsg(body.iotlb()?),
            Code::ConfigChangeMsg => body.nothing().map(|()| Self::ConfigChange)?,
            Code::VringHostNotifierMsg => Self::VringHostNotifier(body.vring_area()?),
            Code::VringCall => Self::VringCall { index: body.vring_state()?.index },
            Code::VringErr => Self::VringErr { index: body.vring_state()?.index },
            Code::SharedObjectAdd => Self::SharedObjectAdd(body.plain::<wire::SharedObject>()?.uuid),
            Code::SharedObjectRemove => Self::SharedObjectRemove(body.plain::<wire::SharedObject>()?.uuid),
            Code::SharedObjectLookup => Self::SharedObjectLookup(body.plain::<wire::SharedObject>()?.uuid),
            Code::ShmemMap => Self::ShmemMap(body.shmem_range()?, body.one_fd()?),
            Code::ShmemUnmap => {
                body.no_fds()?;
                Self::ShmemUnmap(body.shmem_range()?)
            }
        })
    }

    fn encode(&self) -> Encoded<'_> {
        match self {
            Self::IotlbMsg(msg) => Encoded::iotlb(msg),
            Self::ConfigChange => Encoded::default(),
            Self::VringHostNotifier(area) => Encoded::vring_area(area),
            Self::VringCall { index } | Self::VringErr { index } => Encoded::vring_state(*index, 0),
            Self::SharedObjectAdd(uuid) | Self::SharedObjectRemove(uuid) | Self::SharedObjectLookup(uuid) => {
                Encoded::plain(wire::SharedObject { uuid: *uuid })
            }
            Self::ShmemMap(range, fd) => Encoded::shmem_range(range).fds([fd]),
            Self::ShmemUnmap(range) => Encoded::shmem_range(range),
        }
    }

    fn expects(&self, needs_reply: bool) -> Expects {
        Expects::new(matches!(self, Self::SharedObjectLookup(_)), needs_reply)
    }

    fn refusal(code: Option<Code>, needs_reply: bool) -> Refusal<FrontendReply> {
        match code {
            Some(Code::SharedObjectLookup) => Refusal::Reply(FrontendReply::SharedObject(Err(1))),
            _ if needs_reply => Refusal::Reply(FrontendReply::Ack(1)),
            _ => Refusal::NotExpected,
        }
    }
}
