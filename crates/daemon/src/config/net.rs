//! The options that only network cards have.

use std::path::PathBuf;

use clap::Args;
use kickless_device::CaptureTo;
use kickless_net_port::Port;
use kickless_values::MacAddress;
use serde::Serialize;

use super::limits::{LimitWords, Limited, LimitsConfig};
use super::notation::{Mistake, Notation};
use super::text;
use super::values::{
    CAPTURE_LENGTH_MAX, NUM_QUEUE_PAIRS, Switch, parse_capture_length, parse_mtu, parse_not_empty,
    parse_num_queue_pairs,
};

/// The options of a network card.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Card")]
#[serde(rename_all = "kebab-case")]
pub struct NetConfig {
    /// The port of the card: tap:NAME is a TAP, which is made if it does not exist; tap-fd:N[,N...] are the
    /// queues of a TAP that the parent process has opened; switch:NAME[,vlan=N,uplink=TAP] connects the
    /// cards of this process with the same NAME, with vlan=N as an access port, and with a TAP of the host;
    /// user[,OPTION...] is the network of this user, without privileges, through the program passt with these
    /// options; stream:PATH connects to a program that listens on a unix socket, with the framing of QEMU's
    /// -netdev stream; vhost-user:PATH is the front-end of another vhost-user-net back-end;
    /// xdp:IFNAME[,queue=N] takes queues of an interface of the host from N on, through AF_XDP; loop returns
    /// the frames of guests; null discards them; null,rate=N,length=MIN-MAX also delivers N test frames per
    /// second to each pair of queues, with these lengths in bytes
    #[arg(long, value_name = "PORT", value_parser = str::parse::<Port>)]
    #[serde(serialize_with = "text::serialize")]
    pub port: Port,
    /// Ethernet address of the card, such as 52:54:00:12:34:56 [default: the front-end or the guest chooses]
    #[arg(long, value_name = "MAC", value_parser = str::parse::<MacAddress>)]
    #[serde(serialize_with = "text::optional", skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Maximum size of a packet in bytes (MTU) [default: 1500; a front-end can set another]
    #[arg(long, value_name = "N", value_parser = parse_mtu)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Maximum number of pairs of a receive and a transmit queue that a virtual machine can use [default: 1
    /// with tap:NAME, switch:NAME, user, stream:PATH, vhost-user:PATH and xdp:IFNAME, the number of
    /// descriptors with tap-fd:N, otherwise 64]
    #[arg(long, value_name = "N", value_parser = parse_num_queue_pairs)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_queue_pairs: Option<u16>,
    /// Offer guests to leave checksums and segmentation to the card. Guests must move between cards with the
    /// same setting
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "text::serialize")]
    pub offload: Switch,
    /// Offer guests to reset single queues, to give them another size. Only for front-ends that stop such a
    /// queue, which QEMU 7.2 does not do
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::Off)]
    #[serde(serialize_with = "text::serialize")]
    pub ring_reset: Switch,
    /// Write the frames of the card to this file, in the format pcapng. A file that is an earlier capture is
    /// overwritten [default: off]
    #[arg(long, value_name = "FILE", value_parser = parse_not_empty::<PathBuf>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<PathBuf>,
    /// Write only so many bytes of each frame to the capture, from its beginning [default: all]
    #[arg(long, value_name = "N", value_parser = parse_capture_length)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture_length: Option<u32>,
    /// The limits of frames.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitsConfig<Frames>,
}

/// The frames of a card. Receive is the direction to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frames;

impl Limited for Frames {
    const WORDS: LimitWords = LimitWords {
        unit: "frames",
        units: "frames",
        directions: ["", "-receive", "-transmit"],
        rates: ["{} a second", "{} to the guest a second", "{} of the guest a second"],
        bursts: ["{} a second", "{} to the guest a second", "{} of the guest a second"],
        unit_size: None,
        sharing: "cards",
    };
}

impl NetConfig {
    /// Returns the maximum number of pairs of queues.
    pub fn pairs_max(&self) -> u16 {
        let default = match &self.port {
            // Most TAPs have one queue, and most guests on a switch need no more. Each queue of an interface
            // is one less for the host.
            Port::Tap(_) | Port::Switch(_) | Port::Xdp(_) => 1,
            port => port.pairs().unwrap_or(NUM_QUEUE_PAIRS),
        };
        self.num_queue_pairs.unwrap_or(default)
    }

    /// Returns the file for the frames of the card, which has this name.
    pub fn capture_to<'a>(&'a self, device: &'a str) -> Option<CaptureTo<'a>> {
        let path = self.capture.as_deref()?;
        Some(CaptureTo { path, device, len_max: self.capture_length.unwrap_or(CAPTURE_LENGTH_MAX) })
    }

    /// Checks that the options can be combined.
    pub(crate) fn check(&self, notation: Notation) -> Result<(), Mistake> {
        self.limits.check(notation)?;
        if let (Some(mtu), Some(max)) = (self.mtu, self.port.mtu_max())
            && mtu > max
        {
            let why = format!("the port {} carries packets of at most {max} bytes", self.port);
            return Err(Mistake::new("mtu", why));
        }
        match (self.num_queue_pairs, self.port.pairs()) {
            (Some(wanted), Some(pairs)) if wanted != pairs => {
                let why = format!("this port has exactly {pairs}: leave it out");
                Err(Mistake::new("num-queue-pairs", why))
            }
            _ => Ok(()),
        }
    }
}
