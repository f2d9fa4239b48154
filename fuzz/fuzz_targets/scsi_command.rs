//! Parses any commands for disks with any properties, compares their data with any buffers, and makes the
//! answers that need no disk.
#![no_main]

use kickless_scsi::{
    Address, Buffers, Command, ControlRequest, Data, Identity, LbaExtent, Mode, Properties, Unit,
    UnmapLimits, entry, inquiry, lba_status, parse, read_capacity_10, read_capacity_16, report_luns,
    report_opcodes,
};
use libfuzzer_sys::fuzz_target;

type Numbers = (u64, u32, u32, u8, u32, u32, u32);

fn disk(numbers: Numbers, flags: u8) -> Properties {
    let (blocks, transfer_blocks_max, write_same_blocks_max, small, blocks_max, ranges_max, granularity) =
        numbers;
    let is = |bit: u8| flags & 1 << bit != 0;
    Properties {
        block_size: 512 << (small % 4),
        // Small disks refuse more commands for their addresses, and large ones more for their limits.
        blocks: if is(0) { blocks } else { blocks % 100_000 },
        physical_block_exp: small >> 4,
        lowest_aligned: granularity as u16,
        read_only: is(1),
        is_solid_state: is(2),
        transfer_blocks_max,
        transfer_blocks_best: granularity,
        transfer_granularity: granularity as u16,
        compare_blocks_max: small,
        write_same_blocks_max,
        unmap: is(3).then_some(UnmapLimits { blocks_max, ranges_max, granularity, alignment: granularity }),
        write_same_unmaps: is(4),
        unmapped_reads_zeroes: is(5),
        is_thin: is(6),
    }
}

/// Returns the answer to a command that needs no disk.
fn answer(command: &Command, unit: Unit<'_>, disk: &Properties) -> Option<Vec<u8>> {
    let Ok(identity) = Identity::new("KICKLESS", "DISK", "1", "disk-1") else { return None };
    let mode = Mode { write_cache: true, sense_descriptors: false };
    match command {
        Command::Inquiry(request) => Some(inquiry(request, unit, &identity)),
        Command::ModeSense(request) => Some(mode.sense(request, mode, disk)),
        Command::ReadCapacity10 => Some(read_capacity_10(disk)),
        Command::ReadCapacity16 { allocation } => Some(read_capacity_16(disk, *allocation)),
        Command::ReportLuns { select, allocation } => {
            Some(report_luns(*select, &[entry(0), entry(300)], *allocation))
        }
        Command::ReportOpcodes(request) => Some(report_opcodes(request, disk)),
        Command::GetLbaStatus { first, allocation } => {
            let extent = LbaExtent { first: *first, count: 1, is_allocated: true };
            Some(lba_status(&[extent, extent], *allocation))
        }
        _ => None,
    }
}

fuzz_target!(|input: (Numbers, u8, [u8; 8], u64, u64, &[u8], &[u8])| {
    let (numbers, flags, lun, data_out, data_in, cdb, control) = input;
    let disk = disk(numbers, flags);
    if let Ok(address) = Address::parse(lun) {
        assert_eq!(Address::parse(address.to_bytes()), Ok(address));
    }
    let _ = ControlRequest::parse(control);
    let buffers = Buffers { data_out, data_in };
    let _ = buffers.check_direction();
    for unit in [Unit::Disk(&disk), Unit::ReportLuns, Unit::Absent] {
        let command = match parse(cdb, unit) {
            Ok(command) => command,
            Err(sense) => {
                let data = sense.data(flags & 1 == 1);
                assert!(data.cut(data_in).len() as u64 <= data_in);
                continue;
            }
        };
        let (data, _) = (command.data(disk.block_size), command.access());
        if buffers.check(data).is_ok() {
            match data {
                Data::Out(len) => assert!(len <= data_out),
                Data::In(len) => assert!(len <= data_in),
                Data::None | Data::Answer(_) => {}
            }
        }
        let (Command::Read(transfer) | Command::Write(transfer) | Command::CompareAndWrite(transfer)) =
            command
        else {
            let bytes = answer(&command, unit, &disk);
            if let (Some(bytes), Data::Answer(allocation)) = (bytes, data) {
                assert!(bytes.len() <= allocation as usize);
            }
            continue;
        };
        let end = transfer.blocks.first.checked_add(transfer.blocks.count);
        assert!(end.is_some_and(|end| end <= disk.blocks));
    }
});
