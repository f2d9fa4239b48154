//! Messages of which a part has arrived, in records.

use crate::error::{HandOverError, RequestError};
use kickless_handover::v1::HalfMessage;
use kickless_handover::{Given, Giving};
use kickless_vhost_user as vhost_user;
use std::os::fd::OwnedFd;

/// Returns a half message as a part of a record.
pub(crate) fn give(
    half: Option<vhost_user::HalfMessage<'_>>,
    to: &mut Giving,
) -> Result<Option<HalfMessage>, HandOverError> {
    let Some(vhost_user::HalfMessage { bytes, fds }) = half else { return Ok(None) };
    let bytes = to.bytes(&bytes)?;
    let descriptors = fds.iter().map(|fd| to.fd(fd)).collect::<Result<_, _>>()?;
    Ok(Some(HalfMessage { bytes, descriptors }))
}

/// Returns the bytes and the descriptors of a half message of a record.
pub(crate) fn take<'g>(
    half: &HalfMessage,
    given: &'g mut Given,
) -> Result<(&'g [u8], Vec<OwnedFd>), RequestError> {
    let fds = half.descriptors.iter().map(|fd| given.fd(*fd)).collect::<Result<_, _>>()?;
    Ok((given.bytes(half.bytes)?, fds))
}
