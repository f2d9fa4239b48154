//! The kind `net`: a network card.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use clap::Args;
use kickless_daemon::{
    CaptureConfig, Kind, LimitWords, Limited, LimitsConfig, MakeError, Making, Mistake, Notation, Served,
    Settable, Switch, Words,
};
use kickless_device::Operate;
use kickless_net::{HandedCard, Net, Opening, PortError, PortName};
use kickless_net_port::TapError;
use kickless_opener::{Grant, NoDescriptor, is_descriptor_name};
use kickless_spec::net::{MTU_MAX, MTU_MIN};
use kickless_spec::vhost_user::RINGS_MAX;
use kickless_values::{MacAddress, parse_number};
use serde::Serialize;
use serde_json::{Value, json};
use tracing::info;

/// A card has two queues for each pair and one for commands.
const NUM_QUEUE_PAIRS_MAX: u16 = (RINGS_MAX - 1) / 2;

/// The options of a network card.
#[derive(Clone, Debug, PartialEq, Eq, Args, Serialize)]
#[command(next_help_heading = "Card")]
#[serde(rename_all = "kebab-case")]
pub struct NetConfig {
    /// The port of the card. Its help is made of those of all ports.
    #[arg(long, value_name = "PORT", value_parser = str::parse::<PortName>, help = PortName::help())]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub port: PortName,
    /// Ethernet address of the card, such as 52:54:00:12:34:56 [default: the front-end or the guest chooses]
    #[arg(long, value_name = "MAC", value_parser = str::parse::<MacAddress>)]
    #[serde(serialize_with = "kickless_daemon::text::optional", skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Maximum size of a packet in bytes (MTU) [default: 1500; a front-end can set another]
    #[arg(long, value_name = "N", value_parser = parse_mtu)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// The most pairs of queues that a virtual machine can use.
    #[arg(long, value_name = "N", value_parser = parse_num_queue_pairs, help = num_queue_pairs_help())]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_queue_pairs: Option<u16>,
    /// Offer guests to leave checksums and segmentation to the card. Guests must move between cards with the
    /// same setting
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::On)]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub offload: Switch,
    /// Offer guests to reset single queues, to give them another size. Only for front-ends that stop such a
    /// queue, which QEMU 7.2 does not do
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = Switch::Off)]
    #[serde(serialize_with = "kickless_daemon::text::serialize")]
    pub ring_reset: Switch,
    /// The file for the frames.
    #[command(flatten)]
    #[serde(flatten)]
    pub capture: CaptureConfig,
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
        self.num_queue_pairs.unwrap_or_else(|| self.port.pairs_default())
    }
}

fn num_queue_pairs_help() -> String {
    let default = PortName::pairs_help();
    format!(
        "Maximum number of pairs of a receive and a transmit queue that a virtual machine can use [default: {default}]"
    )
}

fn parse_num_queue_pairs(text: &str) -> Result<u16, String> {
    parse_number(text, 1, NUM_QUEUE_PAIRS_MAX.into())
}

fn parse_mtu(text: &str) -> Result<u16, String> {
    parse_number(text, MTU_MIN.into(), MTU_MAX.into())
}

/// The kind `net`.
#[derive(Debug)]
pub struct NetKind;

impl Kind for NetKind {
    type Options = NetConfig;
    type Limited = Frames;

    const WORDS: Words = Words {
        name: "net",
        key: "port",
        one: "a network card",
        several: "network cards",
        has_latencies: false,
        examples: &[
            (
                "Connect a card to the TAP vm1:",
                "kickless net --socket-path=/run/kickless/vm1.sock --port=tap:vm1",
            ),
            (
                "Give a guest the network of this user, with passt:",
                "kickless net --socket-path=/tmp/net.sock --port=user",
            ),
        ],
    };
    const OWN_KEYS: &'static [&'static str] = &["port", "mac", "capture"];
    const SETTABLE: &'static [Settable<NetConfig>] = &[];

    /// QEMU defines no features for it.
    fn capabilities() -> Value {
        json!({ "type": "net" })
    }

    fn check(options: &NetConfig, notation: Notation) -> Result<(), Mistake> {
        options.limits.check(notation)?;
        if let (Some(mtu), Some(max)) = (options.mtu, options.port.mtu_max())
            && mtu > max
        {
            let why = format!("the port {} carries packets of at most {max} bytes", options.port);
            return Err(Mistake::new("mtu", why));
        }
        match (options.num_queue_pairs, options.port.pairs()) {
            (Some(wanted), Some(pairs)) if wanted != pairs => {
                let why = format!("this port has exactly {pairs}: leave it out");
                Err(Mistake::new("num-queue-pairs", why))
            }
            _ => Ok(()),
        }
    }

    fn descriptors(options: &NetConfig) -> Vec<(&'static str, &str)> {
        let names = fds(options).filter(|fd| is_descriptor_name(fd));
        names.map(|name| ("port", name)).collect()
    }

    fn inherited(options: &NetConfig) -> Vec<(&'static str, i32)> {
        fds(options).filter_map(|fd| Some(("port", fd.parse().ok()?))).collect()
    }

    fn grants(options: &NetConfig) -> Vec<Grant> {
        let port = options.port.target().map(|to| Grant { option: "port", to });
        port.into_iter().chain(options.capture.grant()).collect()
    }

    fn log_served(options: &NetConfig, of: &Served) {
        info!(
            version = of.version,
            port = %options.port,
            mac = options.mac.as_ref().map(tracing::field::display),
            mtu = options.mtu,
            pairs = options.num_queue_pairs,
            offload = %options.offload,
            queue_size = of.queue_size,
            socket = of.socket,
            mode = of.socket_mode,
            owner = of.socket_owner,
            "serving"
        );
    }

    fn limits(options: &mut NetConfig) -> &mut LimitsConfig<Frames> {
        &mut options.limits
    }

    fn size_min(_: &mut NetConfig) -> Option<&mut Option<u64>> {
        None
    }

    fn capture(options: &mut NetConfig) -> Option<&mut CaptureConfig> {
        Some(&mut options.capture)
    }

    fn make(&self, options: &NetConfig, making: &Making<'_>) -> Result<Arc<dyn Operate>, MakeError> {
        let no_card = |error| MakeError { option: "port", source: error };
        let handed = making.handed.take().map(HandedCard::read).transpose();
        let mut handed = handed.map_err(|error| no_card(error.0))?;
        let card = card(options, making, handed.as_mut()).map_err(no_card)?;
        let capture = options.capture.to(making.name.unwrap_or(Self::WORDS.name));
        let set = match handed {
            Some(handed) => card.take_over(handed, capture.as_ref()),
            None => card.set_capture(capture.as_ref()),
        };
        set.map_err(|error| MakeError { option: "capture", source: error.0 })?;
        Ok(Arc::new(card))
    }
}

/// Returns the descriptors that the port names: names of those of a call, and numbers of inherited ones.
fn fds(options: &NetConfig) -> impl Iterator<Item = &str> {
    options.port.descriptors().iter().map(String::as_str)
}

/// Returns another descriptor of a queue of a TAP.
fn queue(fd: &str, making: &Making<'_>) -> Result<OwnedFd, TapError> {
    if is_descriptor_name(fd) {
        return Ok(making.given.duplicate(fd)?);
    }
    making.inherited.duplicate(fd).map_err(|error| match error {
        NoDescriptor::Unknown { name } => TapError::NotInherited { fd: name },
        NoDescriptor::Host { name, source } => TapError::Descriptor { fd: name, source },
    })
}

/// Opens the port of a card, or takes it over.
fn card(
    config: &NetConfig,
    making: &Making<'_>,
    handed: Option<&mut HandedCard<'_>>,
) -> Result<Net, PortError> {
    let (pairs_max, mac) = (config.pairs_max(), config.mac.map(MacAddress::bytes));
    let handed = RefCell::new(handed.map(HandedCard::port));
    let opening = Opening { pairs: pairs_max, mac, descriptor: &|fd| queue(fd, making), handed };
    Ok(Net::new(kickless_net::Options {
        mac,
        mtu: config.mtu,
        pairs_max,
        queue_size_max: making.queue_size_max,
        offload: config.offload == Switch::On,
        ring_reset: config.ring_reset == Switch::On,
        port: config.port.open(&opening)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_device::Handed;
    use kickless_handover::{Giving, Part, v1};
    use kickless_opener::Descriptors;

    /// Makes a card as another process gives it, with a port without a state.
    fn take(port: &str, mtu: u16) -> Result<Arc<dyn Operate>, MakeError> {
        let config = NetConfig {
            port: port.parse().unwrap(),
            mac: None,
            mtu: None,
            num_queue_pairs: Some(1),
            offload: Switch::On,
            ring_reset: Switch::Off,
            capture: CaptureConfig::default(),
            limits: LimitsConfig::default(),
        };
        let card = v1::Card { mtu, ..v1::Card::default() };
        let device = v1::Device { own: Part::new(&card).unwrap(), ..v1::Device::default() };
        let (device, mut given): (v1::Device, _) = Giving::default().record(&device).unwrap().read().unwrap();
        let none = Descriptors::default();
        let handed = Some(Handed { state: device.own, given: &mut given });
        let making = Making {
            name: None,
            queue_size_max: 8,
            given: &none,
            inherited: &none,
            handed: RefCell::new(handed),
        };
        NetKind.make(&config, &making)
    }

    #[test]
    fn a_card_is_made_of_what_another_process_gives() {
        let mut mtu = [0; 2];
        take("null", 9000).unwrap().read_config(10, &mut mtu);
        assert_eq!(u16::from_le_bytes(mtu), 9000);
        let refused = |port, mtu| take(port, mtu).err().unwrap();
        assert_eq!(refused("tap:vm1", 1500).option, "port");
        assert_eq!(refused("null", 60).to_string(), "the other process gives an MTU of 60 bytes");
    }
}
