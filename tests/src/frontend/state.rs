//! Saves and loads a device's state through a front-end.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use anyhow::{Result, ensure};
use kickless_spec::vhost_user::{TransferDirection, TransferPhase};
use kickless_vhost_user::{DeviceState, FrontendMessage as Message};

use crate::frontend::{Answer, Frontend};

impl Frontend {
    /// Sends SET_DEVICE_STATE_FD.
    ///
    /// # Errors
    /// The back-end does not answer.
    pub fn transfer(&mut self, direction: TransferDirection, fd: OwnedFd) -> Result<Answer> {
        let state = DeviceState { direction, phase: TransferPhase::Stopped };
        self.attempt(&Message::SetDeviceStateFd(state, fd))
    }

    /// Saves the device's state through a pipe.
    ///
    /// # Errors
    /// The back-end does not send its state.
    pub fn save_state(&mut self) -> Result<Vec<u8>> {
        let (mut from, to) = std::io::pipe()?;
        ensure!(self.transfer(TransferDirection::Save, to.into())? == Answer::Done, "SET_DEVICE_STATE_FD");
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        ensure!(self.number(&Message::CheckDeviceState)? == 0, "CHECK_DEVICE_STATE after saving");
        Ok(bytes)
    }

    /// Loads a state into the device through a pipe and returns the back-end's answer. The device may leave
    /// bytes unread.
    ///
    /// # Errors
    /// The back-end does not answer.
    pub fn load_state(&mut self, bytes: &[u8]) -> Result<Answer> {
        let (from, mut to) = std::io::pipe()?;
        ensure!(self.transfer(TransferDirection::Load, from.into())? == Answer::Done, "SET_DEVICE_STATE_FD");
        let _ = to.write_all(bytes);
        drop(to);
        self.attempt(&Message::CheckDeviceState)
    }
}
