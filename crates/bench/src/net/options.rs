//! The load of `kickless bench net` and `kickless bench compare-net` on their command line.

use clap::{Args, ValueEnum};
use kickless_driver::Choice;
use serde::Serialize;

use super::packet::{TCP_FRAME_MAX, TCP_FRAME_MIN, Work};
use crate::common_options::{CommonLoad, LoadKind, parse_choice};
use crate::wait::Wait;

/// The work of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    /// Send frames to a card that returns them, such as one with the port `loop`
    Echo,
    /// Send frames
    Transmit,
    /// Receive the frames that the card delivers
    Receive,
    /// Receive the frames that the card delivers, and send them back
    Forward,
    /// Send frames to the card, and receive them from a second card, whose socket has the same path and
    /// `.peer` behind it. One thread drives both
    Pass,
}

/// The load of a card.
#[derive(Debug, Args)]
pub struct NetLoadOptions {
    /// The way of the frames
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "echo")]
    pub(crate) direction: Vec<Direction>,
    /// Bytes of a frame, from 60 to 65550
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64", value_parser = clap::value_parser!(u32).range(60..=65550))]
    pub(crate) frame_size: Vec<u32>,
    /// Send frames as TCP packets that the card may cut into segments with so many bytes of data. Both ways
    /// of the card need the offloads for that
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) gso_size: Option<u16>,
    /// Send frames as TCP packets without segmentation, whose checksums are left to the card and to the
    /// receiver. Both ways of the card need the offloads for that
    #[arg(long, conflicts_with = "gso_size")]
    pub(crate) partial_checksum: bool,
    /// Write all bytes of each frame that is sent, and read all bytes of each one that comes back, as
    /// programs in a guest do
    #[arg(long)]
    pub(crate) touch: bool,
    /// How a thread waits for frames and for room
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "poll")]
    pub(crate) wait: Vec<Wait>,
    /// Frames that a thread sends or receives by one call
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) batch: u16,
    /// Queue pairs to use, each with a thread
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=127))]
    pub(crate) pairs: u16,
    /// Frames in several receive buffers: auto, on or off
    #[arg(long, value_name = "CHOICE", default_value = "auto", value_parser = parse_choice)]
    pub(crate) mergeable: Choice,
    #[command(flatten)]
    pub(crate) common: CommonLoad,
}

impl NetLoadOptions {
    /// Returns the work that packets leave to the card.
    pub(crate) fn work(&self) -> Option<Work> {
        let checksum = self.partial_checksum.then_some(Work::Checksum);
        self.gso_size.map(Work::Segments).or(checksum)
    }
}

impl LoadKind for NetLoadOptions {
    fn common(&self) -> &CommonLoad {
        &self.common
    }

    fn check(&self) -> Result<(), String> {
        let sends = self
            .direction
            .iter()
            .all(|direction| matches!(direction, Direction::Echo | Direction::Transmit | Direction::Pass));
        if !self.common.rate.is_empty() && !sends {
            return Err(
                "--rate is for --direction=echo, transmit and pass: the card delivers other frames".into()
            );
        }
        let of_tcp = if self.gso_size.is_some() { "--gso-size" } else { "--partial-checksum" };
        if self.work().is_some() {
            if !sends {
                return Err(format!("{of_tcp} is for --direction=echo, transmit and pass"));
            }
            if !self.frame_size.iter().all(|size| (TCP_FRAME_MIN..=TCP_FRAME_MAX).contains(size)) {
                return Err(format!(
                    "{of_tcp} needs packets from {TCP_FRAME_MIN} to {TCP_FRAME_MAX} bytes: choose --frame-size"
                ));
            }
        }
        if self.touch && !sends {
            return Err("--touch is for --direction=echo, transmit and pass".into());
        }
        if let (Some(size), Some(depth)) = (self.common.queue_size, self.common.depths().iter().max())
            && size < *depth
        {
            return Err(format!("--queue-size={size} is less than --depth={depth}"));
        }
        Ok(())
    }
}
