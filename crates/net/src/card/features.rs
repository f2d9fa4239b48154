//! The features of a card: their requirements, and the lengths that follow from them.

use kickless_spec::features::Features;
use kickless_spec::net::{
    ETHERNET_HEADER_LEN, FRAME_MAX, Header, LEGACY_HEADER_LEN, NetFeatures, VLAN_TAG_LEN,
};

/// Pairs of a feature and a set of features. The feature requires at least one of the set (virtio 1.3,
/// section 5.1.3.1). A feature stands before the features that require it, so that one pass
/// checks all.
const REQUIREMENTS: &[(NetFeatures, NetFeatures)] = &[
    (NetFeatures::GUEST_TSO4, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_TSO6, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_ECN, NetFeatures::GUEST_TSO4.union(NetFeatures::GUEST_TSO6)),
    (NetFeatures::GUEST_USO4, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_USO6, NetFeatures::GUEST_CSUM),
    (NetFeatures::HOST_TSO4, NetFeatures::CSUM),
    (NetFeatures::HOST_TSO6, NetFeatures::CSUM),
    (NetFeatures::HOST_ECN, NetFeatures::HOST_TSO4.union(NetFeatures::HOST_TSO6)),
    (NetFeatures::HOST_USO, NetFeatures::CSUM),
];

/// Features that let the driver receive frames longer than its MTU.
const LONG_RECEIVE: NetFeatures = NetFeatures::GUEST_TSO4
    .union(NetFeatures::GUEST_TSO6)
    .union(NetFeatures::GUEST_USO4)
    .union(NetFeatures::GUEST_USO6);

/// The offloads of a card, which an operator can switch off.
const OFFLOADS: NetFeatures = NetFeatures::CSUM
    .union(NetFeatures::HOST_TSO4)
    .union(NetFeatures::HOST_TSO6)
    .union(NetFeatures::HOST_ECN)
    .union(NetFeatures::HOST_USO)
    .union(NetFeatures::GUEST_CSUM)
    .union(NetFeatures::GUEST_TSO4)
    .union(NetFeatures::GUEST_TSO6)
    .union(NetFeatures::GUEST_ECN)
    .union(NetFeatures::GUEST_USO4)
    .union(NetFeatures::GUEST_USO6)
    .union(NetFeatures::CTRL_GUEST_OFFLOADS);

/// Returns the features that are in force after the driver accepted these. Features that require the control
/// queue stay in force without it, because QEMU serves the control queue itself and does not pass its feature
/// on.
pub fn in_force(accepted: Features) -> NetFeatures {
    let mut features = NetFeatures::from_bits_truncate(accepted.bits());
    for &(feature, requires) in REQUIREMENTS {
        if !features.intersects(requires) {
            features.remove(feature);
        }
    }
    features
}

/// Returns the length of the header of each frame.
pub fn header_len(accepted: Features) -> usize {
    let merges = accepted.bits() & NetFeatures::MRG_RXBUF.bits() != 0;
    match merges || accepted.contains(Features::VERSION_1) {
        true => size_of::<Header>(),
        false => LEGACY_HEADER_LEN,
    }
}

/// Returns the length of the longest frame, header included, that a driver with these features in force must
/// be able to receive.
pub fn receive_len_max(features: NetFeatures, header_len: usize, mtu: u16) -> usize {
    match features.intersects(LONG_RECEIVE) {
        true => header_len + (FRAME_MAX - size_of::<Header>()),
        false => header_len + ETHERNET_HEADER_LEN + VLAN_TAG_LEN + usize::from(mtu),
    }
}

/// Returns the features that a card offers. They are the same for all ports. A TAP takes all offloads of
/// transmitted frames. The card completes checksums and segments packets itself for a driver that does not
/// accept them.
pub fn offered(has_mac: bool, pairs_max: u16, offload: bool) -> NetFeatures {
    let mut features = NetFeatures::MRG_RXBUF
        | NetFeatures::MTU
        | NetFeatures::STATUS
        | NetFeatures::CTRL_VQ
        | NetFeatures::CTRL_RX
        | NetFeatures::CTRL_RX_EXTRA
        | NetFeatures::CTRL_VLAN
        | NetFeatures::CTRL_MAC_ADDR
        | NetFeatures::GUEST_ANNOUNCE;
    features.set(OFFLOADS, offload);
    features.set(NetFeatures::MAC, has_mac);
    features.set(NetFeatures::MQ, pairs_max > 1);
    features
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_force_of(features: NetFeatures) -> NetFeatures {
        in_force(Features::from_bits_retain(features.bits()))
    }

    #[test]
    fn offered_features_have_what_they_require() {
        for features in [offered(false, 1, true), offered(true, 4, true), offered(true, 4, false)] {
            assert_eq!(in_force_of(features), features);
            // Others require it (virtio 1.3, section 5.1.3.1).
            assert!(features.contains(NetFeatures::CTRL_VQ));
        }
        assert!(!offered(true, 1, true).contains(NetFeatures::MQ));
        let no_offload = offered(true, 1, false);
        assert_eq!(receive_len_max(no_offload, 12, 1500), 1530);
        assert!(!no_offload.intersects(OFFLOADS));
    }

    #[test]
    fn features_without_their_requirements_are_removed() {
        assert_eq!(in_force_of(NetFeatures::GUEST_ECN | NetFeatures::HOST_ECN), NetFeatures::empty());
        // TSO requires checksums, and ECN requires TSO.
        let chain = NetFeatures::GUEST_ECN | NetFeatures::GUEST_TSO4;
        assert_eq!(in_force_of(chain), NetFeatures::empty());
        assert_eq!(in_force_of(chain | NetFeatures::GUEST_CSUM), chain | NetFeatures::GUEST_CSUM);
    }

    #[test]
    fn a_feature_stands_before_those_that_require_it() {
        for (n, &(_, requires)) in REQUIREMENTS.iter().enumerate() {
            assert!(REQUIREMENTS[n..].iter().all(|(feature, _)| !requires.intersects(*feature)));
        }
    }

    #[test]
    fn multiqueue_stays_in_force_without_a_control_queue() {
        let accepted = Features::from_bits_retain((NetFeatures::MQ | NetFeatures::HOST_TSO4).bits());
        assert_eq!(in_force(accepted | Features::VERSION_1), NetFeatures::MQ);
    }

    #[test]
    fn lengths_follow_from_features() {
        let merging = Features::from_bits_retain(NetFeatures::MRG_RXBUF.bits());
        assert_eq!((header_len(Features::empty()), header_len(merging)), (10, 12));
        assert_eq!(header_len(Features::VERSION_1), 12);
        assert_eq!(receive_len_max(NetFeatures::empty(), 12, 1500), 1530);
        assert_eq!(receive_len_max(NetFeatures::GUEST_TSO6, 12, 1500), 65_562);
        assert_eq!(receive_len_max(NetFeatures::GUEST_CSUM, 10, u16::MAX), 65_563);
    }
}
