//! The ports that an operator can name.

use super::PORTS;
use super::port::{Name, OpenPort, Opening, Pairs, PortError};
use kickless_handover::Part;
use kickless_opener::Target;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The number of pairs that a card has unless its port suggests another.
const PAIRS_USUAL: u16 = 64;

/// The source of the frames that a card delivers, and the destination of those that its driver sends: its
/// name, as an operator writes it.
#[derive(Clone)]
pub struct PortName {
    name: Arc<dyn Name>,
    pairs: Pairs,
}

/// The error of a text that begins as no port does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum UnknownPort {
    /// There is no port of this name.
    #[error("a port is {}", forms(|_| true, "or"))]
    Unknown,
    /// An earlier version had this port.
    #[error(
        "there is no port vhost-user:PATH any more: connect the hypervisor to that back-end itself, or use stream:PATH"
    )]
    VhostUser,
}

/// The error of a state that belongs to another kind of port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other process gives the state of another port than {0}")]
struct OtherPort(String);

impl PortName {
    /// Opens the port for a card, or takes the one over that another process gives.
    ///
    /// # Errors
    /// The host does not provide what the port needs, or a program is missing.
    pub fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        let port = self.name.open(opening)?;
        // Only a port that another process makes anew leaves its part, which is empty then.
        match opening.take_handed() {
            Some(handed) if handed.state != Part::default() => Err(OtherPort(self.to_string()).into()),
            _ => Ok(port),
        }
    }

    /// Returns the number of pairs of rings that the port decides on, if it does.
    pub fn pairs(&self) -> Option<u16> {
        self.name.pairs()
    }

    /// Returns the number of pairs of rings that a card has if its operator names none.
    pub fn pairs_default(&self) -> u16 {
        let suggested = match self.pairs {
            Pairs::One => 1,
            Pairs::Descriptors | Pairs::Usual => PAIRS_USUAL,
        };
        self.pairs().unwrap_or(suggested)
    }

    /// Returns the largest MTU whose frames the port carries, if that is less than any other port does.
    pub fn mtu_max(&self) -> Option<u16> {
        self.name.mtu_max()
    }

    /// Returns the descriptors that the port needs: numbers of inherited ones, and names of those of a call.
    pub fn descriptors(&self) -> &[String] {
        self.name.descriptors()
    }

    /// Returns the thing of the host that the port uses by its name.
    pub fn target(&self) -> Option<Target> {
        self.name.target()
    }

    /// Returns the help of an option that names a port.
    pub fn help() -> String {
        let help: Vec<_> = PORTS.iter().map(|kind| kind.help).collect();
        format!("The port of the card: {}", help.join("; "))
    }

    /// Returns the default number of pairs of rings, in words.
    pub fn pairs_help() -> String {
        let of = |pairs| move |kind: Pairs| kind == pairs;
        format!(
            "1 with {}, the number of descriptors with {}, otherwise {PAIRS_USUAL}",
            forms(of(Pairs::One), "and"),
            forms(of(Pairs::Descriptors), "and")
        )
    }
}

/// Returns the forms of the names of some ports, with this word before the last one.
fn forms(is_listed: impl Fn(Pairs) -> bool, last: &str) -> String {
    let forms: Vec<_> = PORTS.iter().filter(|kind| is_listed(kind.pairs)).map(|kind| kind.form).collect();
    match &forms[..] {
        [before @ .., end] if !before.is_empty() => format!("{} {last} {end}", before.join(", ")),
        forms => forms.concat(),
    }
}

impl FromStr for PortName {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        if text.starts_with("vhost-user:") {
            return Err(UnknownPort::VhostUser.into());
        }
        let parsed = PORTS.iter().find_map(|kind| Some((kind, (kind.parse)(text)?)));
        let (kind, name) = parsed.ok_or(UnknownPort::Unknown)?;
        Ok(Self { name: name?, pairs: kind.pairs })
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

impl fmt::Debug for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

/// Two names are equal if their texts are.
impl PartialEq for PortName {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for PortName {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_displayed_as_it_was_written() {
        for text in [
            "null",
            "null,rate=7",
            "null,length=60-65550",
            "null,rate=1000000,length=100-100",
            "loop",
            "tap:vm1.net-0",
            "tap:fifteen-letters",
            "tap-fd:3",
            "tap-fd:7,5,6",
            "tap-fd:queue-0,queue-1",
            "stream:/run/a,b:c",
            "switch:lan-1",
            "switch:a,vlan=4094",
            "switch:a,uplink=vm0",
            "xdp:eth0",
            "xdp:eth0.5,queue=4095",
            "user",
            "user,--tcp-ports=22,,80,-4",
        ] {
            assert_eq!(text.parse::<PortName>().unwrap().to_string(), text);
        }
        let same = "null,rate=0,length=60-1514".parse::<PortName>().unwrap();
        assert_eq!(same, "null".parse::<PortName>().unwrap());
        assert_eq!("null,length=99".parse::<PortName>().unwrap().to_string(), "null,length=99-99");
    }

    #[test]
    fn a_text_that_is_not_a_port_is_refused() {
        const UNKNOWN: &str =
            "a port is tap:NAME, tap-fd:N, switch:NAME, user, stream:PATH, xdp:IFNAME, loop or null";
        const TAP: &str =
            "the name of a TAP has 1 to 15 letters, digits and signs other than / : % and a comma";
        const FDS: &str =
            "the descriptors of a TAP are 1 to 127 numbers from 3 on, or names, with commas between them";
        const QUEUE: &str = "the queue of an interface is a number from 0 to 4095";
        const INTERFACE: &str =
            "the name of an interface has 1 to 15 letters, digits and signs other than / : % and a comma";
        const RATE: &str = "the rate of test frames is a number from 0 to 1000000 a second";
        const LENGTH: &str = "the length of test frames is MIN-MAX, from 60 to 65550 bytes";
        for (text, error) in [
            ("", UNKNOWN),
            ("nul", UNKNOWN),
            ("tap", UNKNOWN),
            ("tap,a", UNKNOWN),
            ("loop,rate=1", "a loop port has no option \"rate=1\""),
            ("tap:", TAP),
            ("tap:.", TAP),
            ("tap:sixteen-letters-", TAP),
            ("tap:a b", TAP),
            ("tap:tap%d", TAP),
            ("tap:a,vlan=1", TAP),
            ("tap-fd:", FDS),
            ("tap-fd:2", FDS),
            ("tap-fd:+3", FDS),
            ("tap-fd:3,", FDS),
            ("tap-fd:3,4,3", "the descriptor 3 is named twice"),
            ("tap-fd:a,3,a", "the descriptor a is named twice"),
            ("tap-fd:a b", FDS),
            ("stream:", "the path of a stream has 1 to 107 bytes"),
            ("xdp:", INTERFACE),
            ("xdp:a/b", INTERFACE),
            ("xdp:a,queue=", QUEUE),
            ("xdp:a,queue=+1", QUEUE),
            ("xdp:a,queue=4096", QUEUE),
            ("xdp:a,copy", "an xdp port has no option \"copy\": it has queue=N"),
            ("xdp:a,queue=1,queue=1", QUEUE),
            (
                "vhost-user:/run/a",
                "there is no port vhost-user:PATH any more: connect the hypervisor to that back-end itself, or use stream:PATH",
            ),
            ("stream", UNKNOWN),
            (
                "user,",
                "\"\" is no option of passt: write each with its value in one, as in user,--tcp-ports=8080:80, and a comma in a value twice",
            ),
            (
                "user,--fd=3",
                "passt cannot have the option \"--fd=3\" here, because kickless starts it with a socket of its own",
            ),
            ("users", UNKNOWN),
            ("switch", UNKNOWN),
            ("switch:", "the name of a switch has 1 to 64 letters, digits and signs other than a comma"),
            ("switch:a,vlan=0", "a VLAN is a number from 1 to 4094"),
            ("null,", "a null port has no option \"\": it has rate=N and length=MIN-MAX"),
            ("null,rat=1", "a null port has no option \"rat=1\": it has rate=N and length=MIN-MAX"),
            ("null,rate=1000001", RATE),
            ("null,rate=-1", RATE),
            ("null,length=59-60", LENGTH),
            ("null,length=70-60", LENGTH),
            ("null,length=60-65551", LENGTH),
            ("null,length=", LENGTH),
        ] {
            assert_eq!(text.parse::<PortName>().unwrap_err().to_string(), error, "{text}");
        }
    }

    #[test]
    fn the_help_has_all_ports() {
        assert_eq!(
            PortName::pairs_help(),
            "1 with tap:NAME, switch:NAME, user, stream:PATH and xdp:IFNAME, the number of descriptors with tap-fd:N, \
             otherwise 64"
        );
        let help = PortName::help();
        assert!(help.starts_with(
            "The port of the card: tap:NAME is a TAP, which is made if it does not exist; tap-fd:N"
        ));
        assert!(help.ends_with("to each pair of queues, with these lengths in bytes"), "{help}");
    }
}
