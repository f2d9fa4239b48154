//! Tests images of a Ceph cluster: their features, their locks, and requests while the cluster is stopped or
//! restarted. `make test-rbd` runs these tests, one after the other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![cfg(feature = "rbd")]

mod common;

use common::ceph::{Client, Image, PausedOsd, rbd, run, spec};
use common::{InFlight, TIMED_OUT, guest, open, options, run_on_extent, worker};
use kickless_disk::lock::LockError;
use kickless_disk::{Cache, Disk, DiskSpec, Error, IoError, Request, Resized};
use kickless_io::Errno;
use kickless_memory::Gpa;
use kickless_testing::Random;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

const LEN: u64 = 1 << 20;
/// Options of a cache that writes nothing before a flush.
const LAZY: &str =
    "rbd_cache_policy=writeback&rbd_cache_writethrough_until_flush=false&rbd_cache_max_dirty_age=3600";
/// Far longer than each bounded wait of these tests.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn discards_and_zeroes() {
    let contents = Random(1).bytes(LEN);
    let image = Image::with(&contents, &["--object-size=64K"]);
    let disk = open(&image.spec(""));
    let limits = disk.limits();
    assert_eq!((limits.discard.unwrap().alignment, limits.write_zeroes.unwrap().alignment), (128, 1));
    assert_eq!((limits.min_io_size, limits.opt_io_size, limits.block_size), (128, 128, 512));
    assert!(limits.zeroes_may_unmap);
    assert_eq!((disk.size(), disk.identity()), (LEN, format!("rbd-{}", image.id()).as_str()));
    let mut worker = worker(&disk);
    assert_eq!(image.objects(), 16);
    run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, 4096, 128 << 10, false);
    assert_eq!(image.objects(), 16, "zeroes without unmap freed space");
    run_on_extent(&mut worker, Request::WriteZeroes { durable: true }, 256 << 10, 128 << 10, true);
    assert_eq!(image.objects(), 14, "no space was freed");
    run_on_extent(&mut worker, Request::Discard { durable: true }, 512 << 10, 256 << 10, false);
    assert_eq!(image.objects(), 10, "no space was freed");
    let mut expected = contents;
    for range in [4096..132 << 10, 256 << 10..384 << 10, 512 << 10..768 << 10] {
        expected[range].fill(0);
    }
    assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()));
    assert!(image.contents() == expected);
}

/// The library may cache writes. They are in the cluster when a flush or a durable write completes.
#[test]
fn flushed_writes_are_in_the_cluster() {
    for cache in [Cache::None, Cache::Writeback] {
        let mut expected = Random(2).bytes(LEN);
        let image = Image::of(&expected);
        let disk = Disk::open(&image.spec(LAZY), &options(cache, false)).unwrap();
        let mut worker = worker(&disk);
        assert_eq!(worker.write(512, &[7; 8192], 0), Ok(()));
        expected[512..512 + 8192].fill(7);
        assert_eq!(image.contents() == expected, cache == Cache::None);
        assert_eq!(worker.flush(), Ok(()));
        assert!(image.contents() == expected, "{cache}");
        let view = guest(4096);
        worker.io(0).buffers_mut().push(&view, Gpa(0), 4096).unwrap();
        assert_eq!(worker.run(Request::Write { offset: 65536, durable: true }), Ok(()));
        expected[65536..65536 + 4096].fill(0);
        assert!(image.contents() == expected, "{cache}");
    }
}

/// Two clients use an image in turns. `write_back` and `reload` move the writes from one cache to the other.
#[test]
fn caches_of_two_clients_in_turns() {
    let image = Image::of(&[1; 65536]);
    let cached = image.spec(LAZY);
    let [one, other] = [(); 2].map(|()| Disk::open(&cached, &options(Cache::Writeback, false)).unwrap());
    let (mut first, mut second) = (worker(&one), worker(&other));
    assert_eq!(first.read(0, 512), (Ok(()), vec![1; 512]));
    assert_eq!(second.write(0, &[2; 512], 0), Ok(()));
    other.write_back().unwrap();
    assert!(image.contents()[..512] == [2; 512]);
    one.reload(false).unwrap();
    assert_eq!(first.read(0, 512), (Ok(()), vec![2; 512]));
}

#[test]
fn snapshots_and_namespaces() {
    let contents = Random(3).bytes(LEN);
    let image = Image::of(&contents);
    rbd(&["snap", "create", "--no-progress", &format!("{}@monday", image.name)]);
    let disk = open(&image.spec(""));
    assert_eq!(worker(&disk).write(0, &[0; 4096], 0), Ok(()));
    let text = image.text("").replace('?', "@monday?");
    let refused = Disk::open(&spec(&text), &options(Cache::None, false)).unwrap_err().to_string();
    assert!(refused.contains("--read-only"), "{refused}");
    let snapshot = Disk::open(&spec(&text), &options(Cache::None, true)).unwrap();
    assert!(snapshot.limits().discard.is_none() && snapshot.identity() != disk.identity());
    let mut reader = worker(&snapshot);
    assert!(reader.read(0, LEN as usize) == (Ok(()), contents));
    assert_eq!(reader.write(0, &[0; 512], 0), Err(IoError::ReadOnly));
    // A snapshot needs no lock.
    snapshot.acquire_own_lock().unwrap();
    drop(reader);
    drop(snapshot);
    rbd(&["snap", "purge", "--no-progress", &image.name]);

    let name = format!("rbd/tenant/{}", image.name.strip_prefix("rbd/").unwrap());
    rbd(&["create", "--size=1M", &name]);
    let tenant = open(&spec(&image.text("").replace(&image.name, &name)));
    // The image of the same name outside the namespace has other contents.
    assert_eq!(worker(&tenant).read(8192, 512), (Ok(()), vec![0; 512]));
    drop(tenant);
    rbd(&["remove", "--no-progress", &name]);
}

#[test]
fn errors_of_an_open_say_the_reason() {
    let image = Image::of(&[1; 65536]);
    let refused = |text: &str, needle: &str| {
        let error = Disk::open(&spec(text), &options(Cache::None, false)).unwrap_err();
        assert!(error.to_string().contains(needle), "{error}");
        error
    };
    let text = image.text("");
    let other = |name: &str| text.replace(&image.name, name);
    refused(&other("none/image"), "there is no pool \"none\"");
    refused(&other("rbd/none"), "there is no image \"none\"");
    refused(&other("rbd/none/image"), "there is no namespace \"none\" in pool \"rbd\"");
    let snapshot = Disk::open(&spec(&text.replace('?', "@none?")), &options(Cache::None, true));
    assert!(snapshot.unwrap_err().to_string().contains("with a snapshot \"none\""));
    refused(
        "rbd:a/b?conf=/no/ceph.conf&mon_host=127.0.0.1:1",
        "the configuration /no/ceph.conf cannot be read",
    );
    refused(&image.text("rbd_cash=1"), "Ceph refuses the setting rbd_cash=1");
    // No program listens on this port.
    let no_cluster = image.text("mon_host=127.0.0.1:1&client_mount_timeout=1");
    refused(&no_cluster, "the cluster cannot be connected to");
    let empty = format!("{}-empty", image.name);
    rbd(&["create", "--size=0", &empty]);
    assert!(matches!(refused(&other(&empty), "0 bytes"), Error::Size(0)));
    rbd(&["remove", "--no-progress", &empty]);
}

/// Sets up clients as docs/disks.md tells operators. Each has a key, and only the rights that it needs.
#[test]
fn clients_with_restricted_rights() {
    let image = Image::of(&[1; 65536]);
    let web = Client::new("web", &["mon", "profile rbd", "osd", "profile rbd pool=rbd"]);
    let reader = Client::new("reader", &["mon", "profile rbd", "osd", "profile rbd-read-only pool=rbd"]);
    let tenant =
        Client::new("tenant", &["mon", "profile rbd", "osd", "profile rbd pool=rbd namespace=tenant"]);

    let disk = open(&image.spec(&web.options()));
    disk.acquire_own_lock().unwrap();
    assert_eq!(worker(&disk).write(0, &[2; 512], 0), Ok(()));
    drop(disk);
    // A client that may only read has neither lock nor watch.
    let disk = Disk::open(&image.spec(&reader.options()), &options(Cache::None, true)).unwrap();
    disk.acquire_own_lock().unwrap();
    assert_eq!(worker(&disk).read(0, 1024), (Ok(()), [[2; 512], [1; 512]].concat()));
    drop(disk);

    let refused = |client: &str, read_only, needle: &str| {
        let error = Disk::open(&image.spec(client), &options(Cache::None, read_only)).unwrap_err();
        assert!(error.to_string().contains(needle), "{error}");
    };
    refused(&reader.options(), false, &format!("does not let client.reader-{} write it", std::process::id()));
    refused(&tenant.options(), true, &format!("does not let client.tenant-{} read it", std::process::id()));
    let impostor = web.with_key_of(&reader);
    refused(
        &impostor.options(),
        false,
        &format!("it knows no client.web-{} with this key", std::process::id()),
    );
    refused("id=web&keyring=/no/keyring", false, "no keyring of client.web found");

    let name = format!("rbd/tenant/{}", image.name.strip_prefix("rbd/").unwrap());
    rbd(&["create", "--size=1M", &name]);
    let theirs = open(&spec(&image.text(&tenant.options()).replace(&image.name, &name)));
    assert_eq!(worker(&theirs).write(0, &[3; 512], 0), Ok(()));
    drop(theirs);
    rbd(&["remove", "--no-progress", &name]);
}

fn expect_owned(outcome: Result<(), LockError>) {
    assert!(matches!(outcome, Err(LockError::Owned(_))), "{outcome:?}");
}

#[test]
fn an_image_has_one_owner_at_a_time() {
    let image = Image::of(&[1; 65536]);
    let (one, other) = (open(&image.spec("")), open(&image.spec("")));
    other.check_own_lock().unwrap();
    one.acquire_own_lock().unwrap();
    one.acquire_own_lock().unwrap();
    expect_owned(other.check_own_lock());
    expect_owned(other.acquire_own_lock());
    // A write does not get the lock either.
    assert_eq!(worker(&other).write(0, &[2; 512], 0), Err(IoError::Os(Errno::ROFS)));
    assert_eq!(worker(&one).write(0, &[3; 512], 0), Ok(()));
    one.write_back().unwrap();
    one.release_own_lock();
    one.release_own_lock();
    other.acquire_own_lock().unwrap();
    other.reload(false).unwrap();
    assert_eq!(worker(&other).read(0, 512), (Ok(()), vec![3; 512]));
    expect_owned(one.check_own_lock());
    // The drop of the owner releases the lock.
    drop(other);
    one.check_own_lock().unwrap();
}

/// A client that took its lock by a write gives it up on request. The other disk does not request it from a
/// live client.
#[test]
fn a_client_without_an_exclusive_lock_keeps_its_lock() {
    let image = Image::of(&[1; 65536]);
    let (one, other) = (open(&image.spec("")), open(&image.spec("")));
    assert_eq!(worker(&one).write(0, &[2; 512], 0), Ok(()));
    expect_owned(other.check_own_lock());
    expect_owned(other.acquire_own_lock());
    assert_eq!(worker(&one).write(0, &[3; 512], 0), Ok(()));
}

/// A client that lost its lock to another one, because it seemed dead, cannot write any more.
#[test]
fn a_blocked_client_cannot_write() {
    let image = Image::of(&[1; 65536]);
    let (one, other) = (open(&image.spec("")), open(&image.spec("")));
    one.acquire_own_lock().unwrap();
    let Err(LockError::Owned(address)) = other.check_own_lock() else { panic!("it is not locked") };
    run("ceph", &["osd", "blocklist", "add", &address], &[]);
    other.acquire_own_lock().unwrap();
    assert_eq!(worker(&one).write(0, &[2; 512], 0), Err(IoError::Os(Errno::SHUTDOWN)));
    let error = one.acquire_own_lock().unwrap_err().to_string();
    assert!(error.contains("blocked this client"), "{error}");
    assert_eq!(worker(&other).read(0, 512), (Ok(()), vec![1; 512]));
}

#[test]
fn an_image_without_a_lock() {
    let image = Image::with(&[1; 65536], &["--image-feature=layering"]);
    let disk = open(&image.spec(""));
    for outcome in [disk.check_own_lock(), disk.acquire_own_lock()] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, LockError::None) && error.to_string().contains("--lock=off"), "{error}");
    }
    disk.release_own_lock();
    assert_eq!(worker(&disk).write(0, &[2; 512], 0), Ok(()));
}

/// Waits until the disk signals a change of its size.
fn wait_for_resize(disk: &Disk) {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let waker = disk.resized().unwrap();
    let mut fds = [PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "the disk signals no change");
    waker.clear();
}

#[test]
fn an_image_grows_and_does_not_shrink() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec(""));
    disk.acquire_own_lock().unwrap();
    assert_eq!(disk.refresh_size().unwrap(), Resized::Same);
    rbd(&["resize", "--no-progress", "--size=2M", &image.name]);
    wait_for_resize(&disk);
    assert_eq!(disk.refresh_size().unwrap(), Resized::Grown { from: LEN, to: 2 * LEN });
    assert_eq!((disk.refresh_size().unwrap(), disk.size()), (Resized::Same, 2 * LEN));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(2 * LEN - 512, &[2; 512], 0), Ok(()));
    assert_eq!(worker.read(2 * LEN - 1024, 1024), (Ok(()), [[0; 512], [2; 512]].concat()));
    rbd(&["resize", "--no-progress", "--allow-shrink", "--size=1M", &image.name]);
    wait_for_resize(&disk);
    assert_eq!(disk.refresh_size().unwrap(), Resized::Shrunk { from: 2 * LEN, to: LEN });
    assert_eq!(disk.size(), 2 * LEN);
    assert_eq!(worker.read(LEN - 512, 512), (Ok(()), vec![1; 512]));
    assert_eq!(worker.read(LEN - 512, 1024).0, Err(IoError::Shrunk));
    assert_eq!(worker.write(LEN - 512, &[2; 1024], 0), Err(IoError::Shrunk));
    assert_eq!(worker.write(LEN, &[2; 512], 0), Err(IoError::Shrunk));
}

#[test]
fn requests_wait_for_a_cluster_that_is_paused_or_killed() {
    let contents = Random(4).bytes(LEN);
    let image = Image::of(&contents);
    let disk = open(&image.spec("stop-timeout=1"));
    for kills in [false, true] {
        let paused = PausedOsd::pause();
        let mut requests = InFlight::start(&disk, 100, 20);
        // Longer than requests wait in a stop.
        thread::sleep(Duration::from_millis(1500));
        if kills {
            paused.kill();
        }
        drop(paused);
        assert!(requests.finish().iter().all(Result::is_ok), "{kills}");
        let mut read = vec![0; 100 * 4096];
        requests.view.read(Gpa(0), &mut read).unwrap();
        assert!(read == contents[..100 * 4096], "{kills}");
    }
}

#[test]
fn a_stop_does_not_wait_for_a_cluster_that_is_paused() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec("stop-timeout=1"));
    disk.acquire_own_lock().unwrap();
    let paused = PausedOsd::pause();
    let mut requests = InFlight::start(&disk, 3, 3);
    disk.limit_remote_waits();
    assert_eq!(requests.finish(), [TIMED_OUT; 6]);
    // The release of the lock, a part of the stop, does not wait either.
    let start = Instant::now();
    disk.release_own_lock();
    disk.release_own_lock();
    assert!(start.elapsed() < LIMIT);
    drop(requests);
    drop(paused);
    // The next session waits for the cluster again, and the old lock is released before its own.
    disk.acquire_own_lock().unwrap();
    disk.reload(false).unwrap();
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![1; 512]));
}

/// Requests do not fail in a stop while the cluster answers.
#[test]
fn a_stop_with_a_cluster_that_answers() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec("stop-timeout=60"));
    let mut requests = InFlight::start(&disk, 64, 64);
    disk.limit_remote_waits();
    assert!(requests.finish().iter().all(Result::is_ok));
}

#[test]
fn waits_to_release_and_close_are_bounded() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec("stop-timeout=5"));
    disk.acquire_own_lock().unwrap();
    let paused = PausedOsd::pause();
    let start = Instant::now();
    // Only the first of these calls waits.
    for _ in 0..LIMIT.as_secs() {
        disk.release_own_lock();
    }
    assert!(start.elapsed() < LIMIT);
    drop(paused);
    // After an answer of the cluster, requests wait again.
    disk.acquire_own_lock().unwrap();
    let mut requests = InFlight::start(&disk, 64, 0);
    disk.limit_remote_waits();
    assert!(requests.finish().iter().all(Result::is_ok));
    drop(requests);
    let paused = PausedOsd::pause();
    let start = Instant::now();
    drop(disk);
    assert!(start.elapsed() < LIMIT);
    drop(paused);
    // The image is closed in the end.
    open(&image.spec("")).acquire_own_lock().unwrap();
}

#[test]
fn an_open_waits_a_bounded_time_for_a_cluster() {
    let image = Image::of(&[1; LEN as usize]);
    let paused = PausedOsd::pause();
    let error = Disk::open(&image.spec(""), &options(Cache::None, false)).unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
    drop(paused);
}

#[test]
fn faults_apply_to_an_image() {
    let image = Image::of(&[3; LEN as usize]);
    let faulty = |rules: &str| {
        let spec = DiskSpec::Fault(rules.parse().unwrap(), Box::new(image.spec("")));
        Disk::open(&spec, &options(Cache::None, false))
    };
    let disk = faulty("eio@0-7,delay=5ms@write,delay=1ms@flush").unwrap();
    disk.acquire_own_lock().unwrap();
    let mut worker = worker(&disk);
    assert_eq!(worker.read(0, 512).0, Err(IoError::Os(Errno::IO)));
    assert_eq!(worker.write(4096, &[7; 4096], 0), Ok(()));
    assert_eq!(worker.flush(), Ok(()));
    assert_eq!(worker.read(4096, 1024), (Ok(()), vec![7; 1024]));
    assert!(matches!(faulty("short@1%"), Err(Error::Fault { under: "rbd:", .. })));
}
