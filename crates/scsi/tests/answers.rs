//! Tests answers byte for byte.

mod common;

use common::{DISK, PLAIN, identity};
use kickless_scsi::{
    Identity, Inquiry, LbaExtent, LunSelect, Properties, Unit, UnmapLimits, entry, inquiry, lba_status,
    read_capacity_10, read_capacity_16, report_luns,
};

fn page(code: u8, disk: &Properties) -> Vec<u8> {
    inquiry(&Inquiry { page: Some(code), allocation: 0xffff }, Unit::Disk(disk), &identity())
}

#[test]
fn standard_inquiry_data() {
    let request = Inquiry { page: None, allocation: 255 };
    let bytes = inquiry(&request, Unit::Disk(&DISK), &identity());
    let mut expected = [0; 96];
    expected[..8].copy_from_slice(&[0, 0, 6, 0x12, 91, 0, 0, 2]);
    expected[8..36].copy_from_slice(b"KICKLESSDISK            1   ");
    // SAM-5, SPC-4, SBC-3.
    expected[58..64].copy_from_slice(&[0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0]);
    assert_eq!(bytes, expected);
    // The length is that of all data.
    let cut = inquiry(&Inquiry { allocation: 5, ..request }, Unit::Disk(&DISK), &identity());
    assert_eq!(cut, expected[..5]);
    assert_eq!(inquiry(&Inquiry { allocation: 0, ..request }, Unit::Disk(&DISK), &identity()), []);
    for (unit, kind) in [(Unit::ReportLuns, 0x1e), (Unit::Absent, 0x7f)] {
        let bytes = inquiry(&request, unit, &identity());
        assert_eq!((bytes[0], &bytes[1..]), (kind, &expected[1..]));
        let pages = inquiry(&Inquiry { page: Some(0), allocation: 255 }, unit, &identity());
        assert_eq!(pages, [kind, 0, 0, 1, 0]);
    }
}

#[test]
fn names_in_pages() {
    assert_eq!(page(0x00, &DISK), [0, 0, 0, 6, 0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2]);
    assert_eq!(page(0x80, &DISK), b"\0\x80\0\x06disk-1");
    let naa = identity().naa();
    let t10 = b"KICKLESSDISK            disk-1";
    let expected = [&[0, 0x83, 0, 46][..], &[1, 3, 0, 8], &naa, &[2, 1, 0, 30], t10].concat();
    assert_eq!(page(0x83, &DISK), expected);
    // The longest serial number fits into its designator.
    let long = Identity::new("", "", "", &"s".repeat(kickless_scsi::SERIAL_LEN_MAX)).unwrap();
    let request = Inquiry { page: Some(0x83), allocation: 0xffff };
    let bytes = inquiry(&request, Unit::Disk(&DISK), &long);
    assert_eq!((bytes.len(), bytes[3], bytes[19]), (172, 168, 152));
}

#[test]
fn block_limits() {
    let mut expected = [0; 64];
    expected[..4].copy_from_slice(&[0, 0xb0, 0, 60]);
    let unlimited = Properties { transfer_blocks_max: 2048, ..PLAIN };
    expected[8..12].copy_from_slice(&2048u32.to_be_bytes());
    assert_eq!(page(0xb0, &unlimited), expected);
    expected[4..8].copy_from_slice(&[0, 16, 0, 8]);
    expected[8..12].copy_from_slice(&1024u32.to_be_bytes());
    expected[12..16].copy_from_slice(&256u32.to_be_bytes());
    expected[20..24].copy_from_slice(&1000u32.to_be_bytes());
    expected[24..28].copy_from_slice(&4u32.to_be_bytes());
    expected[28..32].copy_from_slice(&8u32.to_be_bytes());
    expected[32..36].copy_from_slice(&[0x80, 0, 0, 1]);
    expected[36..44].copy_from_slice(&2048u64.to_be_bytes());
    assert_eq!(page(0xb0, &DISK), expected);
    let unaligned = Properties { unmap: DISK.unmap.map(|u| UnmapLimits { granularity: 0, ..u }), ..DISK };
    assert_eq!(page(0xb0, &unaligned)[28..36], [0; 8]);
}

#[test]
fn characteristics_and_provisioning() {
    let mut expected = [0; 64];
    expected[..6].copy_from_slice(&[0, 0xb1, 0, 60, 0, 1]);
    assert_eq!(page(0xb1, &DISK), expected);
    expected[5] = 0;
    assert_eq!(page(0xb1, &PLAIN), expected);
    assert_eq!(page(0xb2, &DISK), [0, 0xb2, 0, 4, 0, 0xe4, 2, 0]);
    assert_eq!(page(0xb2, &PLAIN), [0, 0xb2, 0, 4, 0, 0, 0, 0]);
    for (disk, bytes) in [
        (Properties { unmap: None, is_thin: false, ..DISK }, [0x64, 1]),
        (Properties { write_same_unmaps: false, unmapped_reads_zeroes: false, ..DISK }, [0x80, 2]),
        // Without WRITE SAME, it frees nothing.
        (Properties { write_same_blocks_max: 0, unmap: None, ..DISK }, [0, 0]),
    ] {
        assert_eq!(page(0xb2, &disk)[5..7], bytes);
    }
}

#[test]
fn capacities() {
    assert_eq!(read_capacity_10(&DISK), [0, 0, 0x0f, 0xff, 0, 0, 2, 0]);
    for blocks in [1 << 32, (1 << 32) + 1, u64::MAX] {
        let large = Properties { blocks, block_size: 4096, ..PLAIN };
        assert_eq!(read_capacity_10(&large), [0xff, 0xff, 0xff, 0xff, 0, 0, 0x10, 0]);
    }
    let long = |disk: &Properties| read_capacity_16(disk, 32);
    let mut expected = [0; 32];
    expected[..16].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0x0f, 0xff, 0, 0, 2, 0, 0, 3, 0xc0, 1]);
    assert_eq!(long(&DISK), expected);
    expected[13..16].copy_from_slice(&[0, 0, 0]);
    assert_eq!(long(&PLAIN), expected);
    assert_eq!(read_capacity_16(&PLAIN, 12), expected[..12]);
    let keeps_data = Properties { unmapped_reads_zeroes: false, ..DISK };
    assert_eq!(long(&keeps_data)[14..16], [0x80, 1]);
}

#[test]
fn allocation_of_blocks() {
    let extents = [
        LbaExtent { first: 5, count: 10, is_allocated: true },
        LbaExtent { first: 15, count: u32::MAX, is_allocated: false },
    ];
    let one = [0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 10, 0, 0, 0, 0];
    assert_eq!(lba_status(&extents, 24), one);
    let both = lba_status(&extents, 1000);
    assert_eq!((both.len(), both[3]), (40, 36));
    assert_eq!(both[24..], [0, 0, 0, 0, 0, 0, 0, 15, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]);
    for allocation in 0..50 {
        assert!(lba_status(&extents, allocation).len() <= allocation as usize);
    }
}

#[test]
fn lists_of_units() {
    let luns = [entry(0), entry(300)];
    let list = |select, allocation| report_luns(select, &luns, allocation);
    let ordinary = [0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0x2c, 0, 0, 0, 0, 0, 0];
    let well_known = [0xc1, 1, 0, 0, 0, 0, 0, 0];
    let with_head = |len, body: &[u8]| [&[0, 0, 0, len, 0, 0, 0, 0], body].concat();
    assert_eq!(list(LunSelect::Ordinary, 512), with_head(16, &ordinary));
    assert_eq!(list(LunSelect::WellKnown, 512), with_head(8, &well_known));
    assert_eq!(list(LunSelect::All, 512), with_head(24, &[&ordinary[..], &well_known].concat()));
    for allocation in 0..32 {
        let cut = with_head(24, &[&ordinary[..], &well_known].concat());
        assert_eq!(list(LunSelect::All, allocation), cut[..allocation as usize]);
    }
    assert_eq!(report_luns(LunSelect::Ordinary, &[], u32::MAX), [0; 8]);
}
