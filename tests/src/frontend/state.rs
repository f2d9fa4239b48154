//! A front-end that moves a device's state.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use anyhow::{Result, ensure};
use kickless_spec::vhost_user::{TransferDirection, TransferPhase};
use kickless_vhost_user::{DeviceState, FrontendMessage as Message};

use crate::frontend::{Answer, Frontend};

impl Frontend {
    /// SET_DEVICE_STATE_FD.
    ///
    /// # Errors
    /// There is no answer.
    pub fn transfer(&mut self, direction: TransferDirection, fd: OwnedFd) -> Result<Answer> {
        let state = DeviceState { direction, phase: TransferPhase::Stopped };
        self.attempt(&Message::SetDeviceStateFd(state, fd))
    }

    /// The device's state, through a pipe.
    ///
    /// # Errors
    /// It is not to be had.
    pub fn save_state(&mut self) -> Result<Vec<u8>> {
        let (mut from, to) = std::io::pipe()?;
        ensure!(self.transfer(TransferDirection::Save, to.into())? == Answer::Done, "SET_DEVICE_STATE_FD");
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        ensure!(self.number(&Message::CheckDeviceState)? == 0, "CHECK_DEVICE_STATE after saving");
        Ok(bytes)
    }

    /// Gives the device a state, through a pipe, and tells how it takes that. What it does not read is no error.
    ///
    /// # Errors
    /// It has no answer.
    pub fn load_state(&mut self, bytes: &[u8]) -> Result<Answer> {
        let (from, mut to) = std::io::pipe()?;
        ensure!(self.transfer(TransferDirection::Load, from.into())? == Answer::Done, "SET_DEVICE_STATE_FD");
        let _ = to.write_all(bytes);
        drop(to);
        self.attempt(&Message::CheckDeviceState)
    }
}
