//! The roles of a card's rings.

use kickless_spec::net::NetFeatures;

/// The role of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Carries frames to the driver.
    Receive {
        /// The number of the pair that the ring belongs to, from 0.
        pair: u16,
    },
    /// Carries frames from the driver.
    Transmit {
        /// The number of the pair that the ring belongs to, from 0.
        pair: u16,
    },
    /// Carries commands from the driver.
    Control,
}

/// Returns the number of rings of a card with at most this many pairs, the control ring included.
pub fn rings_max(pairs_max: u16) -> u16 {
    pairs_max.saturating_mul(2).saturating_add(1)
}

/// Returns the role of the ring with this number while these features are in force (virtio 1.3, section
/// 5.1.2), or `None` if there is no such ring. With MQ, the control ring follows the last pair that the card
/// can have. Without MQ, it follows the first pair.
pub fn role(index: u16, pairs_max: u16, features: NetFeatures) -> Option<Role> {
    let pairs = if features.contains(NetFeatures::MQ) { pairs_max } else { 1 };
    match (index / 2, index % 2) {
        (pair, 0) if pair == pairs => Some(Role::Control),
        (pair, _) if pair >= pairs => None,
        (pair, 0) => Some(Role::Receive { pair }),
        (pair, _) => Some(Role::Transmit { pair }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_ring_is_the_last() {
        let roles = |features| (0..8).map(|index| role(index, 3, features)).collect::<Vec<_>>();
        let receive = |pair| Some(Role::Receive { pair });
        let transmit = |pair| Some(Role::Transmit { pair });
        let control = Some(Role::Control);
        let one = [receive(0), transmit(0), control, None, None, None, None, None];
        assert_eq!(roles(NetFeatures::CTRL_VQ), one);
        let three =
            [receive(0), transmit(0), receive(1), transmit(1), receive(2), transmit(2), control, None];
        assert_eq!(roles(NetFeatures::MQ), three);
        assert_eq!(rings_max(3), 7);
    }
}
