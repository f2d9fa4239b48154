//! The memory for the tables of a chain of images.

/// The default size of the cache of L2 tables for each image, as in QEMU.
const IMAGE_CACHE: u64 = 32 << 20;
/// The default size of the cache for a chain of many images.
const CHAIN_CACHE_MAX: u64 = 128 << 20;
/// The places for slices that a chain may have, as a multiple of those that its memory fills. A place takes
/// 48 bytes and a slice 4096, so the places of a chain take a tenth of its memory.
const PLACES_PER_SLICE: u64 = 8;

/// The L2 tables of one image.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableBytes {
    /// The tables that exist, or may exist later. Slices of others take no memory.
    pub(super) used: u64,
    /// The tables that the size of the virtual disk permits.
    pub(super) all: u64,
}

/// Divides the memory of a chain among the caches of its images, and returns the size of each cache.
///
/// Images with small tables get what they need, and the others get equal parts of the rest. A cache whose
/// tables fit has a place for each slice of its disk, as far as [`PLACES_PER_SLICE`] permits, because slices
/// without entries need places too.
pub(super) fn cache_sizes(asked: Option<u64>, images: &[TableBytes]) -> Vec<u64> {
    let count = images.len() as u64;
    let budget = asked.unwrap_or((IMAGE_CACHE * count).min(CHAIN_CACHE_MAX));
    let most = budget.min((budget / count.max(1)).saturating_mul(PLACES_PER_SLICE));
    let mut order: Vec<usize> = (0..images.len()).collect();
    order.sort_by_key(|&index| images[index].used);
    let (mut sizes, mut left) = (vec![0; images.len()], budget);
    for (index, rest) in order.into_iter().zip((1..=count).rev()) {
        let TableBytes { used, all } = images[index];
        let share = left / rest;
        sizes[index] = if used <= share { all.min(most) } else { share };
        left -= used.min(share);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(used: u64, all: u64) -> TableBytes {
        TableBytes { used, all }
    }

    #[test]
    fn what_fits_has_room_for_each_table() {
        assert_eq!(cache_sizes(None, &[image(5, 5)]), [5]);
        assert_eq!(cache_sizes(Some(100), &[image(50, 50), image(0, 60), image(10, 1000)]), [50, 60, 100]);
        let large = 64 << 20;
        assert_eq!(cache_sizes(None, &[image(0, large)]), [IMAGE_CACHE]);
        assert_eq!(cache_sizes(None, &[image(large, large)]), [IMAGE_CACHE]);
    }

    #[test]
    fn small_tables_fit_and_large_ones_share() {
        assert_eq!(cache_sizes(Some(100), &[image(90, 90), image(10, 90), image(80, 80)]), [45, 90, 45]);
        assert_eq!(cache_sizes(Some(0), &[image(90, 90), image(10, 90)]), [0, 0]);
    }

    /// The longest chain, of images that ask for as much as they can.
    #[test]
    fn a_hostile_chain_is_bounded() {
        for used in [0, 1 << 20, u64::MAX] {
            let images = [image(used, u64::MAX); 65];
            let sizes = cache_sizes(None, &images);
            let filled: u64 = sizes.iter().map(|size| used.min(*size)).sum();
            let places = sizes.iter().sum::<u64>();
            assert!(filled <= CHAIN_CACHE_MAX && places <= PLACES_PER_SLICE * CHAIN_CACHE_MAX, "{used}");
        }
    }
}
