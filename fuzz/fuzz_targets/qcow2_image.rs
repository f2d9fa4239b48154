//! Parses, checks and repairs qcow2 images with any bytes.
#![no_main]

use kickless_disk::qcow2_fuzzing::{entries, image};
use libfuzzer_sys::fuzz_target;

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

fuzz_target!(|input: &[u8]| {
    match input {
        [0, rest @ ..] => {
            image(rest);
        }
        [1, bits, order, flags, rest @ ..] => entries([*bits, *order, *flags], rest),
        [_, how, rest @ ..] => {
            image(&with_header(*how, rest));
        }
        _ => {}
    }
});
