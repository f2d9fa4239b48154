//! Tells network cards from disks by their features.
//!
//! vhost-user has no message for the kind of a device, and the feature bits of both kinds overlap. A disk
//! that is taken for a card, or the other way round, answers nothing. So a connection looks for features that
//! only the other kind can have. The features of a card contradict one another if they are those of a disk:
//! `card::features` has that check.

use kickless_spec::blk::BlkFeatures;
use kickless_spec::features::Features;
use kickless_spec::net::NetFeatures;

use crate::error::Error;

/// The bits that are features of cards, and that disks do not have (virtio 1.3, sections 5.1.3 and 5.2.3).
const OF_CARDS: NetFeatures = NetFeatures::MTU
    .union(NetFeatures::GUEST_TSO6)
    .union(NetFeatures::CTRL_RX)
    .union(NetFeatures::CTRL_VLAN)
    .union(NetFeatures::CTRL_RX_EXTRA)
    .union(NetFeatures::GUEST_ANNOUNCE)
    .union(NetFeatures::MQ)
    .union(NetFeatures::CTRL_MAC_ADDR)
    .union(NetFeatures::GUEST_USO4)
    .union(NetFeatures::GUEST_USO6)
    .union(NetFeatures::HOST_USO);

/// Refuses a back-end whose features are those of a card.
///
/// # Errors
/// It is a card.
pub(crate) fn refuse_card(offered: Features) -> Result<(), Error> {
    match is_card(offered) {
        true => Err(Error::OtherDevice { found: "a network card" }),
        false => Ok(()),
    }
}

/// Returns whether these features are those of a card, and of no disk.
pub(crate) fn is_card(offered: Features) -> bool {
    let (net, blk) =
        (NetFeatures::from_bits_truncate(offered.bits()), BlkFeatures::from_bits_truncate(offered.bits()));
    // The bit of MRG_RXBUF is that of the wear of an eMMC, which has a cache to flush.
    net.intersects(OF_CARDS) || net.contains(NetFeatures::MRG_RXBUF) && !blk.contains(BlkFeatures::FLUSH)
}
