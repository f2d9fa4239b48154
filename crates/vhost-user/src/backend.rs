//! Requests of the back-end.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::BackendRequest as Code;

use crate::body::{Body, Encoded};
use crate::error::MessageError;
use crate::message::{Expects, Refusal, RequestMessage};
use crate::payload::Iotlb;
use crate::reply::FrontendReply;

/// A request of the back-end, on the socket of [`SetBackendReqFd`](crate::FrontendMessage::SetBackendReqFd).
/// [`BackendRequest`](Code) describes each request.
#[derive(Debug)]
#[non_exhaustive]
pub enum BackendMessage {
    /// A miss or a failed access.
    IotlbMsg(Iotlb),
    /// The configuration space has changed.
    ConfigChange,
}

impl RequestMessage for BackendMessage {
    type Code = Code;
    type Reply = FrontendReply;

    fn code(&self) -> Code {
        match self {
            Self::IotlbMsg(_) => Code::IotlbMsg,
            Self::ConfigChange => Code::ConfigChangeMsg,
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
            _ => return Err(MessageError::Unsupported { request: code.name() }),
        })
    }

    fn encode(&self) -> Encoded<'_> {
        match self {
            Self::IotlbMsg(msg) => Encoded::iotlb(msg),
            Self::ConfigChange => Encoded::default(),
        }
    }

    fn expects(&self, needs_reply: bool) -> Expects {
        Expects::new(false, needs_reply)
    }

    fn refusal(code: Option<Code>, needs_reply: bool) -> Refusal<FrontendReply> {
        match code {
            // It always has a reply.
            Some(Code::SharedObjectLookup) => Refusal::Reply(FrontendReply::Ack(1)),
            _ if needs_reply => Refusal::Reply(FrontendReply::Ack(1)),
            _ => Refusal::NotExpected,
        }
    }
}
