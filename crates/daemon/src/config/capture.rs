//! The options of a kind of device whose frames can be written to a file.

use std::path::PathBuf;

use clap::Args;
use kickless_device::CaptureTo;
use kickless_opener::{Grant, Target};
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header};
use kickless_values::parse_number;
use serde::Serialize;

use super::values::parse_not_empty;

/// The longest frame, so that a capture has all of it.
const CAPTURE_LENGTH_MAX: u32 = (FRAME_MAX - size_of::<Header>()) as u32;

/// The file for the frames of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CaptureConfig {
    /// Write the frames of the card to this file, in the format pcapng. A file that is an earlier capture is
    /// overwritten [default: off]
    #[arg(long, value_name = "FILE", value_parser = parse_not_empty::<PathBuf>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<PathBuf>,
    /// Write only so many bytes of each frame to the capture, from its beginning [default: all]
    #[arg(long, value_name = "N", value_parser = parse_capture_length)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture_length: Option<u32>,
}

impl CaptureConfig {
    /// Returns the file, as a thing of the host that the device uses.
    pub fn grant(&self) -> Option<Grant> {
        let path = self.capture.clone()?;
        Some(Grant { option: "capture", to: Target::Capture { path } })
    }

    /// Returns the file for the frames of the device with this name.
    pub fn to<'a>(&'a self, device: &'a str) -> Option<CaptureTo<'a>> {
        let path = self.capture.as_deref()?;
        Some(CaptureTo { path, device, len_max: self.capture_length.unwrap_or(CAPTURE_LENGTH_MAX) })
    }
}

fn parse_capture_length(text: &str) -> Result<u32, String> {
    parse_number(text, ETHERNET_HEADER_LEN as u32, CAPTURE_LENGTH_MAX)
}
