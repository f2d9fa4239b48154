//! The port `null[,rate=N][,length=MIN-MAX]`, which discards the frames of the driver and delivers test
//! frames.

mod name;
mod receive;

pub(crate) use name::NULL;
pub use name::NullPort;

use super::hand_over::Passing;
use super::port::Port;
use super::transmit::{Put, Transmit};
use crate::card::state::CardState;
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::receive_task::ReceiveTask;
use crate::ring::transmit_ring::TransmitRing;
use crate::ring::transmit_task::TransmitTask;
use kickless_device::QueueTask;
use kickless_spec::net::{FRAME_MAX, NetFeatures};
use receive::{NoFrames, TestFrames};
use std::io;
use std::sync::Arc;
use std::time::Duration;

impl Port for NullPort {
    fn start(&self, _card: &Arc<CardState>) -> io::Result<()> {
        Ok(())
    }

    fn close(&self) {}

    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>> {
        Ok(match self.rate {
            0 => ReceiveTask::boxed(ring, NoFrames),
            _ => ReceiveTask::boxed(ring, TestFrames::new(self.clone())?),
        })
    }

    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
        Ok(TransmitTask::boxed(ring, NullTransmit { copy: vec![0; FRAME_MAX].into_boxed_slice() }))
    }

    fn passing(&self) -> Passing<'_> {
        Passing::Anew
    }

    fn announce(&self, _frame: &[u8]) {}
}

/// Discards frames.
struct NullTransmit {
    /// Space for a frame that a capture gets.
    copy: Box<[u8]>,
}

impl Transmit for NullTransmit {
    const DISCARDS: bool = true;
    const INTERVAL: Duration = Duration::ZERO;

    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put {
        write(&mut self.copy[..len])
    }

    #[inline]
    fn accepts(&self) -> NetFeatures {
        NetFeatures::GUEST_OFFLOADS
    }
}
