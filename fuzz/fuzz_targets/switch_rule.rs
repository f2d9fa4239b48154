//! Judges frames of a card with an address of its own: any bytes, and neighbour discovery of IPv6 that is
//! made of its parts, of which the target knows whether it names another address.
#![no_main]

use kickless_net::switch_fuzzing::{Judged, judge};
use libfuzzer_sys::fuzz_target;

const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The types of messages, each with the length before its options.
const MESSAGES: [(u8, usize); 5] = [(133, 8), (134, 16), (135, 24), (136, 24), (137, 40)];
/// Extension headers that a packet may have before the message, the last one with its own unit of length.
const EXTENSIONS: [u8; 4] = [0, 43, 60, 51];

/// Returns a frame with a message behind extension headers, and whether an option names another address.
fn discovery(extensions: &[u8], kind: u8, options: &[(u8, u8)]) -> (Vec<u8>, bool) {
    let mut frame = [&[0x33, 0x33, 0, 0, 0, 1][..], &OWN, &[0x86, 0xdd]].concat();
    let kinds: Vec<u8> =
        extensions.iter().map(|kind| EXTENSIONS[usize::from(*kind) % EXTENSIONS.len()]).collect();
    let mut header = [0; 40];
    header[6] = *kinds.first().unwrap_or(&58);
    frame.extend(header);
    for (nth, (kind, byte)) in kinds.iter().zip(extensions).enumerate() {
        let units = byte >> 6;
        let len = if *kind == 51 { (usize::from(units) + 2) * 4 } else { (usize::from(units) + 1) * 8 };
        let start = frame.len();
        frame.extend([*kinds.get(nth + 1).unwrap_or(&58), units]);
        frame.resize(start + len, *byte);
    }
    let (kind, before) = MESSAGES[usize::from(kind) % MESSAGES.len()];
    let start = frame.len();
    frame.push(kind);
    frame.resize(start + before, 0);
    let mut names_another = false;
    for (kind, last) in options {
        let address = [2, 0, 0, 0, 0, *last];
        frame.extend([kind % 4, 1]);
        frame.extend(address);
        names_another |= [1, 2].contains(&(kind % 4)) && address != OWN;
    }
    (frame, names_another)
}

fuzz_target!(|input: (&[u8], u8, &[u8], Option<u16>, &[u8])| {
    let (extensions, kind, options, vlan, bytes) = input;
    let passes = judge(OWN, vlan, bytes) == Judged::Passes;
    // A frame from another address never passes.
    assert!(!passes || bytes[6..12] == OWN);
    let options: Vec<_> = options.chunks_exact(2).map(|two| (two[0], two[1])).collect();
    let (frame, names_another) = discovery(extensions, kind, &options);
    // A longer list of headers could hide a message, and one of options an address. They are refused.
    let is_spoofed = names_another || extensions.len() >= 8 || options.len() > 32;
    let expected = if is_spoofed { Judged::Spoofed } else { Judged::Passes };
    assert_eq!(judge(OWN, None, &frame), expected);
    // A frame that ends early is not taken for another one.
    let cut = usize::from(kind) % frame.len();
    judge(OWN, vlan, &frame[..cut]);
});
