//! Parses headers and lengths of a guest's frames, and segments frames with these headers, with any features.
#![no_main]

use kickless_net::offload::{SEGMENTED_BYTES_MAX, SEGMENTS_MAX, Segments, Undo, complete_checksum, undo};
use kickless_net::{Frame, features};
use kickless_spec::features::Features;
use kickless_spec::net::{FRAME_MAX, Header, NetFeatures};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, u64, [u8; 12], &[u8])| {
    let (accepted, len, header, bytes) = input;
    let accepted = Features::from_bits_retain(accepted);
    let (in_force, header_len) = (features::in_force(accepted), features::header_len(accepted));
    let header: Header = zerocopy::transmute!(header);
    if let Ok(frame) = Frame::parse(&header, header_len, len, in_force) {
        assert_eq!(u64::from(frame.len) + header_len as u64, len);
        assert!((14..=FRAME_MAX - size_of::<Header>()).contains(&(frame.len as usize)));
        if let Some(checksum) = frame.checksum {
            assert!(u32::from(checksum.start) + u32::from(checksum.offset) + 2 <= frame.len);
        }
        assert!(frame.segmentation.is_none_or(|segmentation| segmentation.size > 0));
        let passed = frame.header(&header);
        assert_eq!(Frame::parse(&passed, header_len, len, in_force), Ok(frame));
    }
    // The bytes as a frame that passed.
    let all = (size_of::<Header>() + bytes.len()) as u64;
    let Ok(frame) = Frame::parse(&header, size_of::<Header>(), all, NetFeatures::all()) else { return };
    let header = frame.header(&header);
    let mut bytes = bytes.to_vec();
    match undo(&header, &bytes, in_force) {
        Undo::Nothing => assert!(frame.checksum.is_none() || in_force.contains(NetFeatures::GUEST_CSUM)),
        Undo::Checksum(checksum) => assert!(complete_checksum(&mut bytes, checksum)),
        Undo::Segments => {
            let Some(mut segments) = Segments::of(&header, &bytes) else { return };
            let mut space = vec![0; segments.len_max(&bytes)];
            let (mut count, mut len) = (0, 0);
            while let Some(written) = segments.write_next(&bytes, &mut space) {
                (count, len) = (count + 1, len + written);
            }
            assert!((1..=bytes.len().min(SEGMENTS_MAX)).contains(&count));
            assert!(count <= frame.segments_max() as usize && len <= SEGMENTED_BYTES_MAX);
        }
    }
});
