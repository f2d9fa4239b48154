//! Tests single functions of the dirty log and of spaces.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_dirty_log::{Error, Harvester, Method, Mmu, Pages, Space, Writer};
use kickless_memory::{Gpa, Iova, Slot, UserAddr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const METHODS: [Method; 2] = [Method::Marks, Method::Protect];

fn slot(gpa: u64, len: u64) -> Slot {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    Slot::map(&file, 0, Gpa(gpa), UserAddr(0), len).unwrap()
}

fn mmu(slots: &[(u64, u64)]) -> Arc<Mmu> {
    let mmu = Mmu::new();
    slots.iter().for_each(|(gpa, len)| mmu.add(slot(*gpa, *len)).unwrap());
    mmu
}

/// Harvests while no writer is online. Returns the ranges.
fn harvest(log: &mut Harvester, pages: &mut Pages) -> Vec<(u64, u64)> {
    log.harvest(.., pages);
    pages.ranges().map(|(gpa, len)| (gpa.0, len)).collect()
}

#[test]
fn a_write_is_in_one_harvest() {
    for method in METHODS {
        let mmu = mmu(&[(0, 4 * GIB), (8 * GIB, MIB)]);
        let mut pages = Pages::default();
        let mut writer = Writer::direct(&mmu);
        let write = |writer: &mut Writer, at: u64, len: usize| writer.write(Iova(at), &vec![1; len]).unwrap();
        write(&mut writer, 0, 10);
        let away = writer.offline();
        let mut log = Harvester::enable(&mmu, Gpa(0), method).unwrap();
        assert!(harvest(&mut log, &mut pages).is_empty());
        drop(away);
        write(&mut writer, 5 * PAGE - 1, 2);
        write(&mut writer, 3 * GIB - 1, 2);
        write(&mut writer, 8 * GIB, 2);
        write(&mut writer, 5 * PAGE, 2);
        let mut byte = [0; 2];
        writer.read(Iova(3 * GIB - 1), &mut byte).unwrap();
        assert_eq!(byte, [1, 1]);
        let away = writer.offline();
        let expected = [(4 * PAGE, 2 * PAGE), (3 * GIB - PAGE, PAGE), (3 * GIB, PAGE)];
        assert_eq!(harvest(&mut log, &mut pages), expected);
        assert!(harvest(&mut log, &mut pages).is_empty());
        drop(away);
        write(&mut writer, 5 * PAGE, 1);
        let away = writer.offline();
        assert_eq!(harvest(&mut log, &mut pages), [(5 * PAGE, PAGE)]);
        drop(away);
        write(&mut writer, 7 * PAGE, 1);
        writer.log_external_write(Iova(9 * PAGE - 1), 2).unwrap();
        let away = writer.offline();
        log.harvest(Gpa(7 * PAGE + 1)..Gpa(8 * PAGE + 1), &mut pages);
        assert_eq!(pages.count(), 2);
        assert_eq!(harvest(&mut log, &mut pages), [(9 * PAGE, PAGE)]);
        let grown = mmu.overhead();
        log.disable();
        assert!(mmu.overhead() < grown);
        drop(away);
        write(&mut writer, 0, 10);
    }
}

#[test]
fn every_mapping_of_a_page_is_logged() {
    let mmu = mmu(&[(GIB, 4 * GIB)]);
    let space = Arc::new(Space::new(&mmu));
    // A page twice, a piece of 2 MiB, one of 1 GiB, and one whose address is not aligned as its target is.
    space.map(Iova(0), Gpa(GIB), PAGE, true).unwrap();
    space.map(Iova(PAGE), Gpa(GIB), PAGE, true).unwrap();
    space.map(Iova(2 * MIB), Gpa(GIB), 2 * MIB, true).unwrap();
    space.map(Iova(GIB), Gpa(GIB), 2 * GIB, true).unwrap();
    space.map(Iova(5 * GIB + PAGE), Gpa(GIB), 4 * MIB, true).unwrap();
    let aliases = [0, PAGE, 2 * MIB, GIB, 5 * GIB + PAGE];
    let mut writers = [Writer::direct(&mmu), Writer::within(&space)];
    let mut pages = Pages::default();
    for method in METHODS {
        let [direct, inside] = &mut writers;
        let away = (direct.offline(), inside.offline());
        let mut log = Harvester::enable(&mmu, Gpa(GIB), method).unwrap();
        drop(away);
        for round in 0..3 {
            for alias in aliases {
                // Writes through all of them, so that every leaf is writable, and checks one.
                for other in aliases {
                    inside.write_obj(Iova(other + 8), &round).unwrap();
                }
                direct.write_obj(Iova(GIB), &0_u64).unwrap();
                let away = (direct.offline(), inside.offline());
                assert_eq!(harvest(&mut log, &mut pages), [(GIB, PAGE)]);
                assert!(harvest(&mut log, &mut pages).is_empty());
                drop(away);
                inside.write_obj(Iova(alias), &alias).unwrap();
                assert_eq!(direct.read_obj::<u64>(Iova(GIB)).unwrap(), alias);
                let away = (direct.offline(), inside.offline());
                assert_eq!(harvest(&mut log, &mut pages), [(GIB, PAGE)]);
                drop(away);
            }
        }
        let _away = (direct.offline(), inside.offline());
        log.disable();
    }
}

#[test]
fn unmapped_addresses_cannot_be_used() {
    let mmu = mmu(&[(0, 4 * GIB)]);
    let space = Arc::new(Space::new(&mmu));
    let mut writer = Writer::within(&space);
    let empty = mmu.overhead();
    let reach = |writer: &mut Writer, at: u64| writer.write_obj(Iova(at), &1_u8).is_ok();
    for log in [None, Some(Method::Protect)] {
        let log = log.map(|method| {
            let _away = writer.offline();
            Harvester::enable(&mmu, Gpa(0), method).unwrap()
        });
        space.map(Iova(0), Gpa(0), 2 * GIB, true).unwrap();
        assert!(matches!(space.map(Iova(GIB), Gpa(0), PAGE, true), Err(Error::Mapped { .. })));
        assert!(reach(&mut writer, 0) && reach(&mut writer, 2 * GIB - 1) && !reach(&mut writer, 2 * GIB));
        {
            let _away = writer.offline();
            // A page from the middle of a large leaf, and a range across two.
            space.unmap(Iova(5 * PAGE), PAGE).unwrap();
            space.unmap(Iova(GIB - 2 * MIB - PAGE), 4 * MIB + 2 * PAGE).unwrap();
        }
        for (at, mapped) in [
            (4 * PAGE, true),
            (5 * PAGE, false),
            (6 * PAGE, true),
            (GIB - 2 * MIB - PAGE - 1, true),
            (GIB - 2 * MIB - PAGE, false),
            (GIB, false),
            (GIB + 2 * MIB + PAGE - 1, false),
            (GIB + 2 * MIB + PAGE, true),
            (2 * GIB - 1, true),
        ] {
            assert_eq!(reach(&mut writer, at), mapped, "{at:#x}");
        }
        // Maps another range in the hole.
        space.map(Iova(5 * PAGE), Gpa(3 * GIB), PAGE, false).unwrap();
        assert!(!reach(&mut writer, 5 * PAGE));
        assert_eq!(writer.read_obj::<u8>(Iova(5 * PAGE)).unwrap(), 0);
        let _away = writer.offline();
        if let Some(mut log) = log {
            let mut pages = Pages::default();
            log.harvest(.., &mut pages);
            // The first and the last page of each piece, and those at the edges of the holes.
            assert_eq!(pages.count(), 6);
            space.unmap(Iova(0), 2 * GIB).unwrap();
            log.harvest(.., &mut pages);
            assert!(pages.is_empty());
            log.disable();
        } else {
            space.unmap(Iova(0), 4 * GIB).unwrap();
        }
    }
    drop((writer, space));
    // Lists of small pieces stay; tables do not.
    assert!(mmu.overhead() < empty + 64 * 1024, "{} {empty}", mmu.overhead());
}

#[test]
fn a_removed_slot_is_gone_from_all_spaces() {
    let mmu = mmu(&[(0, 4 * MIB), (4 * MIB, 4 * MIB)]);
    let space = Arc::new(Space::new(&mmu));
    space.map(Iova(0), Gpa(0), 8 * MIB, true).unwrap();
    let mut writers = [Writer::direct(&mmu), Writer::within(&space)];
    for writer in &mut writers {
        writer.write(Iova(4 * MIB - 1), &[1, 2]).unwrap();
    }
    let log = {
        let _away = writers.each_mut().map(Writer::offline);
        Harvester::enable(&mmu, Gpa(0), Method::Protect).unwrap()
    };
    {
        let _away = writers.each_mut().map(Writer::offline);
        assert!(matches!(mmu.remove(Gpa(0)), Err(Error::Logged { .. })));
        assert!(matches!(Harvester::enable(&mmu, Gpa(0), Method::Marks), Err(Error::Logged { .. })));
        assert!(matches!(mmu.remove(Gpa(PAGE)), Err(Error::NoSuchSlot { .. })));
        log.disable();
        let removed = mmu.remove(Gpa(0)).unwrap();
        let released = removed.mapping().released();
        drop(removed);
        assert!(released.is_unused());
    }
    for writer in &mut writers {
        assert!(writer.write(Iova(0), &[1]).is_err());
        assert_eq!(writer.read_obj::<u8>(Iova(4 * MIB)).unwrap(), 2);
    }
    mmu.add(slot(0, 4 * MIB)).unwrap();
    let [direct, inside] = &mut writers;
    assert_eq!(direct.read_obj::<u8>(Iova(4 * MIB - 1)).unwrap(), 0);
    assert!(inside.read_obj::<u8>(Iova(0)).is_err());
}

#[test]
fn impossible_changes_are_refused() {
    let mmu = mmu(&[(MIB, MIB)]);
    assert!(matches!(mmu.add(slot(MIB + MIB / 2, MIB)), Err(Error::Overlaps { .. })));
    assert!(matches!(mmu.add(slot(PAGE + 1, MIB)), Err(Error::Misaligned { .. })));
    assert!(matches!(mmu.add(slot(1 << 48, MIB)), Err(Error::TooHigh { .. })));
    let space = Space::new(&mmu);
    assert!(matches!(space.map(Iova(0), Gpa(0), PAGE, true), Err(Error::Unmapped(_))));
    assert!(matches!(space.map(Iova(0), Gpa(MIB), 2 * MIB, true), Err(Error::Unmapped(_))));
    assert!(matches!(space.map(Iova(0), Gpa(MIB), 0, true), Err(Error::Misaligned { .. })));
    assert!(matches!(space.map(Iova(!4095), Gpa(MIB), PAGE, true), Err(Error::TooHigh { .. })));
    assert!(matches!(space.unmap(Iova(7), PAGE), Err(Error::Misaligned { .. })));
    let mut writer = Writer::direct(&mmu);
    for at in [0, MIB - 1, 2 * MIB - 1, 1 << 48, u64::MAX - 1, u64::MAX] {
        assert!(writer.write(Iova(at), &[0; 2]).is_err(), "{at:#x}");
        assert!(writer.read_obj::<u64>(Iova(at)).is_err(), "{at:#x}");
    }
}

/// A large leaf replaces tables that small pages left empty. The tables are given back. In debug builds, the
/// last reference checks that none is missing.
#[test]
fn large_leaves_replace_empty_tables() {
    let mmu = mmu(&[(0, PAGE)]);
    let space = Arc::new(Space::new(&mmu));
    space.map(Iova(0), Gpa(0), PAGE, true).unwrap();
    let mut overheads = Vec::new();
    for _ in 0..3 {
        mmu.remove(Gpa(0)).unwrap();
        mmu.add(slot(0, GIB)).unwrap();
        space.map(Iova(0), Gpa(0), GIB, true).unwrap();
        mmu.remove(Gpa(0)).unwrap();
        mmu.add(slot(0, PAGE)).unwrap();
        space.map(Iova(0), Gpa(0), PAGE, true).unwrap();
        overheads.push(mmu.overhead());
    }
    assert_eq!(overheads[1], overheads[2], "{overheads:?}");
}

/// A writer whose offline guard is leaked is online again at its next access. Until then no thread waits for
/// it.
#[test]
fn a_leaked_guard_leaves_the_writer_usable() {
    let mmu = mmu(&[(0, MIB)]);
    let mut writer = Writer::direct(&mmu);
    writer.write(Iova(0), &[1]).unwrap();
    std::mem::forget(writer.offline());
    mmu.remove(Gpa(0)).unwrap();
    writer.quiesce();
    assert!(writer.write(Iova(0), &[1]).is_err());
    std::mem::forget(writer.offline());
    mmu.add(slot(0, MIB)).unwrap();
    let mut log = Harvester::enable(&mmu, Gpa(0), Method::Protect).unwrap();
    writer.write(Iova(0), &[1]).unwrap();
    let away = writer.offline();
    assert_eq!(harvest(&mut log, &mut Pages::default()), [(0, PAGE)]);
    log.disable();
    drop(away);
}

#[test]
fn a_write_of_no_bytes_marks_nothing() {
    for method in METHODS {
        let mmu = mmu(&[(0, MIB)]);
        let mut writer = Writer::direct(&mmu);
        let mut log = {
            let _away = writer.offline();
            Harvester::enable(&mmu, Gpa(0), method).unwrap()
        };
        writer.write_obj(Iova(0), &[0u8; 0]).unwrap();
        writer.write(Iova(0), &[]).unwrap();
        writer.log_external_write(Iova(0), 0).unwrap();
        let _away = writer.offline();
        let found = harvest(&mut log, &mut Pages::default());
        assert!(method == Method::Protect || found.is_empty(), "{found:?}");
        log.disable();
    }
}
