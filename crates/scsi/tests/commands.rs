//! Tests the parser with right and wrong commands.

mod common;

use common::{DISK, PLAIN, READ_ONLY, cdb, on_disk};
use kickless_scsi::{
    Access, BlockDescriptor, Blocks, ByteCheck, Command, Data, FieldPointer, Inquiry, LunSelect, ModeSelect,
    ModeSense, OpcodeSelect, PageControl, Pages, PersistentAction, PersistentIn, PersistentReserveOut,
    Properties, ReportOpcodes, ReservationType, Sense, Transfer, Unit, parse, passes_attention,
};
use kickless_spec::scsi::opcode::*;
use kickless_spec::scsi::sense::{ILLEGAL_REQUEST, SAVING_PARAMETERS_NOT_SUPPORTED};

fn transfer(first: u64, count: u64) -> Transfer {
    Transfer { blocks: Blocks { first, count }, force_unit_access: false, disable_page_out: false }
}

/// The address of a block, its number of blocks, and flags, in the layout of each length.
fn blocks(opcode: u8, flags: u8, first: u64, count: u32) -> Vec<u8> {
    let (first, short, count) = (first.to_be_bytes(), (first as u32).to_be_bytes(), count.to_be_bytes());
    match opcode >> 5 {
        0 => cdb(opcode, &[(1, &short[1..]), (4, &count[3..])]),
        1 | 2 => cdb(opcode, &[(1, &[flags]), (2, &short), (7, &count[2..])]),
        4 => cdb(opcode, &[(1, &[flags]), (2, &first), (10, &count)]),
        _ => cdb(opcode, &[(1, &[flags]), (2, &short), (6, &count)]),
    }
}

const READS: [u8; 4] = [READ_6, READ_10, READ_12, READ_16];
const WRITES: [u8; 4] = [WRITE_6, WRITE_10, WRITE_12, WRITE_16];
const VERIFIES: [u8; 3] = [VERIFY_10, VERIFY_12, VERIFY_16];
const WRITE_VERIFIES: [u8; 3] = [WRITE_AND_VERIFY_10, WRITE_AND_VERIFY_12, WRITE_AND_VERIFY_16];

#[test]
fn reads_and_writes_of_each_length() {
    for (read, write) in READS.into_iter().zip(WRITES) {
        assert_eq!(on_disk(&blocks(read, 0, 100, 8)), Ok(Command::Read(transfer(100, 8))));
        assert_eq!(on_disk(&blocks(write, 0, 4088, 8)), Ok(Command::Write(transfer(4088, 8))));
    }
    // No blocks are 256 for READ(6), and none for the others.
    assert_eq!(on_disk(&blocks(READ_6, 0, 5, 0)), Ok(Command::Read(transfer(5, 256))));
    assert_eq!(on_disk(&blocks(READ_10, 0, 5, 0)), Ok(Command::Read(transfer(5, 0))));
    // The address of READ(6) has 21 bits.
    let large = Properties { blocks: 1 << 30, ..DISK };
    let last = parse(&[READ_6, 0xff, 0xff, 0xff, 1, 0], Unit::Disk(&large));
    assert_eq!(last, Ok(Command::Read(transfer(0x1f_ffff, 1))));
    // A field of the request may be longer than the command.
    let mut long = blocks(READ_10, 0, 100, 8);
    long.resize(32, 0xff);
    assert_eq!(on_disk(&long), Ok(Command::Read(transfer(100, 8))));
}

#[test]
fn flags_of_transfers() {
    for opcode in [READ_10, READ_12, READ_16, WRITE_10, WRITE_12, WRITE_16] {
        for (flags, disable_page_out, force_unit_access) in
            [(0x10, true, false), (0x08, false, true), (0x18, true, true)]
        {
            let expected = Transfer { force_unit_access, disable_page_out, ..transfer(7, 1) };
            let (Command::Read(found) | Command::Write(found)) =
                on_disk(&blocks(opcode, flags, 7, 1)).unwrap()
            else {
                panic!("{opcode:x}")
            };
            assert_eq!(found, expected);
        }
        // FUA_NV and RARC are ignored.
        assert!(on_disk(&blocks(opcode, 0x06, 7, 1)).is_ok());
    }
}

#[test]
fn protection_is_refused() {
    let compare = [COMPARE_AND_WRITE, WRITE_SAME_10, WRITE_SAME_16];
    let all = READS.into_iter().chain(WRITES).chain(VERIFIES).chain(WRITE_VERIFIES).chain(compare);
    for opcode in all.filter(|opcode| opcode >> 5 != 0) {
        for flags in [0x20, 0x80, 0xe0] {
            let refused = on_disk(&blocks(opcode, flags, 0, 1));
            assert_eq!(refused, Err(Sense::invalid_field(1, 7)), "{opcode:x}");
        }
    }
}

#[test]
fn blocks_are_within_the_disk() {
    for opcode in READS.into_iter().chain(WRITES).chain(VERIFIES).chain(WRITE_VERIFIES) {
        assert!(on_disk(&blocks(opcode, 0, 4095, 1)).is_ok(), "{opcode:x}");
        for (first, count) in [(4095, 2), (4096, 1), (0x1f_ffff, 1)] {
            assert_eq!(on_disk(&blocks(opcode, 0, first, count)), Err(Sense::OUT_OF_RANGE), "{opcode:x}");
        }
        if opcode >> 5 == 0 {
            continue;
        }
        // No blocks at the end are within it, and none behind it are not.
        assert!(on_disk(&blocks(opcode, 0, 4096, 0)).is_ok());
        for first in [4097, 0x8000_0000, u32::MAX.into()] {
            assert_eq!(on_disk(&blocks(opcode, 0, first, 0)), Err(Sense::OUT_OF_RANGE), "{opcode:x}");
        }
    }
    for opcode in [READ_16, WRITE_16, VERIFY_16, WRITE_AND_VERIFY_16, SYNCHRONIZE_CACHE_16, WRITE_SAME_16] {
        for (first, count) in [(u64::MAX, 1), (u64::MAX, 0), (1 << 63, 1), (u64::MAX - 1, u32::MAX)] {
            assert_eq!(on_disk(&blocks(opcode, 0, first, count)), Err(Sense::OUT_OF_RANGE), "{opcode:x}");
        }
    }
}

#[test]
fn transfers_have_a_limit() {
    for (opcodes, count_at) in [
        ([READ_10, WRITE_10, VERIFY_10, WRITE_AND_VERIFY_10], 7),
        ([READ_12, WRITE_12, VERIFY_12, WRITE_AND_VERIFY_12], 6),
        ([READ_16, WRITE_16, VERIFY_16, WRITE_AND_VERIFY_16], 10),
    ] {
        for opcode in opcodes {
            assert!(on_disk(&blocks(opcode, 0, 0, 1024)).is_ok());
            let refused = on_disk(&blocks(opcode, 0, 0, 1025));
            assert_eq!(refused, Err(Sense::invalid_field(count_at, 7)), "{opcode:x}");
        }
    }
    let small = Properties { transfer_blocks_max: 128, ..DISK };
    let refused = parse(&blocks(READ_6, 0, 0, 0), Unit::Disk(&small));
    assert_eq!(refused, Err(Sense::invalid_field(4, 7)));
}

#[test]
fn byte_checks() {
    let range = Blocks { first: 3, count: 2 };
    for opcode in VERIFIES {
        for (flags, check, data) in [
            (0x00, ByteCheck::Medium, Data::None),
            (0x02, ByteCheck::Each, Data::Out(1024)),
            (0x06, ByteCheck::Same, Data::Out(512)),
        ] {
            let command = on_disk(&blocks(opcode, flags | 0x10, 3, 2)).unwrap();
            assert_eq!(command, Command::Verify { blocks: range, check });
            assert_eq!(command.data(512), data);
        }
        assert_eq!(on_disk(&blocks(opcode, 0x04, 3, 2)), Err(Sense::invalid_field(1, 2)));
        assert_eq!(on_disk(&blocks(opcode, 0x06, 3, 0)).unwrap().data(512), Data::None);
    }
    for opcode in WRITE_VERIFIES {
        for (flags, compare) in [(0x00, false), (0x02, true)] {
            let command = on_disk(&blocks(opcode, flags | 0x10, 3, 2)).unwrap();
            assert_eq!(command, Command::WriteAndVerify { blocks: range, compare });
            assert_eq!(command.data(512), Data::Out(1024));
        }
        for flags in [0x04, 0x06] {
            assert_eq!(on_disk(&blocks(opcode, flags, 3, 2)), Err(Sense::invalid_field(1, 2)));
        }
    }
}

#[test]
fn caches_are_synchronized_to_the_end() {
    for opcode in [SYNCHRONIZE_CACHE_10, SYNCHRONIZE_CACHE_16] {
        for (first, count, expected) in [(0, 0, 4096), (4000, 0, 96), (4096, 0, 0), (10, 4000, 4000)] {
            let blocks_found = Blocks { first, count: expected };
            for (flags, immediate) in [(0, false), (2, true)] {
                let command = on_disk(&blocks(opcode, flags, first, count));
                assert_eq!(command, Ok(Command::SynchronizeCache { blocks: blocks_found, immediate }));
            }
        }
        for (first, count) in [(4097, 0), (4096, 1), (1, 4096)] {
            assert_eq!(on_disk(&blocks(opcode, 0, first, count)), Err(Sense::OUT_OF_RANGE));
        }
    }
    // A read-only disk has nothing to make durable.
    assert!(parse(&blocks(SYNCHRONIZE_CACHE_10, 0, 0, 0), Unit::Disk(&READ_ONLY)).is_ok());
}

#[test]
fn write_same() {
    for (opcode, count_at) in [(WRITE_SAME_10, 7), (WRITE_SAME_16, 10)] {
        let same = |first, count, unmap| {
            Ok(Command::WriteSame { blocks: Blocks { first, count }, unmap, no_data: false })
        };
        assert_eq!(on_disk(&blocks(opcode, 0, 8, 2048)), same(8, 2048, false));
        assert_eq!(on_disk(&blocks(opcode, 0x08, 8, 2048)), same(8, 2048, true));
        // No number of blocks is all to the end, within the limit.
        assert_eq!(on_disk(&blocks(opcode, 0, 2048, 0)), same(2048, 2048, false));
        assert_eq!(on_disk(&blocks(opcode, 0, 4096, 0)), same(4096, 0, false));
        for (first, count) in [(2047, 0), (0, 0), (0, 2049)] {
            let refused = on_disk(&blocks(opcode, 0, first, count));
            assert_eq!(refused, Err(Sense::invalid_field(count_at, 7)));
        }
        for (first, count) in [(4097, 0), (4096, 1), (0x8000_0000, 0)] {
            assert_eq!(on_disk(&blocks(opcode, 0, first, count)), Err(Sense::OUT_OF_RANGE));
        }
        // ANCHOR, PBDATA, LBDATA.
        for (flags, bit) in [(0x10, 4), (0x18, 4), (0x04, 2), (0x02, 1)] {
            assert_eq!(on_disk(&blocks(opcode, flags, 0, 1)), Err(Sense::invalid_field(1, bit)));
        }
        let keeps = Properties { write_same_unmaps: false, ..DISK };
        let refused = parse(&blocks(opcode, 0x08, 0, 1), Unit::Disk(&keeps));
        assert_eq!(refused, Err(Sense::invalid_field(1, 3)));
        assert_eq!(on_disk(&blocks(opcode, 0, 0, 7)).unwrap().data(4096), Data::Out(4096));
    }
    let no_data = on_disk(&blocks(WRITE_SAME_16, 0x09, 0, 1)).unwrap();
    let range = Blocks { first: 0, count: 1 };
    assert_eq!(no_data, Command::WriteSame { blocks: range, unmap: true, no_data: true });
    assert_eq!(no_data.data(512), Data::None);
    // WRITE SAME(10) has no such bit.
    let with_data = Command::WriteSame { blocks: range, unmap: false, no_data: false };
    assert_eq!(on_disk(&blocks(WRITE_SAME_10, 0x01, 0, 1)), Ok(with_data));
}

#[test]
fn compare_and_write() {
    let compare = |flags, first: u64, count| {
        on_disk(&cdb(COMPARE_AND_WRITE, &[(1, &[flags]), (2, &first.to_be_bytes()), (13, &[count])]))
    };
    let command = compare(0x18, 4080, 16).unwrap();
    let expected = Transfer { force_unit_access: true, disable_page_out: true, ..transfer(4080, 16) };
    assert_eq!(command, Command::CompareAndWrite(expected));
    assert_eq!(command.data(512), Data::Out(2 * 16 * 512));
    assert_eq!(compare(0, 0, 0), Ok(Command::CompareAndWrite(transfer(0, 0))));
    assert_eq!(compare(0, 0, 17), Err(Sense::invalid_field(13, 7)));
    assert_eq!(compare(0, 4081, 16), Err(Sense::OUT_OF_RANGE));
    assert_eq!(compare(0, u64::MAX, 1), Err(Sense::OUT_OF_RANGE));
}

#[test]
fn unmap_and_its_absence() {
    let unmap = |anchor, len: u16| cdb(UNMAP, &[(1, &[anchor]), (7, &len.to_be_bytes())]);
    assert_eq!(on_disk(&unmap(0, 24)), Ok(Command::Unmap { list_len: 24 }));
    assert_eq!(on_disk(&unmap(0, 0)).unwrap().data(512), Data::Out(0));
    assert_eq!(on_disk(&unmap(1, 24)), Err(Sense::invalid_field(1, 0)));
    for cdb in [unmap(0, 24), blocks(WRITE_SAME_10, 0, 0, 1), blocks(COMPARE_AND_WRITE, 0, 0, 0)] {
        assert_eq!(parse(&cdb, Unit::Disk(&PLAIN)), Err(Sense::INVALID_OPCODE));
    }
}

#[test]
fn read_only_disks_are_write_protected() {
    let others = [COMPARE_AND_WRITE, WRITE_SAME_10, WRITE_SAME_16, UNMAP];
    for opcode in WRITES.into_iter().chain(WRITE_VERIFIES).chain(others) {
        for (first, count) in [(0, 1), (0, 0), (5000, 1)] {
            let refused = parse(&blocks(opcode, 0, first, count), Unit::Disk(&READ_ONLY));
            assert_eq!(refused, Err(Sense::WRITE_PROTECTED), "{opcode:x}");
        }
    }
    // The fields come first.
    let refused = parse(&blocks(WRITE_10, 0x20, 0, 1), Unit::Disk(&READ_ONLY));
    assert_eq!(refused, Err(Sense::invalid_field(1, 7)));
    for opcode in READS.into_iter().chain(VERIFIES) {
        assert!(parse(&blocks(opcode, 0, 0, 1), Unit::Disk(&READ_ONLY)).is_ok());
    }
}

#[test]
fn inquiry() {
    let inquiry =
        |flags, page, len: u16| on_disk(&cdb(INQUIRY, &[(1, &[flags, page]), (3, &len.to_be_bytes())]));
    assert_eq!(inquiry(0, 0, 260), Ok(Command::Inquiry(Inquiry { page: None, allocation: 260 })));
    for page in [0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2] {
        let expected = Inquiry { page: Some(page), allocation: 255 };
        assert_eq!(inquiry(1, page, 255), Ok(Command::Inquiry(expected)));
    }
    for (flags, page) in [(0, 1), (0, 0x80), (1, 1), (1, 0x84), (1, 0xb3), (1, 0xff)] {
        assert_eq!(inquiry(flags, page, 255), Err(Sense::invalid_field(2, 7)), "{page:x}");
    }
    assert_eq!(inquiry(2, 0, 255), Err(Sense::invalid_field(1, 1)));
}

#[test]
fn mode_sense() {
    let short = |flags, page, subpage| on_disk(&[MODE_SENSE_6, flags, page, subpage, 200, 0]);
    let expected = ModeSense {
        is_long: false,
        descriptor: BlockDescriptor::Short,
        control: PageControl::Current,
        pages: Pages::Caching,
        allocation: 200,
    };
    assert_eq!(short(0, 0x08, 0), Ok(Command::ModeSense(expected)));
    let all = ModeSense { pages: Pages::All, control: PageControl::Changeable, ..expected };
    assert_eq!(short(0, 0x7f, 0xff), Ok(Command::ModeSense(all)));
    let control = ModeSense { pages: Pages::Control, control: PageControl::Default, ..expected };
    let control = ModeSense { descriptor: BlockDescriptor::None, ..control };
    assert_eq!(short(0x08, 0x8a, 0), Ok(Command::ModeSense(control)));
    // MODE SENSE(6) has no LLBAA.
    assert_eq!(short(0x10, 0x08, 0), Ok(Command::ModeSense(expected)));
    let saved = Sense::new(ILLEGAL_REQUEST, SAVING_PARAMETERS_NOT_SUPPORTED);
    assert_eq!(short(0, 0xc8, 0), Err(saved));
    for page in [0x00, 0x01, 0x1c, 0x3e] {
        assert_eq!(short(0, page, 0), Err(Sense::invalid_field(2, 5)));
    }
    for subpage in [1, 0xfe] {
        assert_eq!(short(0, 0x0a, subpage), Err(Sense::invalid_field(3, 7)));
    }
    for (flags, descriptor) in
        [(0, BlockDescriptor::Short), (0x10, BlockDescriptor::Long), (0x18, BlockDescriptor::None)]
    {
        let long = on_disk(&cdb(MODE_SENSE_10, &[(1, &[flags, 0x08]), (7, &[1, 2])]));
        let expected = ModeSense { is_long: true, descriptor, allocation: 0x102, ..expected };
        assert_eq!(long, Ok(Command::ModeSense(expected)));
    }
}

#[test]
fn mode_select() {
    let select = |is_long, list_len| Ok(Command::ModeSelect(ModeSelect { is_long, list_len }));
    assert_eq!(on_disk(&[MODE_SELECT_6, 0x10, 0, 0, 24, 0]), select(false, 24));
    assert_eq!(on_disk(&[MODE_SELECT_6, 0x10, 0, 0, 0, 0]), select(false, 0));
    assert_eq!(on_disk(&cdb(MODE_SELECT_10, &[(1, &[0x10]), (7, &[1, 0])])), select(true, 256));
    let long = on_disk(&cdb(MODE_SELECT_10, &[(1, &[0x10]), (7, &[1, 1])]));
    assert_eq!(long, Err(Sense::LIST_LENGTH));
    for opcode in [MODE_SELECT_6, MODE_SELECT_10] {
        // No PF, and SP.
        assert_eq!(on_disk(&cdb(opcode, &[])), Err(Sense::invalid_field(1, 4)));
        assert_eq!(on_disk(&cdb(opcode, &[(1, &[0x11])])), Err(Sense::invalid_field(1, 0)));
    }
}

#[test]
fn commands_about_the_unit() {
    assert_eq!(on_disk(&[0; 6]), Ok(Command::TestUnitReady));
    let sense = |descriptors| Ok(Command::RequestSense { descriptors, allocation: 252 });
    assert_eq!(on_disk(&[REQUEST_SENSE, 0, 0, 0, 252, 0]), sense(false));
    assert_eq!(on_disk(&[REQUEST_SENSE, 1, 0, 0, 252, 0]), sense(true));
    assert_eq!(on_disk(&cdb(READ_CAPACITY_10, &[(2, &[9; 4]), (8, &[1])])), Ok(Command::ReadCapacity10));
    let capacity = on_disk(&cdb(SERVICE_ACTION_IN_16, &[(1, &[0x10]), (10, &[0, 0, 1, 2])]));
    assert_eq!(capacity, Ok(Command::ReadCapacity16 { allocation: 0x102 }));
    let status = |first: u64| {
        on_disk(&cdb(SERVICE_ACTION_IN_16, &[(1, &[0x12]), (2, &first.to_be_bytes()), (13, &[24])]))
    };
    assert_eq!(status(4095), Ok(Command::GetLbaStatus { first: 4095, allocation: 24 }));
    for first in [4096, 4097, 1 << 63, u64::MAX] {
        assert_eq!(status(first), Err(Sense::OUT_OF_RANGE));
    }
    for (byte, select) in [(0, LunSelect::Ordinary), (1, LunSelect::WellKnown), (2, LunSelect::All)] {
        let luns = on_disk(&cdb(REPORT_LUNS, &[(2, &[byte]), (6, &[0, 1, 0, 0])]));
        assert_eq!(luns, Ok(Command::ReportLuns { select, allocation: 1 << 16 }));
    }
    assert_eq!(on_disk(&cdb(REPORT_LUNS, &[(2, &[3])])), Err(Sense::invalid_field(2, 7)));
    for (flags, start, flush) in [(0, false, true), (1, true, true), (4, false, false), (5, true, false)] {
        for immediate in [false, true] {
            let command = on_disk(&[START_STOP_UNIT, immediate.into(), 0, 0, flags, 0]);
            assert_eq!(command, Ok(Command::StartStopUnit { start, flush, immediate }));
        }
    }
    assert_eq!(on_disk(&[START_STOP_UNIT, 0, 0, 0, 2, 0]), Err(Sense::invalid_field(4, 1)));
    assert_eq!(on_disk(&[START_STOP_UNIT, 0, 0, 0, 0x31, 0]), Err(Sense::invalid_field(4, 7)));
    for (byte, prevent) in [(0, false), (1, true), (3, true), (0xfc, false)] {
        let command = on_disk(&[PREVENT_ALLOW_MEDIUM_REMOVAL, 0, 0, 0, byte, 0]);
        assert_eq!(command, Ok(Command::PreventAllowMediumRemoval { prevent }));
    }
}

#[test]
fn report_opcodes() {
    let report = |options, opcode, action: u16| {
        let [high, low] = action.to_be_bytes();
        let fields = [0x0c, options, opcode, high, low, 0, 0, 4, 0];
        on_disk(&cdb(MAINTENANCE_IN, &[(1, &fields)])).map(|command| match command {
            Command::ReportOpcodes(ReportOpcodes { select, timeouts, allocation: 1024 }) => {
                (select, timeouts)
            }
            other => panic!("{other:?}"),
        })
    };
    let one = |opcode, service_action| Ok((OpcodeSelect::One { opcode, service_action }, false));
    assert_eq!(report(0x80, 0, 0), Ok((OpcodeSelect::All, true)));
    assert_eq!(report(1, READ_10, 9), one(READ_10, None));
    assert_eq!(report(1, 0xff, 0), one(0xff, None));
    assert_eq!(report(2, PERSISTENT_RESERVE_IN, 2), one(PERSISTENT_RESERVE_IN, Some(2)));
    assert_eq!(report(2, 0xff, 2), one(0xff, Some(2)));
    assert_eq!(report(3, READ_10, 0), one(READ_10, None));
    assert_eq!(report(3, READ_10, 1), one(READ_10, Some(1)));
    assert_eq!(report(3, PERSISTENT_RESERVE_IN, 0), one(PERSISTENT_RESERVE_IN, Some(0)));
    for (options, opcode) in [(1, PERSISTENT_RESERVE_IN), (2, READ_10), (4, READ_10), (7, READ_10)] {
        assert_eq!(report(options, opcode, 0), Err(Sense::invalid_field(2, 2)));
    }
}

#[test]
fn reservations() {
    for (opcode, command) in [
        (RESERVE_6, Command::Reserve),
        (RESERVE_10, Command::Reserve),
        (RELEASE_6, Command::Release),
        (RELEASE_10, Command::Release),
    ] {
        assert_eq!(on_disk(&cdb(opcode, &[])), Ok(command));
        assert_eq!(on_disk(&cdb(opcode, &[(1, &[0x10])])), Err(Sense::invalid_field(1, 4)));
        assert_eq!(on_disk(&cdb(opcode, &[(1, &[0x01])])), Err(Sense::invalid_field(1, 0)));
    }
    let actions =
        [PersistentIn::Keys, PersistentIn::Reservation, PersistentIn::Capabilities, PersistentIn::FullStatus];
    for (number, action) in (0..).zip(actions) {
        let command = on_disk(&cdb(PERSISTENT_RESERVE_IN, &[(1, &[number]), (7, &[0x40, 0])]));
        assert_eq!(command, Ok(Command::PersistentReserveIn { action, allocation: 0x4000 }));
    }
}

#[test]
fn persistent_reserve_out() {
    let out = |action, scope_and_type, len: u32| {
        let fields: [(usize, &[u8]); 2] = [(1, &[action, scope_and_type]), (5, &len.to_be_bytes())];
        on_disk(&cdb(PERSISTENT_RESERVE_OUT, &fields))
    };
    let expected =
        |action, kind| Ok(Command::PersistentReserveOut(PersistentReserveOut { action, kind, list_len: 24 }));
    for (number, action) in [
        (0, PersistentAction::Register),
        (3, PersistentAction::Clear),
        (6, PersistentAction::RegisterAndIgnore),
    ] {
        // These have neither a scope nor a type.
        assert_eq!(out(number, 0xff, 24), expected(action, None));
    }
    for kind in ReservationType::ALL {
        for (number, action) in [
            (1, PersistentAction::Reserve),
            (2, PersistentAction::Release),
            (4, PersistentAction::Preempt),
            (5, PersistentAction::PreemptAndAbort),
        ] {
            assert_eq!(out(number, kind as u8, 24), expected(action, Some(kind)));
        }
    }
    for (wrong, bit) in [(0x00, 3), (0x02, 3), (0x09, 3), (0x11, 7), (0xf0, 7)] {
        assert_eq!(out(1, wrong, 24), Err(Sense::invalid_field(2, bit)));
        assert_eq!(out(2, wrong, 24), expected(PersistentAction::Release, None));
        assert_eq!(out(4, wrong, 24), expected(PersistentAction::Preempt, None));
    }
    assert_eq!(out(0, 0, 23), Err(Sense::LIST_LENGTH));
    assert!(out(0, 0, u32::MAX).is_ok());
    // REGISTER AND MOVE, and others.
    for number in 7..0x20 {
        assert_eq!(out(number, 1, 24), Err(Sense::invalid_field(1, 4)));
    }
}

#[test]
fn unknown_commands() {
    for opcode in [0x01, 0x04, 0x1c, 0x1d, 0x34, 0x7f, 0x83, 0xa4, 0xff] {
        assert_eq!(on_disk(&cdb(opcode, &[])), Err(Sense::INVALID_OPCODE), "{opcode:x}");
    }
    for (opcode, known) in [
        (SERVICE_ACTION_IN_16, &[0x10, 0x12][..]),
        (MAINTENANCE_IN, &[0x0c]),
        (PERSISTENT_RESERVE_IN, &[0, 1, 2, 3]),
    ] {
        for action in (0..0x20).filter(|action| !known.contains(action)) {
            let refused = on_disk(&cdb(opcode, &[(1, &[action])]));
            assert_eq!(refused, Err(Sense::invalid_field(1, 4)), "{opcode:x} {action:x}");
        }
    }
}

#[test]
fn commands_that_are_cut_off() {
    for (cdb, byte) in [(vec![], 0), (vec![READ_10; 9], 9), (vec![0x9e], 1), (vec![0x9e, 0x10, 0], 3)] {
        let sense = on_disk(&cdb).unwrap_err();
        let pointer = FieldPointer { is_in_cdb: true, byte, bit: None };
        assert_eq!(sense, Sense { pointer: Some(pointer), ..Sense::invalid_field(0, 0) });
    }
}

/// The bit NACA is in the last byte of each command.
#[test]
fn naca_is_refused() {
    for (opcode, action) in [
        (TEST_UNIT_READY, 0),
        (READ_6, 0),
        (READ_10, 0),
        (READ_12, 0),
        (READ_16, 0),
        (SERVICE_ACTION_IN_16, 0x10),
        (MAINTENANCE_IN, 0x0c),
        (INQUIRY, 0),
    ] {
        let mut bytes = cdb(opcode, &[(1, &[action])]);
        let last = bytes.len() - 1;
        bytes[last] = 0xfb;
        assert!(on_disk(&bytes).is_ok(), "{opcode:x}");
        bytes[last] = 0x04;
        assert_eq!(on_disk(&bytes), Err(Sense::invalid_field(last as u16, 2)), "{opcode:x}");
    }
    let inquiry = [INQUIRY, 0, 0, 0, 36, 4];
    for unit in [Unit::ReportLuns, Unit::Absent] {
        assert_eq!(parse(&inquiry, unit), Err(Sense::invalid_field(5, 2)));
    }
}

#[test]
fn units_that_are_no_disks() {
    let everywhere = [INQUIRY, REPORT_LUNS, REQUEST_SENSE];
    for opcode in everywhere {
        for unit in [Unit::ReportLuns, Unit::Absent] {
            assert!(parse(&cdb(opcode, &[]), unit).is_ok(), "{opcode:x}");
        }
    }
    assert_eq!(parse(&[0; 6], Unit::ReportLuns), Ok(Command::TestUnitReady));
    assert_eq!(parse(&[0; 6], Unit::Absent), Err(Sense::NO_SUCH_UNIT));
    for opcode in (0..=255).filter(|opcode| !everywhere.contains(opcode) && *opcode != TEST_UNIT_READY) {
        let cdb = cdb(opcode, &[]);
        assert_eq!(parse(&cdb, Unit::ReportLuns), Err(Sense::INVALID_OPCODE));
        assert_eq!(parse(&cdb, Unit::Absent), Err(Sense::NO_SUCH_UNIT));
    }
    // Only the list of pages of vital product data is there.
    assert!(parse(&[INQUIRY, 1, 0, 0, 255, 0], Unit::Absent).is_ok());
    assert_eq!(parse(&[INQUIRY, 1, 0x83, 0, 255, 0], Unit::Absent), Err(Sense::invalid_field(2, 7)));
}

/// SPC-4, section 5.13.1, and SBC-3, section 4.17.
#[test]
fn classes_for_reservations() {
    let access = |cdb: &[u8]| on_disk(cdb).unwrap().access();
    for opcode in READS.into_iter().chain(VERIFIES) {
        assert_eq!(access(&blocks(opcode, 0, 0, 1)), Access::Read);
    }
    let others = [WRITE_SAME_10, WRITE_SAME_16, COMPARE_AND_WRITE, UNMAP];
    let caches = [SYNCHRONIZE_CACHE_10, SYNCHRONIZE_CACHE_16];
    for opcode in WRITES.into_iter().chain(WRITE_VERIFIES).chain(others).chain(caches) {
        assert_eq!(access(&blocks(opcode, 0, 4000, 1)), Access::Write, "{opcode:x}");
    }
    for opcode in [INQUIRY, REPORT_LUNS, REQUEST_SENSE, READ_CAPACITY_10] {
        assert_eq!(access(&cdb(opcode, &[])), Access::Exempt, "{opcode:x}");
    }
    assert_eq!(access(&cdb(SERVICE_ACTION_IN_16, &[(1, &[0x10])])), Access::Exempt);
    assert_eq!(access(&cdb(SERVICE_ACTION_IN_16, &[(1, &[0x12])])), Access::Read);
    assert_eq!(access(&cdb(MAINTENANCE_IN, &[(1, &[0x0c])])), Access::Read);
    assert_eq!(access(&[MODE_SENSE_6, 0, 8, 0, 0, 0]), Access::Read);
    assert_eq!(access(&[MODE_SELECT_6, 0x10, 0, 0, 0, 0]), Access::Write);
    assert_eq!(access(&[0; 6]), Access::Status);
    for (opcode, on, off) in [
        (START_STOP_UNIT, Access::Exempt, Access::Write),
        (PREVENT_ALLOW_MEDIUM_REMOVAL, Access::Write, Access::Exempt),
    ] {
        assert_eq!(access(&[opcode, 0, 0, 0, 1, 0]), on);
        assert_eq!(access(&[opcode, 0, 0, 0, 0, 0]), off);
    }
    for opcode in [RESERVE_6, RELEASE_6, RESERVE_10, RELEASE_10, PERSISTENT_RESERVE_IN] {
        assert_eq!(access(&cdb(opcode, &[])), Access::Reservation);
    }
    assert_eq!(access(&cdb(PERSISTENT_RESERVE_OUT, &[(8, &[24])])), Access::Reservation);
}

/// Invalid commands too: the operation code decides.
#[test]
fn three_commands_pass_unit_attentions() {
    for opcode in 0..=255 {
        let passes = [INQUIRY, REPORT_LUNS, REQUEST_SENSE].contains(&opcode);
        assert_eq!(passes_attention(&cdb(opcode, &[])), passes, "{opcode:x}");
    }
    assert!(passes_attention(&[INQUIRY]) && !passes_attention(&[]));
}
