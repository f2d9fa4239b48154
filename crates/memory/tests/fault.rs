//! Tests of files that are truncated while they are mapped.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests; some touch foreign memory")]

use kickless_memory::fault::{self, Damaged};
use kickless_memory::{Error, Gpa, Iov, Log, Map, Marks, Ram, Slot, UserAddr, View};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

const PAGE: u64 = 4096;
/// The environment variable that tells [`child`] what to do.
const CHILD: &str = "KICKLESS_FAULT_CHILD";

fn memory(pages: u64, flags: MemfdFlags) -> (OwnedFd, Arc<Map>) {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC | flags).unwrap();
    ftruncate(&file, pages * PAGE).unwrap();
    let map = map_of(&file, pages);
    (file, map)
}

fn map_of(file: &OwnedFd, pages: u64) -> Arc<Map> {
    let slot = Slot::map(file, 0, Gpa(0), UserAddr(0x7000_0000), pages * PAGE).unwrap();
    Arc::new(Map::new(vec![slot]).unwrap())
}

/// Drops a map, and waits until it is unmapped. Until then, its missing pages count for the whole process.
fn unmap(map: Arc<Map>) {
    let released: Vec<_> = map.slots().iter().map(|slot| slot.mapping().released()).collect();
    drop(map);
    assert!(released.iter().all(|released| released.wait(Duration::from_secs(60))));
}

#[test]
fn reads_writes_and_atomics_go_on() {
    fault::guard().unwrap();
    fault::guard().unwrap();
    let (file, map) = memory(8, MemfdFlags::empty());
    let (_other_file, other) = memory(8, MemfdFlags::empty());
    for page in 0..8 {
        map.write(Gpa(page * PAGE), &[7; PAGE as usize]).unwrap();
    }
    let area = map.area(UserAddr(0x7000_0000 + 6 * PAGE), 64, 16).unwrap();
    let mut iov = Iov::default();
    iov.push(&Arc::new(View::new(Map::clone(&map))), Gpa(PAGE), 4 * PAGE as u32).unwrap();
    let before = fault::damages();
    assert_eq!(map.damaged(), None);

    ftruncate(&file, 3 * PAGE).unwrap();
    assert_eq!(map.damaged(), None, "no access yet");
    assert_eq!(area.load_u16(2, Ordering::Acquire), 0);
    area.store_u16(2, 5, Ordering::Release);
    assert_eq!(area.load_u16(2, Ordering::Acquire), 5);
    map.write(Gpa(4 * PAGE), &[1; 10]).unwrap();
    assert_eq!(map.read_obj::<u64>(Gpa(7 * PAGE)).unwrap(), 0);
    let mut seen = vec![9; 4 * PAGE as usize];
    assert_eq!(iov.read(0, &mut seen), seen.len());
    // Pages that exist show the file. Lost pages show zeroes, or later writes.
    let (there, gone) = seen.split_at(2 * PAGE as usize);
    assert!(there.iter().all(|b| *b == 7));
    assert!(gone[..PAGE as usize].iter().all(|b| *b == 0));
    assert_eq!(gone[PAGE as usize..][..11], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]);

    assert_ne!(fault::damages(), before);
    let (gpa, user, len) = (Gpa(0), UserAddr(0x7000_0000), 8 * PAGE);
    assert_eq!(map.damaged(), Some(Damaged::Memory { gpa, user, len, first: true }));
    assert!(!map.damaged().unwrap().is_first());
    assert_eq!(other.damaged(), None);

    // The file has its old length again, but the mapping is lost: a new mapping shows the file.
    ftruncate(&file, 8 * PAGE).unwrap();
    let slot = Slot::map_or_share(&file, 0, Gpa(0), UserAddr(0), 8 * PAGE, map.slots()).unwrap();
    let again = Map::new(vec![slot]).unwrap();
    map.write(Gpa(6 * PAGE), &[3]).unwrap();
    assert_eq!(again.read_obj::<u8>(Gpa(6 * PAGE)).unwrap(), 0);
    assert_eq!(again.damaged(), None);
}

#[test]
fn a_log_that_shrinks() {
    fault::guard().unwrap();
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * PAGE).unwrap();
    let log = Arc::new(Log::map(&file, 0, 2 * PAGE).unwrap());
    let mut marks = Marks::off();
    marks.set_view(&View::default().with_log(Some(log.clone())).unwrap());
    // A byte of the log stands for 32 KiB of memory.
    let second_page = Gpa(PAGE * 8 * PAGE);
    for gpa in [Gpa(0), second_page] {
        marks.wrote(gpa, 1);
        marks.commit();
        assert!(log.is_marked(gpa));
    }
    ftruncate(&file, PAGE).unwrap();
    marks.wrote(Gpa(PAGE), 1);
    marks.commit();
    assert_eq!(marks.damaged(), None);
    marks.wrote(second_page, 1);
    marks.commit();
    assert_eq!(marks.damaged(), Some(Damaged::Log { len: 2 * PAGE, first: true }));
    assert!(log.is_marked(Gpa(0)) && log.is_marked(Gpa(PAGE)));
}

#[test]
fn accesses_without_free_huge_pages() {
    const HUGE: u64 = 2 << 20;
    fault::guard().unwrap();
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    // A kernel without huge pages cannot run out of them.
    let Ok(file) = memfd_create("guest", flags) else { return };
    ftruncate(&file, 4 * HUGE).unwrap();
    // The mapping reserves no pages, so this page may or may not exist. After this it does not.
    let map = map_of(&file, 4 * HUGE / PAGE);
    map.write(Gpa(2 * HUGE), b"hello").unwrap();
    ftruncate(&file, 0).unwrap();
    for gpa in [HUGE + 5, 3 * HUGE - 1, HUGE + HUGE / 2] {
        map.write_obj(Gpa(gpa), &1u8).unwrap();
        assert_eq!(map.read_obj::<u8>(Gpa(gpa)).unwrap(), 1);
    }
    assert!(map.damaged().is_some());
}

#[test]
fn memory_of_a_disk_without_free_huge_pages() {
    const HUGE: u64 = 2 << 20;
    fault::guard().unwrap();
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::ALLOW_SEALING;
    let Ok(file) = memfd_create("disk", flags) else { return };
    ftruncate(&file, 2 * HUGE).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    // The machine has none if the kernel cannot reserve them.
    let has_pages = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 2 * HUGE).is_ok();
    let ram = Ram::of_file(file).unwrap();
    assert!(!ram.is_damaged());
    assert_eq!(ram.zero(HUGE + 5, 10, false), 10);
    assert_eq!(ram.is_damaged(), !has_pages);
}

/// Many holes cost only a few of the kernel's mappings, whether they exist at once or are made one by one.
#[test]
fn a_file_with_many_missing_pages() {
    const PAGES: u64 = 4096;
    fault::guard().unwrap();
    let (file, map) = memory(PAGES, MemfdFlags::empty());
    let host = |gpa| map.contiguous(Gpa(gpa), 1).unwrap().as_ptr().addr();
    let (first, last) = (host(0), host(PAGES * PAGE - 1));
    ftruncate(&file, 0).unwrap();
    for page in (0..PAGES).rev().step_by(2) {
        map.write_obj(Gpa(page * PAGE), &1u8).unwrap();
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| {
        let start = line.split('-').next().map(|start| usize::from_str_radix(start, 16).unwrap());
        start.is_some_and(|start| (first..=last).contains(&start))
    });
    assert!(ours.count() < 40, "{maps}");
}

#[test]
fn all_threads_at_once() {
    const THREADS: u64 = 8;
    const PAGES: u64 = 256;
    fault::guard().unwrap();
    for _ in 0..50 {
        let (file, shared) = memory(PAGES, MemfdFlags::empty());
        let start = Barrier::new(THREADS as usize);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (shared, start, file) = (&shared, &start, &file);
                scope.spawn(move || {
                    let (own_file, own) = memory(PAGES, MemfdFlags::empty());
                    start.wait();
                    ftruncate(&own_file, 0).unwrap();
                    if thread == 0 {
                        ftruncate(file, PAGE).unwrap();
                    }
                    for page in 0..PAGES {
                        shared.write_obj(Gpa(page * PAGE + thread), &1u8).unwrap();
                        own.write_obj(Gpa(page * PAGE), &page).unwrap();
                        assert_eq!(own.read_obj::<u64>(Gpa(page * PAGE)).unwrap(), page);
                    }
                    assert!(own.damaged().is_some());
                    unmap(own);
                });
            }
        });
        assert!(shared.damaged().is_some());
        unmap(shared);
    }
}

#[test]
fn mappings_change_while_the_handler_runs() {
    fault::guard().unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let (_file, map) = memory(3, MemfdFlags::empty());
                    let (_other, more) = memory(70, MemfdFlags::empty());
                    map.write_obj(Gpa(PAGE), &1u8).unwrap();
                    drop(map);
                    more.write_obj(Gpa(PAGE), &1u8).unwrap();
                    assert_eq!(more.damaged(), None, "a fault of another mapping");
                    unmap(more);
                }
            });
        }
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let (file, map) = memory(4, MemfdFlags::empty());
                    ftruncate(&file, PAGE).unwrap();
                    map.write_obj(Gpa(2 * PAGE), &0x55u8).unwrap();
                    assert_eq!(map.read_obj::<u8>(Gpa(2 * PAGE)).unwrap(), 0x55);
                    assert!(map.damaged().is_some());
                    unmap(map);
                }
                over.store(true, Ordering::Relaxed);
            });
        }
    });
}

/// Returns a mapping that `kickless_memory` does not know, of a file that is too short.
fn foreign() -> *mut u8 {
    let file = memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap();
    // SAFETY: a new mapping at unused addresses, which is never unmapped.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
        )
    };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

fn touch(at: *mut u8) {
    // SAFETY: a mapped page that the file does not have. The access is to raise a signal.
    unsafe { at.write_volatile(1) }
}

extern "C" fn leave(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: async-signal-safe; the kernel gives a valid `info`.
    unsafe { libc::_exit(if (*info).si_code == libc::BUS_ADRERR { 42 } else { 43 }) }
}

fn set_handler(handler: libc::sighandler_t, flags: libc::c_int) {
    // SAFETY: all zeroes are valid, and so is the handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()), 0);
    }
}

/// Runs a case in a child process. The tests below start it, so it is no test of its own.
#[test]
fn child() {
    let Ok(scenario) = std::env::var(CHILD) else { return };
    let ours = || {
        let (file, map) = memory(1, MemfdFlags::empty());
        ftruncate(&file, 0).unwrap();
        map.write_obj(Gpa(0), &1u8).unwrap();
    };
    let theirs = leave as extern "C" fn(_, _, _) as usize;
    match scenario.as_str() {
        "unguarded" => ours(),
        "guarded" => {
            fault::guard().unwrap();
            ours();
        }
        "foreign" => {
            fault::guard().unwrap();
            ours();
            touch(foreign());
        }
        "foreign-handled" => {
            set_handler(theirs, libc::SA_SIGINFO);
            fault::guard().unwrap();
            ours();
            touch(foreign());
        }
        "ignored" => {
            set_handler(libc::SIG_IGN, 0);
            fault::guard().unwrap();
            // SAFETY: a signal to this thread.
            assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
            ours();
            touch(foreign());
        }
        "sent" | "sent-default" => {
            if scenario == "sent-default" {
                set_handler(libc::SIG_DFL, 0);
            }
            fault::guard().unwrap();
            // SAFETY: a signal to this thread.
            unsafe { libc::raise(libc::SIGBUS) };
            // The earlier action may only take effect at the second signal.
            // SAFETY: as above.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        "sent-handled" => {
            set_handler(theirs, libc::SA_SIGINFO);
            fault::guard().unwrap();
            // SAFETY: a signal to this thread.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        "crowded" => crowded(),
        "full" => full(),
        "too-many" => too_many(),
        other => panic!("no scenario {other}"),
    }
}

/// Returns the number of entries in the kernel's list of mappings.
fn listed() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Makes holes in many mappings, a few in each.
fn crowded() {
    const MAPPINGS: usize = 200;
    const PAGES: u64 = 32;
    fault::guard().unwrap();
    let all: Vec<_> = (0..MAPPINGS).map(|_| memory(PAGES, MemfdFlags::empty())).collect();
    let before = listed();
    for (file, map) in &all {
        ftruncate(file, 0).unwrap();
        for page in (1..PAGES).step_by(2) {
            map.write_obj(Gpa(page * PAGE), &page).unwrap();
        }
    }
    for (_, map) in &all {
        assert!((1..PAGES).step_by(2).all(|page| map.read_obj::<u64>(Gpa(page * PAGE)).unwrap() == page));
    }
    // 512 single pages, and the rest of each mapping.
    let more = listed() - before;
    assert!(more < 2 * 512 + 2 * MAPPINGS, "{more}");
    // When these mappings are gone, missing pages are replaced one by one again.
    all.into_iter().for_each(|(_, map)| unmap(map));
    let (file, map) = memory(3, MemfdFlags::empty());
    ftruncate(&file, 0).unwrap();
    map.write_obj(Gpa(PAGE), &1u8).unwrap();
    ftruncate(&file, 3 * PAGE).unwrap();
    map_of(&file, 3).write_obj(Gpa(2 * PAGE), &5u8).unwrap();
    assert_eq!(map.read_obj::<u8>(Gpa(2 * PAGE)).unwrap(), 5, "the page behind the hole is the file's");
}

/// Makes holes when the kernel cannot split a mapping any more.
fn full() {
    const PAGES: usize = 1 << 18;
    fault::guard().unwrap();
    let all: Vec<_> = (0..3).map(|_| memory(9, MemfdFlags::empty())).collect();
    let len = PAGES * PAGE as usize;
    // SAFETY: a new mapping at unused addresses, which is never unmapped.
    let at = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    let is_full = (0..PAGES).step_by(2).any(|page| {
        let page = at.cast::<u8>().wrapping_add(page * PAGE as usize).cast();
        // SAFETY: unused pages of the mapping above.
        unsafe { libc::mprotect(page, PAGE as usize, libc::PROT_READ) != 0 }
    });
    // Otherwise the kernel's list is too large to fill it here.
    if is_full {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, PAGE).unwrap();
        // There may be room for one or two mappings, but not for three.
        let slot = |_| Slot::map(&file, 0, Gpa(0), UserAddr(0), PAGE);
        let slots: Vec<_> = (0..3).map(slot).collect();
        let Err(Error::Mmap { source, .. }) = &slots[2] else { panic!("the list is full") };
        assert!(source.to_string().contains("vm.max_map_count"), "{source}");
        // The kernel can replace a mapping if there is room for one.
        slots.into_iter().flatten().for_each(|slot| unmap(Arc::new(Map::new(vec![slot]).unwrap())));
        for (file, map) in &all {
            ftruncate(file, PAGE).unwrap();
            map.write_obj(Gpa(4 * PAGE), &5u8).unwrap();
            assert_eq!(map.read_obj::<u8>(Gpa(4 * PAGE)).unwrap(), 5);
            assert!(map.damaged().is_some());
        }
    }
}

/// Makes as many mappings of one file as possible. The next is refused, and a missing page is still replaced.
fn too_many() {
    fault::guard().unwrap();
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * PAGE).unwrap();
    let slot = || Slot::map(&file, 0, Gpa(0), UserAddr(0), 2 * PAGE);
    let mut slots: Vec<Slot> = (0..1 << 15).map(|_| slot().unwrap()).collect();
    for _ in 0..2 {
        let Err(Error::Mmap { source, .. }) = slot() else { panic!("one more than there can be") };
        assert!(source.to_string().contains("32768"), "{source}");
    }
    slots.truncate(slots.len() - 1);
    slots.push(slot().unwrap());
    ftruncate(&file, 0).unwrap();
    let map = Map::new(vec![slots[17].clone()]).unwrap();
    map.write_obj(Gpa(PAGE), &5u8).unwrap();
    assert!(map.damaged().is_some());
}

/// Runs `scenario` in a child process.
fn end_of(scenario: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--test-threads=1"]).env(CHILD, scenario);
    command.output().unwrap().status
}

/// Front-ends cannot fill the kernel's list of mappings, and the process survives a full list.
#[test]
fn front_ends_cannot_reach_the_mapping_limit_and_a_full_list_is_survived() {
    for scenario in ["crowded", "full", "too-many"] {
        assert!(end_of(scenario).success(), "{scenario}");
    }
}

#[test]
fn foreign_signals_have_their_previous_effect() {
    assert!(end_of("guarded").success());
    for scenario in ["unguarded", "foreign", "ignored", "sent", "sent-default"] {
        assert_eq!(end_of(scenario).signal(), Some(libc::SIGBUS), "{scenario}");
    }
    assert_eq!(end_of("foreign-handled").code(), Some(42));
    assert_eq!(end_of("sent-handled").code(), Some(43));
}
