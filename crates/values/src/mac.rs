//! Addresses of network cards.

use std::fmt;
use std::str::FromStr;

/// Bytes of an address.
const BYTES: usize = 6;
/// The bit of the first byte that marks the address of a group.
const GROUP: u8 = 1;

/// The Ethernet address of one card, written `52:54:00:12:34:56`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress([u8; BYTES]);

impl MacAddress {
    /// Returns the bytes of the address, in the order in which they are written.
    pub fn bytes(self) -> [u8; BYTES] {
        self.0
    }
}

impl FromStr for MacAddress {
    type Err = &'static str;

    /// Parses the address of one card: six bytes of two hexadecimal digits with colons between them.
    ///
    /// # Errors
    /// The reason why `text` is not such an address, as the end of a sentence.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "it must be six bytes such as 52:54:00:12:34:56";
        let mut bytes = [0; BYTES];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let digits =
                parts.next().filter(|digits| digits.len() == 2 && !digits.starts_with('+')).ok_or(FORM)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| FORM)?;
        }
        if parts.next().is_some() {
            return Err(FORM);
        }
        if bytes[0] & GROUP != 0 {
            return Err("it is the address of a group: make the first byte even");
        }
        if bytes == [0; BYTES] {
            return Err("it must not be zero");
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_as_they_are_read() {
        let address: MacAddress = "52:54:00:AB:cd:0f".parse().unwrap();
        assert_eq!(address.bytes(), [0x52, 0x54, 0, 0xab, 0xcd, 0x0f]);
        assert_eq!(address.to_string(), "52:54:00:ab:cd:0f");
    }

    #[test]
    fn others_are_refused() {
        for text in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "5:54:00:12:34:56",
            "52:54:00:12:34:+6",
            "52-54-00-12-34-56",
            "52:54:00:12:34:5g",
            "52:54:00:12:34:5é",
        ] {
            assert!(text.parse::<MacAddress>().unwrap_err().contains("six bytes"), "{text}");
        }
        assert!("53:54:00:12:34:56".parse::<MacAddress>().unwrap_err().contains("group"));
        assert!("ff:ff:ff:ff:ff:ff".parse::<MacAddress>().is_err());
        assert!("00:00:00:00:00:00".parse::<MacAddress>().is_err());
    }
}
