//! Parses any parameter lists, of lengths that need not be those of the commands.
#![no_main]

use kickless_scsi::{
    BlockDescriptor, Mode, ModeSelect, ModeSense, PageControl, Pages, PersistentAction, PersistentOut,
    PersistentReserveOut, Properties, UnmapLimits, unmap, unmap_len_max,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, u32, u32, u16, bool, u8, &[u8])| {
    let (blocks, blocks_max, ranges_max, list_len, is_long, action, list) = input;
    let limits = UnmapLimits { blocks_max, ranges_max, granularity: 0, alignment: 0 };
    let disk = Properties { blocks, unmap: Some(limits), ..Properties::plain(512) };

    let read = &list[..list.len().min(unmap_len_max(&disk))];
    if let Ok(ranges) = unmap(list_len, read, &disk) {
        let mut total = 0;
        for range in ranges {
            assert!(range.first.checked_add(range.count).is_some_and(|end| end <= blocks));
            total += range.count;
        }
        assert!(blocks_max == UnmapLimits::NO_LIMIT || total <= u64::from(blocks_max));
    }

    let mode = Mode { write_cache: action & 1 == 1, sense_descriptors: action & 2 == 2 };
    let select = ModeSelect { is_long, list_len };
    if let Ok(selected) = mode.select(&select, list, &disk) {
        // A driver can always select what it got.
        let descriptor = if is_long { BlockDescriptor::Long } else { BlockDescriptor::Short };
        let (control, pages, allocation) = (PageControl::Current, Pages::All, u32::MAX);
        let request = ModeSense { is_long, descriptor, control, pages, allocation };
        let sensed = selected.sense(&request, mode, &disk);
        assert_eq!(mode.select(&select, &sensed, &disk), Ok(selected));
    }

    let actions =
        [PersistentAction::Register, PersistentAction::RegisterAndIgnore, PersistentAction::Preempt];
    let action = actions[usize::from(action) % actions.len()];
    let command = PersistentReserveOut { action, kind: None, list_len: list_len.into() };
    if PersistentOut::parse(&command, list).is_ok() {
        assert_eq!(command.list_len, PersistentReserveOut::LIST_LEN);
    }
});
