//! Chooses the features of a card.

use kickless_spec::features::Features;
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header, NetFeatures, VLAN_TAG_LEN};

use crate::card::options::CardOptions;
use crate::device_kind::is_card;
use crate::error::Error;

/// The features that the driver uses if they are offered.
const ALWAYS: NetFeatures = NetFeatures::MAC.union(NetFeatures::MTU).union(NetFeatures::STATUS);
/// The offloads of sent frames.
const TRANSMIT: NetFeatures = NetFeatures::CSUM
    .union(NetFeatures::HOST_TSO4)
    .union(NetFeatures::HOST_TSO6)
    .union(NetFeatures::HOST_ECN)
    .union(NetFeatures::HOST_USO);
/// The received frames that can be longer than the MTU.
const LONG_RECEIVE: NetFeatures = NetFeatures::GUEST_TSO4
    .union(NetFeatures::GUEST_TSO6)
    .union(NetFeatures::GUEST_USO4)
    .union(NetFeatures::GUEST_USO6);
/// The offloads of received frames.
const RECEIVE: NetFeatures = LONG_RECEIVE.union(NetFeatures::GUEST_CSUM).union(NetFeatures::GUEST_ECN);
/// The features that are not used without a configuration space. It has the values of some of them, and
/// without it, the position of the control queue is not known.
pub(crate) const OF_CONFIG: NetFeatures = ALWAYS.union(NetFeatures::CTRL_VQ);

/// Features, each with those that it requires one of (virtio 1.3, section 5.1.3.1).
const REQUIREMENTS: [(NetFeatures, NetFeatures); 9] = [
    (NetFeatures::HOST_TSO4, NetFeatures::CSUM),
    (NetFeatures::HOST_TSO6, NetFeatures::CSUM),
    (NetFeatures::HOST_USO, NetFeatures::CSUM),
    (NetFeatures::HOST_ECN, NetFeatures::HOST_TSO4.union(NetFeatures::HOST_TSO6)),
    (NetFeatures::GUEST_TSO4, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_TSO6, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_USO4, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_USO6, NetFeatures::GUEST_CSUM),
    (NetFeatures::GUEST_ECN, NetFeatures::GUEST_TSO4.union(NetFeatures::GUEST_TSO6)),
];

/// Returns the features of the card in a set of all features.
pub(crate) fn of_card(features: Features) -> NetFeatures {
    NetFeatures::from_bits_truncate(features.bits())
}

/// Refuses a back-end whose features are those of a disk.
///
/// # Errors
/// It is a disk.
fn refuse_disk(offered: Features) -> Result<(), Error> {
    let net = of_card(offered);
    // Taken for those of a card, the features of a disk lack others that they require: that of flushes is
    // GUEST_ECN without GUEST_TSO4, and that of several queues is HOST_TSO6 without CSUM.
    let lacks_some =
        REQUIREMENTS.iter().any(|(feature, requires)| net.contains(*feature) && !net.intersects(*requires));
    match lacks_some && !is_card(offered) {
        true => Err(Error::OtherDevice { found: "a disk" }),
        false => Ok(()),
    }
}

/// Chooses the features of the card from those that are offered.
pub(crate) fn choose(options: &CardOptions, offered: Features) -> Result<Features, Error> {
    refuse_disk(offered)?;
    let offered = of_card(offered);
    let offers = |feature| offered.contains(feature);
    let mut wanted = ALWAYS;
    wanted.set(NetFeatures::MQ, options.pairs != 1);
    for (choice, feature, what, set) in [
        (options.transmit_offloads, NetFeatures::CSUM, "VIRTIO_NET_F_CSUM", TRANSMIT),
        (options.receive_offloads, NetFeatures::GUEST_CSUM, "VIRTIO_NET_F_GUEST_CSUM", RECEIVE),
        (options.mergeable, NetFeatures::MRG_RXBUF, "VIRTIO_NET_F_MRG_RXBUF", NetFeatures::MRG_RXBUF),
        (options.control, NetFeatures::CTRL_VQ, "VIRTIO_NET_F_CTRL_VQ", NetFeatures::CTRL_VQ),
    ] {
        wanted.set(set, choice.decide(offers(feature), what)?);
    }
    let mut features = wanted & offered;
    for (feature, requires) in REQUIREMENTS {
        if !features.intersects(requires) {
            features.remove(feature);
        }
    }
    Ok(Features::from_bits_retain(features.bits()))
}

/// Returns the number of bytes that a receive buffer needs.
pub(crate) fn buffer_len(features: NetFeatures, wanted: u32, mtu: u16) -> u32 {
    /// Shorter buffers would only waste memory: each takes a whole number of cache lines.
    const LEN_MIN: u32 = 128;
    let frame_len = match features.intersects(LONG_RECEIVE) {
        true => FRAME_MAX,
        false => size_of::<Header>() + ETHERNET_HEADER_LEN + VLAN_TAG_LEN + usize::from(mtu),
    };
    let needs = if features.contains(NetFeatures::MRG_RXBUF) { 0 } else { frame_len };
    wanted.clamp(LEN_MIN, 1 << 20).max(needs as u32)
}

#[cfg(test)]
mod tests {
    use kickless_spec::blk::BlkFeatures;

    use super::*;
    use crate::choice::Choice;
    use crate::device_kind::refuse_card;

    fn chosen(options: &CardOptions, offered: NetFeatures) -> NetFeatures {
        of_card(choose(options, Features::from_bits_retain(offered.bits())).unwrap())
    }

    #[test]
    fn features_come_with_their_requirements() {
        let options = CardOptions { receive_offloads: Choice::Auto, pairs: 2, ..CardOptions::new("") };
        let all = chosen(&options, NetFeatures::all());
        let others = NetFeatures::CTRL_VQ | NetFeatures::MQ | NetFeatures::MRG_RXBUF;
        assert_eq!(all, ALWAYS | TRANSMIT | RECEIVE | others);
        let left = chosen(&options, NetFeatures::all() - NetFeatures::GUEST_CSUM - NetFeatures::CTRL_VQ);
        assert_eq!(left, all - RECEIVE - NetFeatures::CTRL_VQ);
        assert_eq!(chosen(&options, NetFeatures::HOST_ECN | NetFeatures::MTU), NetFeatures::MTU);
    }

    #[test]
    fn a_disk_is_no_card() {
        for disk in [
            BlkFeatures::all(),
            BlkFeatures::FLUSH,
            BlkFeatures::SEG_MAX | BlkFeatures::BLK_SIZE | BlkFeatures::MQ,
            BlkFeatures::SIZE_MAX | BlkFeatures::SEG_MAX | BlkFeatures::RO | BlkFeatures::FLUSH,
        ] {
            let offered = Features::from_bits_retain(disk.bits());
            assert!(refuse_card(offered).is_ok(), "{disk:?}");
            assert!(matches!(refuse_disk(offered), Err(Error::OtherDevice { .. })), "{disk:?}");
        }
    }

    #[test]
    fn a_card_is_no_disk() {
        for card in [
            NetFeatures::all(),
            NetFeatures::MRG_RXBUF,
            NetFeatures::MAC | NetFeatures::CTRL_VQ | NetFeatures::CTRL_RX,
            NetFeatures::CSUM | NetFeatures::HOST_TSO4 | NetFeatures::MTU,
        ] {
            let offered = Features::from_bits_retain(card.bits());
            assert!(refuse_disk(offered).is_ok(), "{card:?}");
            assert!(matches!(refuse_card(offered), Err(Error::OtherDevice { .. })), "{card:?}");
        }
        // Both kinds can have these.
        let both = Features::from_bits_retain((NetFeatures::MAC | NetFeatures::CSUM).bits());
        for both in [Features::empty(), Features::VERSION_1, both] {
            assert!(refuse_card(both).is_ok() && refuse_disk(both).is_ok(), "{both:?}");
        }
    }

    #[test]
    fn a_required_feature_that_is_missing_is_an_error() {
        let options = CardOptions { mergeable: Choice::On, ..CardOptions::new("") };
        assert!(matches!(choose(&options, Features::empty()), Err(Error::NotOffered { .. })));
    }

    #[test]
    fn buffers_are_long_enough_for_whole_frames() {
        assert_eq!(buffer_len(NetFeatures::MRG_RXBUF | RECEIVE, 2048, 9000), 2048);
        assert_eq!(buffer_len(NetFeatures::GUEST_CSUM, 1024, 1500), 1530);
        assert_eq!(buffer_len(NetFeatures::GUEST_TSO4, 2048, 1500), 65_562);
        assert_eq!(buffer_len(NetFeatures::MRG_RXBUF, 1, 1500), 128);
    }
}
