//! Tests that the commands, the bits that they evaluate, and the answer to REPORT SUPPORTED OPERATION CODES
//! agree.

mod common;

use common::{DISK, PLAIN, READ_ONLY};
use kickless_scsi::{Command, OpcodeSelect, Properties, ReportOpcodes, Sense, Unit, parse, report_opcodes};
use kickless_spec::scsi::opcode::*;
use proptest::prelude::*;

const VERIFIES: [u8; 6] =
    [VERIFY_10, VERIFY_12, VERIFY_16, WRITE_AND_VERIFY_10, WRITE_AND_VERIFY_12, WRITE_AND_VERIFY_16];

/// A command as the answer for all commands has it.
#[derive(Clone, Debug)]
struct Reported {
    opcode: u8,
    action: Option<u16>,
    len: usize,
}

fn reported(disk: &Properties) -> Vec<Reported> {
    let request = ReportOpcodes { select: OpcodeSelect::All, timeouts: false, allocation: u32::MAX };
    let bytes = report_opcodes(&request, disk);
    let (head, descriptors) = bytes.split_at(4);
    assert_eq!(head, (descriptors.len() as u32).to_be_bytes());
    let descriptors = descriptors.chunks(8).map(|bytes| {
        let action = u16::from_be_bytes([bytes[2], bytes[3]]);
        assert!(bytes[5] == 1 || bytes[5] == 0 && action == 0);
        let len = u16::from_be_bytes([bytes[6], bytes[7]]).into();
        Reported { opcode: bytes[0], action: (bytes[5] == 1).then_some(action), len }
    });
    descriptors.collect()
}

fn usage(disk: &Properties, opcode: u8, service_action: Option<u16>) -> Vec<u8> {
    let select = OpcodeSelect::One { opcode, service_action };
    let bytes = report_opcodes(&ReportOpcodes { select, timeouts: false, allocation: u32::MAX }, disk);
    assert_eq!((bytes[0], bytes[1], bytes[2]), (0, 3, 0));
    assert_eq!(usize::from(bytes[3]), bytes.len() - 4);
    bytes[4..].to_vec()
}

fn result(cdb: &[u8], disk: &Properties) -> Result<Command, Sense> {
    parse(cdb, Unit::Disk(disk))
}

#[test]
fn each_reported_command_has_its_length_and_its_usage() {
    for command in reported(&DISK) {
        let usage = usage(&DISK, command.opcode, command.action);
        assert_eq!((usage[0], usage.len()), (command.opcode, command.len));
        if let Some(action) = command.action {
            assert_eq!(u16::from(usage[1] & 0x1f), action);
        }
    }
}

#[test]
fn only_reported_commands_are_executed() {
    for disk in [DISK, PLAIN] {
        let reported = reported(&disk);
        for opcode in 0..=255 {
            for action in 0..0x20u8 {
                let mut cdb = [0; 16];
                (cdb[0], cdb[1]) = (opcode, action);
                let of_opcode = || reported.iter().filter(|command| command.opcode == opcode);
                let is_known =
                    of_opcode().any(|command| command.action.is_none_or(|known| known == u16::from(action)));
                let expected = match result(&cdb, &disk) {
                    Err(Sense::INVALID_OPCODE) => of_opcode().next().is_none(),
                    Err(sense) if sense == Sense::invalid_field(1, 4) => of_opcode().next().is_some(),
                    _ => is_known,
                };
                assert!(expected, "{opcode:x} {action:x}");
            }
        }
    }
}

#[test]
fn commands_that_a_disk_does_not_have_are_not_reported() {
    let opcodes = |disk| reported(disk).iter().map(|command| command.opcode).collect::<Vec<_>>();
    let (all, plain) = (opcodes(&DISK), opcodes(&PLAIN));
    let missing: Vec<u8> = all.into_iter().filter(|opcode| !plain.contains(opcode)).collect();
    assert_eq!(missing, [WRITE_SAME_10, UNMAP, COMPARE_AND_WRITE, WRITE_SAME_16]);
}

/// Returns valid commands with this operation code and service action.
fn seeds(command: &Reported) -> Vec<Vec<u8>> {
    let fields: &[(usize, u8)] = match command.opcode {
        MODE_SENSE_6 | MODE_SENSE_10 => &[(2, MODE_CACHING)],
        MODE_SELECT_6 | MODE_SELECT_10 => &[(1, 0x10)],
        PERSISTENT_RESERVE_OUT => &[(2, 1), (8, 24)],
        MAINTENANCE_IN => &[(2, 2), (3, PERSISTENT_RESERVE_IN)],
        READ_6 | WRITE_6 => &[(4, 1)],
        WRITE_SAME_10 | SYNCHRONIZE_CACHE_10 => &[(8, 1)],
        WRITE_SAME_16 | SYNCHRONIZE_CACHE_16 => &[(13, 1)],
        _ => &[],
    };
    let mut seed = vec![0; command.len];
    seed[0] = command.opcode;
    for (at, byte) in fields {
        seed[*at] = *byte;
    }
    seed[1] |= command.action.unwrap_or(0) as u8;
    let mut all_pages = seed.clone();
    all_pages[2] |= MODE_ALL_PAGES;
    all_pages[3] |= MODE_ALL_SUBPAGES;
    let mut without_option = seed.clone();
    without_option[2] = 0;
    [seed, all_pages, without_option].into_iter().filter(|seed| result(seed, &DISK).is_ok()).collect()
}

#[test]
fn the_mask_has_the_bits_that_are_evaluated() {
    for command in reported(&DISK) {
        let seeds = seeds(&command);
        assert!(!seeds.is_empty(), "{command:x?}");
        let usage = usage(&DISK, command.opcode, command.action);
        for (at, mask) in usage.iter().enumerate().skip(1) {
            for bit in 0..8 {
                // Others are other commands.
                let is_action = at == 1 && command.action.is_some() && bit < 5;
                // The hint DPO of commands that verify is valid, and has no consequence.
                let is_hint = VERIFIES.contains(&command.opcode) && (at, bit) == (1, 4);
                if is_action || is_hint {
                    continue;
                }
                let changes = seeds.iter().any(|seed| {
                    let mut flipped = seed.clone();
                    flipped[at] ^= 1 << bit;
                    result(&flipped, &DISK) != result(seed, &DISK)
                });
                assert_eq!(changes, mask & 1 << bit != 0, "{command:x?} {at} {bit}");
            }
        }
    }
}

#[test]
fn answers_about_one_command() {
    let answer = |opcode, service_action, timeouts, allocation| {
        let select = OpcodeSelect::One { opcode, service_action };
        report_opcodes(&ReportOpcodes { select, timeouts, allocation }, &DISK)
    };
    let read = [0, 3, 0, 10, 0x28, 0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 4];
    assert_eq!(answer(READ_10, None, false, 512), read);
    assert_eq!(answer(READ_10, None, false, 5), read[..5]);
    let with_timeouts = answer(READ_10, None, true, 512);
    assert_eq!(with_timeouts[1], 0x83);
    assert_eq!(with_timeouts[14..], [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for (opcode, action) in [(0xff, None), (READ_10, Some(1)), (0x5e, Some(4)), (0x5e, Some(0x101))] {
        assert_eq!(answer(opcode, action, true, 512), [0, 1, 0, 0]);
    }
}

#[test]
fn timeouts_are_added_to_each_command() {
    let request = ReportOpcodes { select: OpcodeSelect::All, timeouts: true, allocation: u32::MAX };
    let bytes = report_opcodes(&request, &DISK);
    assert_eq!(bytes.len(), 4 + 20 * reported(&DISK).len());
    for descriptor in bytes[4..].chunks(20) {
        assert_eq!(descriptor[5] & 2, 2);
        assert_eq!(descriptor[8..10], [0, 10]);
    }
}

proptest! {
    /// A bit that is not in the mask changes nothing.
    #[test]
    fn only_bits_of_the_mask_are_evaluated(
        nth: prop::sample::Index,
        fields: [u8; 15],
        small: bool,
        which: u8,
    ) {
        let disk = [DISK, PLAIN, READ_ONLY][usize::from(which) % 3];
        let reported = reported(&disk);
        let command = nth.get(&reported);
        let usage = usage(&disk, command.opcode, command.action);
        let mut cdb = vec![command.opcode];
        // Commands with small numbers are more often valid.
        cdb.extend(fields.iter().map(|byte| if small && *byte < 200 { 0 } else { *byte }));
        cdb.truncate(command.len);
        if let Some(action) = command.action {
            cdb[1] = cdb[1] & !0x1f | action as u8;
        }
        let before = result(&cdb, &disk);
        for (at, mask) in usage.iter().enumerate().skip(1) {
            let mask = if at == 1 && command.action.is_some() { mask | 0x1f } else { *mask };
            for bit in (0..8).filter(|bit| mask & 1 << bit == 0) {
                let mut flipped = cdb.clone();
                flipped[at] ^= 1 << bit;
                prop_assert_eq!(result(&flipped, &disk), before, "{:x?} {} {}", &cdb, at, bit);
            }
        }
    }

    /// A valid command is within the limits of the disk, whatever these are.
    #[test]
    fn valid_commands_are_within_the_disk(
        cdb in prop::collection::vec(any::<u8>(), 0..20),
        blocks: u64,
        transfer_blocks_max: u32,
        write_same_blocks_max: u32,
    ) {
        let disk = Properties { blocks, transfer_blocks_max, write_same_blocks_max, ..DISK };
        let Ok(command) = result(&cdb, &disk) else { return Ok(()) };
        command.data(disk.block_size);
        let (range, limit) = match command {
            Command::Read(transfer) | Command::Write(transfer) => (transfer.blocks, transfer_blocks_max.into()),
            Command::Verify { blocks, .. } | Command::WriteAndVerify { blocks, .. } => {
                (blocks, transfer_blocks_max.into())
            }
            Command::WriteSame { blocks, .. } => (blocks, write_same_blocks_max.into()),
            Command::CompareAndWrite(transfer) => (transfer.blocks, DISK.compare_blocks_max.into()),
            Command::SynchronizeCache { blocks, .. } => (blocks, u64::MAX),
            _ => return Ok(()),
        };
        prop_assert!(range.count <= limit);
        prop_assert!(range.first.checked_add(range.count).is_some_and(|end| end <= blocks));
    }
}
