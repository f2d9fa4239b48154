//! Property tests of the parser of transmitted frames.

use kickless_net::{Frame, features};
use kickless_spec::features::Features;
use kickless_spec::net::{FRAME_MAX, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

fn headers() -> impl Strategy<Value = Header> {
    // Valid values are rare among random ones.
    let small = prop_oneof![0..100u16, any::<u16>()];
    let kind = prop_oneof![0..6u8, 0x80..0x86u8, any::<u8>()];
    (prop_oneof![0..8u8, any::<u8>()], kind, any::<[u16; 3]>(), small.clone(), small).prop_map(
        |(flags, gso_type, [hdr_len, gso_size, num_buffers], start, offset)| Header {
            flags,
            gso_type,
            hdr_len: hdr_len.into(),
            gso_size: gso_size.into(),
            csum_start: start.into(),
            csum_offset: offset.into(),
            num_buffers: num_buffers.into(),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn an_accepted_frame_is_consistent(
        header in headers(),
        len in prop_oneof![0..200u64, 65_500..65_600u64, any::<u64>()],
        accepted in any::<u64>(),
    ) {
        let accepted = Features::from_bits_retain(accepted);
        let (features, header_len) = (features::in_force(accepted), features::header_len(accepted));
        let Ok(frame) = Frame::parse(&header, header_len, len, features) else { return Ok(()) };
        prop_assert_eq!(u64::from(frame.len) + header_len as u64, len);
        prop_assert!(frame.len as usize + size_of::<Header>() <= FRAME_MAX && frame.len >= 14);
        prop_assert_eq!(frame.checksum.is_some(), header.flags & HDR_F_NEEDS_CSUM != 0);
        if let Some(checksum) = frame.checksum {
            prop_assert!(features.contains(NetFeatures::CSUM));
            prop_assert!(u32::from(checksum.start) + u32::from(checksum.offset) + 2 <= frame.len);
        }
        prop_assert_eq!(frame.segmentation.is_some(), header.gso_type != 0);
        if let Some(segmentation) = frame.segmentation {
            prop_assert!(segmentation.size > 0 && frame.checksum.is_some());
        }
    }

    #[test]
    fn a_frame_without_offloads_only_needs_a_valid_length(bytes in any::<[u8; 12]>(), len in 14..=65_550u64) {
        let header = Header::read_from_bytes(bytes.as_bytes()).map_err(|_| TestCaseError::fail("length"))?;
        let plain = Header { flags: header.flags & !HDR_F_NEEDS_CSUM, gso_type: 0, ..header };
        let frame = Frame::parse(&plain, 12, 12 + len, NetFeatures::empty());
        prop_assert_eq!(frame.map(|frame| u64::from(frame.len)), Ok(len));
    }

    #[test]
    fn features_in_force_do_not_change(accepted in any::<u64>()) {
        let features = features::in_force(Features::from_bits_retain(accepted));
        prop_assert_eq!(features::in_force(Features::from_bits_retain(features.bits())), features);
    }
}
