//! Runs the parsers and the check for the fuzz target.

use super::check::recorded::Recorded;
use super::check::repair::repair;
use super::check::report::Report;
use super::check::{WINDOW, check};
use super::format::entry::{counted, decode, encode, load_entries};
use super::format::geometry::{Geometry, Version};
use kickless_memory::View;
use std::path::Path;
use std::sync::Arc;

/// The guest memory that [`requests`] needs, in bytes.
pub const MEMORY_BYTES: u64 = super::hostile::MEMORY_BYTES;

/// The longest image.
const BYTES_MAX: usize = 1 << 20;

/// Checks and repairs an image, which may have any bytes. Returns whether the repair succeeds.
///
/// # Panics
/// The result depends on the window, or the repair leaves faults besides entries that cannot be true.
pub fn image(bytes: &[u8]) -> bool {
    let bytes = &bytes[..bytes.len().min(BYTES_MAX)];
    let image = Recorded::new(bytes.to_vec());
    let whole = check(&image, WINDOW).ok();
    assert_eq!(check(&image, 64).ok(), whole, "the window matters");
    let is_repaired = repair(&image, WINDOW, &mut |_, _| {}).is_ok();
    if is_repaired {
        let report = check(&image, WINDOW).expect("it was repaired");
        let left = Report { bad: report.bad, overlaps: report.overlaps, ..Report::default() };
        // References that are not known make leaks.
        let left = if left == Report::default() { left } else { Report { leaks: report.leaks, ..left } };
        assert_eq!(report, left);
    }
    is_repaired
}

/// Runs requests on an image that the input describes, and on its backing image: two files of one directory.
/// Returns whether the image is opened.
///
/// # Panics
/// A request does not end, or a file changes where it must not.
pub fn requests(memory: &Arc<View>, files: [&Path; 2], input: &[u8]) -> bool {
    super::hostile::requests(memory, files, input).is_opened
}

/// Decodes entries of a table in an image with these sizes.
///
/// # Panics
/// An entry is encoded as another one.
pub fn entries(sizes: [u8; 3], bytes: &[u8]) {
    let [bits, order, flags] = sizes;
    let version = if flags & 1 == 0 { Version::V3 } else { Version::V2 };
    let Ok(geometry) = Geometry::new(version, u32::from(bits), u32::from(order), flags & 2 != 0) else {
        return;
    };
    for raw in load_entries(geometry, bytes) {
        if let Ok(mapping) = decode(geometry, raw) {
            assert_eq!(decode(geometry, encode(geometry, mapping)), Ok(mapping));
            assert!(counted(geometry, mapping).count() <= 3);
        }
    }
}
