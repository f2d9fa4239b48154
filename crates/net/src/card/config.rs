//! The configuration space.

use kickless_spec::net::{Config, DUPLEX_UNKNOWN, MAC_LEN, S_LINK_UP, SPEED_UNKNOWN};

/// Returns the configuration space of a card with these properties. The link is always up.
pub fn space(mac: Option<[u8; MAC_LEN]>, mtu: u16, pairs_max: u16) -> Config {
    Config {
        mac: mac.unwrap_or_default(),
        status: S_LINK_UP.into(),
        max_virtqueue_pairs: pairs_max.into(),
        mtu: mtu.into(),
        speed: SPEED_UNKNOWN.into(),
        duplex: DUPLEX_UNKNOWN,
        ..Config::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn each_property_is_in_its_bytes() {
        let space = space(Some([2, 3, 4, 5, 6, 7]), 0x1234, 0x0203);
        let bytes = space.as_bytes();
        assert_eq!(bytes[..12], [2, 3, 4, 5, 6, 7, 1, 0, 3, 2, 0x34, 0x12]);
        assert_eq!(bytes[12..17], [0xff; 5]);
        assert_eq!(bytes[17..], [0; 11]);
    }
}
