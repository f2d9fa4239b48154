//! The name of a switch, the VLAN of a port there, and the uplink.

use super::card::SwitchCard;
use super::port::SwitchPort;
use super::rule::Rule;
use super::uplink::Uplink;
use crate::ports::port::{Name, OpenPort, Opening, Pairs, PortError, PortKind};
use kickless_device::Handed;
use kickless_net_port::{Tap, is_interface_name};
use kickless_opener::Target;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The most signs of a name.
const NAME_MAX: usize = 64;
/// The highest number of a VLAN. The number above it is reserved (IEEE 802.1Q, table 9-2).
const VLAN_MAX: u16 = 4094;

/// The port `switch:NAME[,vlan=N][,uplink=TAP]`.
pub(crate) const SWITCH: PortKind = PortKind {
    form: "switch:NAME",
    help: "switch:NAME[,vlan=N,uplink=TAP] connects the cards of this process with the same NAME, with vlan=N as an \
           access port, and with a TAP of the host",
    // Most guests on a switch need no more.
    pairs: Pairs::One,
    parse: |text| {
        Some(match text.strip_prefix("switch:")?.parse::<SwitchName>() {
            Ok(name) => Ok(Arc::new(name)),
            Err(error) => Err(error.into()),
        })
    },
};

/// A switch, and the kind of port there: `NAME[,vlan=N][,uplink=TAP]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SwitchName {
    /// The name of the switch. All cards of a process with the same name are ports of it.
    name: String,
    /// The VLAN of an access port, from 1 to 4094. A port without one is a trunk.
    vlan: Option<u16>,
    /// The TAP that is a port of the switch too.
    uplink: Option<String>,
}

/// The error of a text that does not describe a port of a switch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum InvalidSwitch {
    /// This is no name.
    #[error("the name of a switch has 1 to {NAME_MAX} letters, digits and signs other than a comma")]
    Name,
    /// The number of the VLAN is wrong.
    #[error("a VLAN is a number from 1 to {VLAN_MAX}")]
    Vlan,
    /// This is no name of a TAP.
    #[error("an uplink is the name of a TAP")]
    Uplink,
    /// There is no such option.
    #[error("a port of a switch has no option {0:?}: it has vlan=N and uplink=TAP")]
    Option(String),
}

impl FromStr for SwitchName {
    type Err = InvalidSwitch;

    fn from_str(text: &str) -> Result<Self, InvalidSwitch> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        if !(1..=NAME_MAX).contains(&name.len()) || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidSwitch::Name);
        }
        let (mut vlan, mut uplink) = (None, None);
        for part in parts {
            if let Some(name) = part.strip_prefix("uplink=") {
                let name = Some(name).filter(|name| is_interface_name(name));
                uplink = Some(name.ok_or(InvalidSwitch::Uplink)?.to_owned());
                continue;
            }
            let number = part.strip_prefix("vlan=").ok_or_else(|| InvalidSwitch::Option(part.to_owned()))?;
            let number = number.parse().ok().filter(|number| (1..=VLAN_MAX).contains(number));
            vlan = Some(number.ok_or(InvalidSwitch::Vlan)?);
        }
        Ok(Self { name: name.to_owned(), vlan, uplink })
    }
}

impl Name for SwitchName {
    fn pairs(&self) -> Option<u16> {
        None
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn target(&self) -> Option<Target> {
        self.uplink.clone().map(|name| Target::Tap { name })
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        let share = |tap| match opening.take_handed() {
            Some(Handed { state, given }) => {
                Ok::<_, PortError>(Tap::share_given(tap, &self.name, state, given)?)
            }
            None => Ok(Tap::share(tap, &self.name)?),
        };
        let tap = self.uplink.as_deref().map(share).transpose()?;
        let uplink = tap.map(|tap| Uplink::of(&self.name, &tap));
        let rule = Rule { vlan: self.vlan, address: opening.mac };
        let port = SwitchPort::join(&self.name, rule, opening.pairs);
        Ok(SwitchCard::new(port, uplink).into())
    }
}

impl fmt::Display for SwitchName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "switch:{}", self.name)?;
        self.vlan.map_or(Ok(()), |vlan| write!(f, ",vlan={vlan}"))?;
        self.uplink.as_ref().map_or(Ok(()), |name| write!(f, ",uplink={name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_a_name_a_vlan_and_an_uplink() {
        for (text, vlan, uplink) in [
            ("lan", None, None),
            ("a:b/c,vlan=1", Some(1), None),
            ("x,vlan=4094,uplink=vm0", Some(4094), Some("vm0")),
            ("x,uplink=vm0.1", None, Some("vm0.1")),
        ] {
            let port: SwitchName = text.parse().unwrap();
            assert_eq!((port.vlan, port.uplink.as_deref()), (vlan, uplink));
            assert_eq!(port.to_string(), format!("switch:{text}"));
        }
        for (text, error) in [
            ("", InvalidSwitch::Name),
            ("a b", InvalidSwitch::Name),
            ("a,vlan=4095", InvalidSwitch::Vlan),
            ("a,vlan=0", InvalidSwitch::Vlan),
            ("a,vlan=", InvalidSwitch::Vlan),
            ("a,uplink=", InvalidSwitch::Uplink),
            ("a,uplink=a/b", InvalidSwitch::Uplink),
            ("a,", InvalidSwitch::Option(String::new())),
            ("a,vln=1", InvalidSwitch::Option("vln=1".into())),
        ] {
            assert_eq!(text.parse::<SwitchName>(), Err(error), "{text}");
        }
        assert_eq!("a".repeat(65).parse::<SwitchName>(), Err(InvalidSwitch::Name));
    }
}
