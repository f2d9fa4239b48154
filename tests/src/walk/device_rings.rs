//! The rings of a hostile session, and what they are for.

use anyhow::Result;
use kickless_spec::features::Features;
use kickless_spec::net::NetFeatures;
use kickless_testing::Random;

use crate::driver::memory::Ram;
use crate::walk::requests::{DATA, Place, SLOT};
use crate::walk::ring::Ring;

/// The kind of device behind a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A disk.
    Disk,
    /// A card with this many pairs of rings at most.
    Card(u16),
}

/// The part of a ring in its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Requests of a disk.
    Requests,
    /// Buffers for frames.
    Receive,
    /// Frames.
    Transmit,
    /// Commands.
    Control,
}

/// A ring with its memory.
pub struct RingOfRole {
    /// The ring.
    pub ring: Ring,
    /// The memory of its chains.
    pub place: Place,
    /// Its part.
    pub role: Role,
    /// Looks at it in a row that found nothing.
    pub stalls: u32,
}

/// Makes the rings of a device, of random sizes.
///
/// # Errors
/// The memory is too small.
pub fn make_rings(
    kind: Kind,
    features: Features,
    ram: &mut Ram,
    random: &mut Random,
) -> Result<Vec<RingOfRole>> {
    let net = NetFeatures::from_bits_truncate(features.bits());
    let roles: Vec<(u16, Role)> = match kind {
        Kind::Disk => (0..1 + random.below(3) as u16).map(|index| (index, Role::Requests)).collect(),
        Kind::Card(pairs_max) => {
            let pairs = if net.contains(NetFeatures::MQ) { pairs_max } else { 1 };
            let pair = |pair| [(2 * pair, Role::Receive), (2 * pair + 1, Role::Transmit)];
            let control = net.contains(NetFeatures::CTRL_VQ).then_some((2 * pairs, Role::Control));
            (0..pairs).flat_map(pair).chain(control).collect()
        }
    };
    let is_packed = features.contains(Features::RING_PACKED);
    let mut rings = Vec::new();
    for (index, role) in roles {
        let size = if random.one_in(8) { 1 << random.below(11) } else { 256 << random.below(3) };
        let ring = Ring::new(ram, index, size, is_packed)?;
        let slots = SLOT * usize::from(ring.slots());
        let (slots_at, data_at) = (ram.take(slots, 64)?, ram.take(2 * DATA, 4096)?);
        let (slots, data) = (ram.area(slots_at, slots, 16)?, ram.area(data_at, 2 * DATA, 16)?);
        let place = Place { slots, slots_at, data, data_at, areas: ring.areas };
        if matches!(role, Role::Transmit) {
            place.write_templates(random);
        }
        rings.push(RingOfRole { ring, place, role, stalls: 0 });
    }
    Ok(rings)
}
