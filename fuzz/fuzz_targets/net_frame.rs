//! Parses headers and lengths of a guest's frames and commands of its control queue, with any features.
#![no_main]

use kickless_net::{Command, Frame, features};
use kickless_spec::features::Features;
use kickless_spec::net::{FRAME_MAX, Header, NetFeatures};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, u64, u16, [u8; 12], &[u8])| {
    let (accepted, len, pairs_max, header, command) = input;
    let accepted = Features::from_bits_retain(accepted);
    let (features, header_len) = (features::in_force(accepted), features::header_len(accepted));
    let header: Header = zerocopy::transmute!(header);
    if let Ok(frame) = Frame::parse(&header, header_len, len, features) {
        assert_eq!(u64::from(frame.len) + header_len as u64, len);
        assert!((14..=FRAME_MAX - size_of::<Header>()).contains(&(frame.len as usize)));
        if let Some(checksum) = frame.checksum {
            assert!(u32::from(checksum.start) + u32::from(checksum.offset) + 2 <= frame.len);
        }
        assert!(frame.segmentation.is_none_or(|segmentation| segmentation.size > 0));
    }
    if let Ok(command) = Command::parse(command, features, pairs_max) {
        match command {
            Command::SetPairs(pairs) => assert!((1..=pairs_max).contains(&pairs)),
            Command::Announced => assert!(features.contains(NetFeatures::GUEST_ANNOUNCE)),
        }
    }
});
