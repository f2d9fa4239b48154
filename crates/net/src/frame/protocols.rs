//! The numbers of protocols in frames: EtherTypes (IEEE 802.3), and next headers of IPv6 (RFC 8200).

pub(crate) const ETHERTYPE_IPV4: u16 = 0x0800;
pub(crate) const ETHERTYPE_ARP: u16 = 0x0806;
pub(crate) const ETHERTYPE_IPV6: u16 = 0x86dd;
/// The tag of a VLAN (IEEE 802.1Q), and that of a service provider (IEEE 802.1ad).
pub(crate) const ETHERTYPE_VLAN: u16 = 0x8100;
pub(crate) const ETHERTYPE_SERVICE: u16 = 0x88a8;

/// The length of the fixed header of IPv6, and the offset of the type of the next header in it.
pub(crate) const IPV6_HEADER: usize = 40;
pub(crate) const IPV6_NEXT_HEADER: usize = 6;
/// Extension headers of IPv6: hop-by-hop options, routing and destination options. Each names the next header
/// in its first byte. Its second byte is its length in units of eight bytes, without the first eight.
pub(crate) const IPV6_EXTENSIONS: [u8; 3] = [0, 43, 60];
/// The authentication header, with its length in units of four bytes behind the first eight (RFC 4302).
pub(crate) const AUTHENTICATION: u8 = 51;
pub(crate) const ICMPV6: u8 = 58;
