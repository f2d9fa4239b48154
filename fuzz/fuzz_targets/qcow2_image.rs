//! Parses, checks and repairs qcow2 images with any bytes.
#![no_main]

use kickless_qcow2::entry::{counted, decode, encode, load_entries};
use kickless_qcow2::{Geometry, Report, Version, WINDOW, check, repair};
use libfuzzer_sys::fuzz_target;
use recorded::Recorded;

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../../crates/qcow2/tests/images/recorded.rs"]
mod recorded;

/// The longest image.
const BYTES_MAX: usize = 1 << 20;
/// The smallest cluster.
const CLUSTER: usize = 512;

/// Returns an image with the least sound header, and `rest` as everything else.
fn with_header(how: u8, rest: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; CLUSTER];
    let mut put = |at: usize, value: u64, len: usize| {
        bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
    };
    put(0, 0x5146_49fb, 4);
    put(4, 3, 4);
    put(20, if how & 1 == 0 { 9 } else { 14 }, 4);
    put(24, 1 << 20, 8);
    put(36, 32, 4);
    // In clusters of 512 bytes: the L1 table, the refcount table, snapshots.
    let cluster = if how & 1 == 0 { CLUSTER as u64 } else { 1 << 14 };
    put(40, cluster, 8);
    put(48, 2 * cluster, 8);
    put(56, 1, 4);
    put(60, u64::from(how >> 6), 4);
    put(64, 3 * cluster, 8);
    put(72, if how & 3 == 3 { 17 } else { 1 }, 8);
    put(96, u64::from(how >> 3 & 7), 4);
    put(100, 104, 4);
    bytes.resize(cluster as usize, 0);
    bytes.extend(rest);
    bytes
}

/// Checks and repairs an image, which may have any bytes.
///
/// # Panics
/// The result depends on the window, or the repair leaves faults besides entries that cannot be true.
fn image(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(BYTES_MAX)];
    let whole = check(&bytes, WINDOW).ok();
    assert_eq!(check(&bytes, 64).ok(), whole, "the window matters");
    let image = Recorded::new(bytes.to_vec());
    if repair(&image, WINDOW, &mut |_, _| {}).is_ok() {
        let report = check(&image, WINDOW).expect("it was repaired");
        let left = Report { bad: report.bad, overlaps: report.overlaps, ..Report::default() };
        // References that are not known make leaks.
        let left = if left == Report::default() { left } else { Report { leaks: report.leaks, ..left } };
        assert_eq!(report, left);
    }
}

/// Decodes entries of a table in an image with these sizes.
///
/// # Panics
/// An entry is encoded as another one.
fn entries([bits, order, flags]: [u8; 3], bytes: &[u8]) {
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

fuzz_target!(|input: &[u8]| {
    match input {
        [0, rest @ ..] => image(rest),
        [1, bits, order, flags, rest @ ..] => entries([*bits, *order, *flags], rest),
        [_, how, rest @ ..] => image(&with_header(*how, rest)),
        _ => {}
    }
});
