//! Tests of the files that a device keeps open.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::quota::AddressSpace;
use kickless_memory::{Gpa, Map, Mapper, Mapping, Slot, UserAddr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE: u64 = 4096;
/// A time after which a test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// Holds back the other tests, because one uses up the descriptors of this process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn file(name: &str, pages: u64) -> OwnedFd {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, pages * PAGE).unwrap();
    file
}

/// Returns the mapper of a device that may keep this many files open.
fn device(files_max: usize) -> Mapper {
    Mapper::within(Arc::new(AddressSpace::default().with_files(files_max)).join(1 << 30))
}

/// Maps a page of a file.
fn slot(mapper: &Mapper, file: &OwnedFd, page: u64) -> Slot {
    mapper.slot(file, page * PAGE, Gpa(page * PAGE), UserAddr(0), PAGE, &[]).unwrap()
}

fn number(mapping: &Mapping) -> Option<i32> {
    mapping.file().map(|file| file.as_raw_fd())
}

/// Returns the number of descriptors of memfds of this name.
fn open(name: &str) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains(&format!("memfd:{name} "))).count()
}

#[test]
fn a_device_has_one_descriptor_for_each_file() {
    let _turn = turn();
    let (mapper, one, two) = (device(16), file("one", 4), file("two", 4));
    let [first, second, other] = [slot(&mapper, &one, 0), slot(&mapper, &one, 2), slot(&mapper, &two, 0)];
    // The front-end sends a descriptor with each message.
    let again = one.try_clone().unwrap();
    let log = mapper.log(&again, PAGE, 64).unwrap();
    let inflight = mapper.inflight(&two, 8, 64).unwrap();
    drop((one, two, again));
    assert_eq!((open("one"), open("two")), (1, 1));
    let descriptor = number(first.mapping()).unwrap();
    assert_eq!(number(second.mapping()), Some(descriptor));
    assert_eq!(log.file().unwrap().as_raw_fd(), descriptor);
    assert_ne!(number(other.mapping()), Some(descriptor));
    assert_eq!(inflight.file().unwrap().as_raw_fd(), number(other.mapping()).unwrap());
    assert_eq!((second.mapping().offset(), log.offset(), inflight.offset()), (2 * PAGE, PAGE, 8));
    assert_eq!((second.len(), log.len(), inflight.len()), (PAGE, 64, 64));

    // Another device has descriptors of its own, through which it finds the same memory.
    let next = device(16);
    let taken =
        next.slot(second.mapping().file().unwrap(), 2 * PAGE, Gpa(0), UserAddr(0), PAGE, &[]).unwrap();
    assert_eq!(open("one"), 2);
    let [before, after] = [second, taken].map(|slot| Map::new(vec![slot]).unwrap());
    before.write(Gpa(2 * PAGE), b"here").unwrap();
    let mut seen = [0; 4];
    after.read(Gpa(0), &mut seen).unwrap();
    assert_eq!(&seen, b"here");
}

#[test]
fn a_file_is_closed_after_its_last_mapping() {
    let _turn = turn();
    let mapper = device(16);
    let memory = file("closed", 2);
    let (first, second) = (slot(&mapper, &memory, 0), slot(&mapper, &memory, 1));
    drop(memory);
    let released = [&first, &second].map(|slot| slot.mapping().released());
    drop(first);
    assert!(released[0].wait(LIMIT));
    assert_eq!(open("closed"), 1);
    drop(second);
    assert!(released[1].wait(LIMIT));
    assert_eq!(open("closed"), 0, "it is open although its memory is released");
}

#[test]
fn too_many_files_are_mapped_and_not_kept() {
    let _turn = turn();
    let mapper = device(2);
    let files = [file("a", 2), file("b", 2), file("c", 2)];
    let [a, b, c] = [0, 1, 2].map(|i| slot(&mapper, &files[i], 0));
    assert!(number(a.mapping()).is_some() && number(b.mapping()).is_some());
    assert_eq!(number(c.mapping()), None);
    assert_eq!(number(slot(&mapper, &files[0], 1).mapping()), number(a.mapping()), "a file that is known");
    drop(b);
    assert!(mapper.unused().wait(LIMIT));
    let d = slot(&mapper, &files[2], 1);
    assert!(number(d.mapping()).is_some(), "there is room again");
    assert_eq!(number(c.mapping()), None);
}

#[test]
fn files_that_are_not_regular_have_a_descriptor_each() {
    let _turn = turn();
    let mapper = device(16);
    let zero: OwnedFd = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap().into();
    let [first, second] = [0, 1].map(|page| slot(&mapper, &zero, page));
    assert!(number(first.mapping()).is_some());
    assert_ne!(number(first.mapping()), number(second.mapping()));
}

#[test]
fn memory_is_mapped_without_a_free_descriptor() {
    let _turn = turn();
    let (mapper, memory) = (device(16), file("full", 2));
    drop(slot(&mapper, &file("first", 1), 0));
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
    let mapped = mapper.slot(&memory, 0, Gpa(0), UserAddr(0), PAGE, &[]);
    setrlimit(Resource::Nofile, before).unwrap();
    assert_eq!(number(mapped.unwrap().mapping()), None);
    assert!(number(slot(&mapper, &memory, 1).mapping()).is_some());
}

#[test]
fn mappings_of_no_device_keep_no_file() {
    let _turn = turn();
    let memory = file("nobody", 1);
    let slot = Slot::map(&memory, 0, Gpa(0), UserAddr(0), PAGE).unwrap();
    assert_eq!((number(slot.mapping()), open("nobody")), (None, 1));
}
