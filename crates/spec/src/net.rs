//! virtio-net (virtio 1.3, section 5.1).

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length of an Ethernet address.
pub const MAC_LEN: usize = 6;
/// Length of an Ethernet header without a VLAN tag.
pub const ETHERNET_HEADER_LEN: usize = 14;
/// Length of a VLAN tag.
pub const VLAN_TAG_LEN: usize = 4;
/// The longest frame with its [`Header`]: 12 bytes of header, 14 of Ethernet, and 65536 of an IP packet. A
/// receiver of GSO frames must have room for it (virtio 1.3, section 5.1.6.3.1).
pub const FRAME_MAX: usize = size_of::<Header>() + ETHERNET_HEADER_LEN + (1 << 16);
/// The smallest `mtu` (virtio 1.3, section 5.1.4.1).
pub const MTU_MIN: u16 = 68;
/// The largest `mtu`.
pub const MTU_MAX: u16 = u16::MAX;
/// The MTU of Ethernet, which applies without [`NetFeatures::MTU`].
pub const MTU_DEFAULT: u16 = 1500;
/// The largest `max_virtqueue_pairs` (virtio 1.3, section 5.1.4.1).
pub const PAIRS_MAX: u16 = 0x8000;

bitflags! {
    /// Feature bits of a network card (virtio 1.3, section 5.1.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct NetFeatures: u64 {
        /// The device completes partial checksums.
        const CSUM = 1 << 0;
        /// The driver takes packets with partial checksums.
        const GUEST_CSUM = 1 << 1;
        /// The driver changes its offloads while it runs.
        const CTRL_GUEST_OFFLOADS = 1 << 2;
        /// `mtu` is valid.
        const MTU = 1 << 3;
        /// `mac` is valid.
        const MAC = 1 << 5;
        /// Legacy: the device takes GSO packets of any type.
        const GSO = 1 << 6;
        /// The driver takes unsegmented TCP over IPv4.
        const GUEST_TSO4 = 1 << 7;
        /// The driver takes unsegmented TCP over IPv6.
        const GUEST_TSO6 = 1 << 8;
        /// The driver takes unsegmented TCP with ECN.
        const GUEST_ECN = 1 << 9;
        /// The driver takes unfragmented UDP.
        const GUEST_UFO = 1 << 10;
        /// The device takes unsegmented TCP over IPv4.
        const HOST_TSO4 = 1 << 11;
        /// The device takes unsegmented TCP over IPv6.
        const HOST_TSO6 = 1 << 12;
        /// The device takes unsegmented TCP with ECN.
        const HOST_ECN = 1 << 13;
        /// The device takes unfragmented UDP.
        const HOST_UFO = 1 << 14;
        /// One frame may fill several receive buffers.
        const MRG_RXBUF = 1 << 15;
        /// `status` is valid.
        const STATUS = 1 << 16;
        /// There is a control queue.
        const CTRL_VQ = 1 << 17;
        /// The control queue sets receive modes.
        const CTRL_RX = 1 << 18;
        /// The control queue sets VLAN filters.
        const CTRL_VLAN = 1 << 19;
        /// The control queue sets more receive modes.
        const CTRL_RX_EXTRA = 1 << 20;
        /// The driver announces its addresses when it is asked to.
        const GUEST_ANNOUNCE = 1 << 21;
        /// There are several pairs of queues; `max_virtqueue_pairs` is valid.
        const MQ = 1 << 22;
        /// The control queue sets the address.
        const CTRL_MAC_ADDR = 1 << 23;
        /// The control queue returns statistics.
        const DEVICE_STATS = 1 << 50;
        /// Hashes are of the inner packet of a tunnel.
        const HASH_TUNNEL = 1 << 51;
        /// Notifications of each queue are coalesced.
        const VQ_NOTF_COAL = 1 << 52;
        /// Notifications are coalesced.
        const NOTF_COAL = 1 << 53;
        /// The driver takes unsegmented UDP over IPv4.
        const GUEST_USO4 = 1 << 54;
        /// The driver takes unsegmented UDP over IPv6.
        const GUEST_USO6 = 1 << 55;
        /// The device takes unsegmented UDP.
        const HOST_USO = 1 << 56;
        /// The header of a received packet has a hash.
        const HASH_REPORT = 1 << 57;
        /// `hdr_len` is exact.
        const GUEST_HDRLEN = 1 << 59;
        /// Receive-side scaling.
        const RSS = 1 << 60;
        /// The device coalesces segments and tells how many.
        const RSC_EXT = 1 << 61;
        /// The card is the standby of another card with the same address.
        const STANDBY = 1 << 62;
        /// `speed` and `duplex` are valid.
        const SPEED_DUPLEX = 1 << 63;
    }
}

impl NetFeatures {
    /// The offloads of received frames, which the driver can switch off while it runs
    /// ([`NetFeatures::CTRL_GUEST_OFFLOADS`]).
    pub const GUEST_OFFLOADS: Self = Self::GUEST_CSUM
        .union(Self::GUEST_TSO4)
        .union(Self::GUEST_TSO6)
        .union(Self::GUEST_ECN)
        .union(Self::GUEST_UFO)
        .union(Self::GUEST_USO4)
        .union(Self::GUEST_USO6);
}

/// [`Header::flags`]: the checksum is partial; `csum_start` and `csum_offset` say where it goes.
pub const HDR_F_NEEDS_CSUM: u8 = 1;
/// [`Header::flags`]: the checksum is right. From the device only.
pub const HDR_F_DATA_VALID: u8 = 2;

/// [`Header::gso_type`]: no segmentation.
pub const GSO_NONE: u8 = 0;
/// [`Header::gso_type`]: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// [`Header::gso_type`]: UDP over IPv4, to be fragmented.
pub const GSO_UDP: u8 = 3;
/// [`Header::gso_type`]: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// [`Header::gso_type`]: UDP, to be segmented.
pub const GSO_UDP_L4: u8 = 5;
/// [`Header::gso_type`]: ECN is set. A flag beside [`GSO_TCPV4`] or [`GSO_TCPV6`].
pub const GSO_ECN: u8 = 0x80;

/// The head of each frame (`struct virtio_net_hdr`, `virtio_net_hdr_v1` in Linux; virtio 1.3, section 5.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// `HDR_F_*`.
    pub flags: u8,
    /// `GSO_*`.
    pub gso_type: u8,
    /// Length of the headers that each segment repeats. A hint without [`NetFeatures::GUEST_HDRLEN`].
    pub hdr_len: U16,
    /// Bytes of payload in each segment.
    pub gso_size: U16,
    /// Byte of the frame at which the checksum begins.
    pub csum_start: U16,
    /// Offset of the checksum's field from `csum_start`.
    pub csum_offset: U16,
    /// Receive buffers that the frame fills. Zero from the driver.
    pub num_buffers: U16,
}

/// Length of a [`Header`] without `num_buffers`. Legacy drivers without [`NetFeatures::MRG_RXBUF`] use this
/// header.
pub const LEGACY_HEADER_LEN: usize = core::mem::offset_of!(Header, num_buffers);
/// Offset of [`Header::num_buffers`].
pub const HEADER_NUM_BUFFERS: usize = LEGACY_HEADER_LEN;

/// [`Config::status`]: the link is up.
pub const S_LINK_UP: u16 = 1;
/// [`Config::status`]: the device asks the driver to announce its addresses.
pub const S_ANNOUNCE: u16 = 2;
/// [`Config::speed`]: not known.
pub const SPEED_UNKNOWN: u32 = u32::MAX;
/// [`Config::duplex`]: not known.
pub const DUPLEX_UNKNOWN: u8 = 0xff;

/// `struct virtio_net_config`. Fields of features that were not offered are zero or have the value "not
/// known".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The Ethernet address.
    pub mac: [u8; MAC_LEN],
    /// `S_*`.
    pub status: U16,
    /// The most pairs of queues.
    pub max_virtqueue_pairs: U16,
    /// The MTU.
    pub mtu: U16,
    /// Speed in Mbit/s, up to 2^31 - 1. Greater values mean "not known".
    pub speed: U32,
    /// 0 half, 1 full. Other values mean "not known".
    pub duplex: u8,
    /// Longest key of receive-side scaling.
    pub rss_max_key_size: u8,
    /// Longest table of receive-side scaling.
    pub rss_max_indirection_table_length: U16,
    /// Packet types that the device can hash.
    pub supported_hash_types: U32,
    /// Tunnel types whose inner packets the device can hash.
    pub supported_tunnel_types: U32,
}

/// The readable head of each command in the control queue (virtio 1.3, section 5.1.6.5). Data follows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControlHeader {
    /// `CTRL_*`.
    pub class: u8,
    /// The command within its class.
    pub command: u8,
}

/// Answer to a command: the device carried it out.
pub const OK: u8 = 0;
/// Answer to a command: the device did not carry it out.
pub const ERR: u8 = 1;

/// Class of commands: receive modes.
pub const CTRL_RX: u8 = 0;
/// Class of commands: addresses.
pub const CTRL_MAC: u8 = 1;
/// Class of commands: VLAN filters.
pub const CTRL_VLAN: u8 = 2;
/// Class of commands: announcements.
pub const CTRL_ANNOUNCE: u8 = 3;
/// Class of commands: pairs of queues.
pub const CTRL_MQ: u8 = 4;
/// Class of commands: offloads of the driver.
pub const CTRL_GUEST_OFFLOADS: u8 = 5;
/// Command of [`CTRL_RX`]: take all frames. The data of these commands is one byte, 0 or 1.
pub const CTRL_RX_PROMISC: u8 = 0;
/// Command of [`CTRL_RX`]: take all multicast frames.
pub const CTRL_RX_ALLMULTI: u8 = 1;
/// Command of [`CTRL_RX`]: take all unicast frames. Needs [`NetFeatures::CTRL_RX_EXTRA`], as those after it.
pub const CTRL_RX_ALLUNI: u8 = 2;
/// Command of [`CTRL_RX`]: take no multicast frames.
pub const CTRL_RX_NOMULTI: u8 = 3;
/// Command of [`CTRL_RX`]: take no unicast frames.
pub const CTRL_RX_NOUNI: u8 = 4;
/// Command of [`CTRL_RX`]: take no broadcast frames.
pub const CTRL_RX_NOBCAST: u8 = 5;
/// Command of [`CTRL_MAC`]: the addresses to take, as two tables. Each table is a [`U32`] with the number of
/// addresses, and the addresses. The first one has unicast addresses, the second one multicast addresses.
pub const CTRL_MAC_TABLE_SET: u8 = 0;
/// Command of [`CTRL_MAC`]: the card's own address.
pub const CTRL_MAC_ADDR_SET: u8 = 1;
/// Command of [`CTRL_VLAN`]: take frames of a VLAN, whose number is a [`U16`].
pub const CTRL_VLAN_ADD: u8 = 0;
/// Command of [`CTRL_VLAN`]: take no frames of a VLAN, whose number is a [`U16`].
pub const CTRL_VLAN_DEL: u8 = 1;
/// The greatest number of a VLAN.
pub const VLAN_MAX: u16 = 0xfff;
/// Command of [`CTRL_GUEST_OFFLOADS`]: the offloads to use, as a little-endian 64-bit set of the features of
/// that name.
pub const CTRL_GUEST_OFFLOADS_SET: u8 = 0;
/// Command of [`CTRL_ANNOUNCE`]: the driver has announced its addresses.
pub const CTRL_ANNOUNCE_ACK: u8 = 0;
/// Command of [`CTRL_MQ`]: the number of pairs to use, as a [`U16`].
pub const CTRL_MQ_VQ_PAIRS_SET: u8 = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn layout() {
        // virtio 1.3, sections 5.1.4 and 5.1.6, counted by hand.
        assert_eq!(offset_of!(Config, status), 6);
        assert_eq!(offset_of!(Config, max_virtqueue_pairs), 8);
        assert_eq!(offset_of!(Config, mtu), 10);
        assert_eq!((offset_of!(Config, speed), offset_of!(Config, duplex)), (12, 16));
        assert_eq!(offset_of!(Config, supported_hash_types), 20);
        assert_eq!(size_of::<Config>(), 28);
        assert_eq!((size_of::<Header>(), LEGACY_HEADER_LEN), (12, 10));
        assert_eq!(offset_of!(Header, csum_start), 6);
        assert_eq!(size_of::<ControlHeader>(), 2);
        assert_eq!(FRAME_MAX, 65_562);
    }

    #[test]
    fn features_are_numbered_as_in_the_specification() {
        let names = [
            (0, "CSUM GUEST_CSUM CTRL_GUEST_OFFLOADS MTU"),
            (5, "MAC GSO GUEST_TSO4 GUEST_TSO6 GUEST_ECN GUEST_UFO HOST_TSO4 HOST_TSO6 HOST_ECN HOST_UFO"),
            (15, "MRG_RXBUF STATUS CTRL_VQ CTRL_RX CTRL_VLAN CTRL_RX_EXTRA GUEST_ANNOUNCE MQ CTRL_MAC_ADDR"),
            (
                50,
                "DEVICE_STATS HASH_TUNNEL VQ_NOTF_COAL NOTF_COAL GUEST_USO4 GUEST_USO6 HOST_USO HASH_REPORT",
            ),
            (59, "GUEST_HDRLEN RSS RSC_EXT STANDBY SPEED_DUPLEX"),
        ];
        let mut all = 0;
        for (first, names) in names {
            for (nth, name) in names.split_whitespace().enumerate() {
                let bit = NetFeatures::from_name(name).map(|feature| feature.bits());
                assert_eq!(bit, Some(1 << (first + nth)), "{name}");
                all |= 1 << (first + nth);
            }
        }
        assert_eq!(NetFeatures::all().bits(), all);
    }
}
