//! Images of a Ceph cluster: what they can do, whose they are, and what becomes of requests when the cluster stops or goes.
//! `make test-rbd` runs these, one after the other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![cfg(feature = "rbd")]

mod common;

use common::ceph::{Client, Image, Osd, rbd, run, spec};
use common::{GONE, InFlight, guest, on_extent, open, options, worker};
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
/// A cache, where there is one, that keeps what it has got until it is asked.
const LAZY: &str =
    "rbd_cache_policy=writeback&rbd_cache_writethrough_until_flush=false&rbd_cache_max_dirty_age=3600";
/// Far more than anything here that is bounded.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn discards_and_zeroes() {
    let contents = Random(1).bytes(LEN);
    let image = Image::with(&contents, &["--object-size=64K"]);
    let disk = open(&image.spec(""));
    let limits = disk.limits();
    assert_eq!((limits.discard.unwrap().alignment, limits.write_zeroes.unwrap().alignment), (128, 1));
    assert_eq!((limits.min_io_size, limits.opt_io_size, limits.block_size), (128, 128, 512));
    assert!(limits.zeroes_may_unmap && limits.secure_erase.is_none());
    assert_eq!((disk.size(), disk.identity()), (LEN, format!("rbd-{}", image.id()).as_str()));
    let mut worker = worker(&disk);
    assert_eq!(image.objects(), 16);
    on_extent(&mut worker, Request::WriteZeroes { durable: false }, 4096, 128 << 10, false);
    assert_eq!(image.objects(), 16, "the space was to be kept");
    on_extent(&mut worker, Request::WriteZeroes { durable: true }, 256 << 10, 128 << 10, true);
    assert_eq!(image.objects(), 14, "no space was given back");
    on_extent(&mut worker, Request::Discard { durable: true }, 512 << 10, 256 << 10, false);
    assert_eq!(image.objects(), 10, "no space was given back");
    let mut expected = contents;
    for range in [4096..132 << 10, 256 << 10..384 << 10, 512 << 10..768 << 10] {
        expected[range].fill(0);
    }
    assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()));
    assert!(image.contents() == expected);
}

/// Whatever the library keeps to itself for a while, it is in the cluster once a flush has been answered, or a durable write.
#[test]
fn what_is_flushed_is_in_the_cluster() {
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

/// One that is taken over is what others have made it, and one that is handed over is what others find.
#[test]
fn caches_of_two_that_take_turns() {
    let image = Image::of(&[1; 65536]);
    let cached = image.spec(LAZY);
    let [one, other] = [(); 2].map(|()| Disk::open(&cached, &options(Cache::Writeback, false)).unwrap());
    let (mut first, mut second) = (worker(&one), worker(&other));
    assert_eq!(first.read(0, 512), (Ok(()), vec![1; 512]));
    assert_eq!(second.write(0, &[2; 512], 0), Ok(()));
    other.write_back().unwrap();
    assert!(image.contents()[..512] == [2; 512]);
    one.reload().unwrap();
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
    // There is nothing to lock.
    snapshot.acquire_own_lock().unwrap();
    drop(reader);
    drop(snapshot);
    rbd(&["snap", "purge", "--no-progress", &image.name]);

    let name = format!("rbd/tenant/{}", image.name.strip_prefix("rbd/").unwrap());
    rbd(&["create", "--size=1M", &name]);
    let tenant = open(&spec(&image.text("").replace(&image.name, &name)));
    // There is one of this name outside as well, with something in it.
    assert_eq!(worker(&tenant).read(8192, 512), (Ok(()), vec![0; 512]));
    drop(tenant);
    rbd(&["remove", "--no-progress", &name]);
}

#[test]
fn what_cannot_be_opened_says_why() {
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
    // Nobody listens there.
    let nobody = image.text("mon_host=127.0.0.1:1&client_mount_timeout=1");
    refused(&nobody, "the cluster cannot be connected to");
    let empty = format!("{}-empty", image.name);
    rbd(&["create", "--size=0", &empty]);
    assert!(matches!(refused(&other(&empty), "0 bytes"), Error::Size(0)));
    rbd(&["remove", "--no-progress", &empty]);
}

/// As the cluster's users are told to set clients up: each has a key, and a right to what it needs.
#[test]
fn clients_and_what_they_may() {
    let image = Image::of(&[1; 65536]);
    let web = Client::new("web", &["mon", "profile rbd", "osd", "profile rbd pool=rbd"]);
    let reader = Client::new("reader", &["mon", "profile rbd", "osd", "profile rbd-read-only pool=rbd"]);
    let tenant =
        Client::new("tenant", &["mon", "profile rbd", "osd", "profile rbd pool=rbd namespace=tenant"]);

    let disk = open(&image.spec(&web.options()));
    disk.acquire_own_lock().unwrap();
    assert_eq!(worker(&disk).write(0, &[2; 512], 0), Ok(()));
    drop(disk);
    // One who may only read has neither lock nor watch.
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

fn owned(outcome: Result<(), LockError>) {
    assert!(matches!(outcome, Err(LockError::Owned(_))), "{outcome:?}");
}

#[test]
fn an_image_is_used_by_one_at_a_time() {
    let image = Image::of(&[1; 65536]);
    let (one, other) = (open(&image.spec("")), open(&image.spec("")));
    other.check_own_lock().unwrap();
    one.acquire_own_lock().unwrap();
    one.acquire_own_lock().unwrap();
    owned(other.check_own_lock());
    owned(other.acquire_own_lock());
    // Nor does it get the lock by writing.
    assert_eq!(worker(&other).write(0, &[2; 512], 0), Err(IoError::Os(Errno::ROFS)));
    assert_eq!(worker(&one).write(0, &[3; 512], 0), Ok(()));
    one.write_back().unwrap();
    one.release_own_lock();
    one.release_own_lock();
    other.acquire_own_lock().unwrap();
    other.reload().unwrap();
    assert_eq!(worker(&other).read(0, 512), (Ok(()), vec![3; 512]));
    owned(one.check_own_lock());
    // Who ends gives it back.
    drop(other);
    one.check_own_lock().unwrap();
}

/// A client that does not insist on its lock would be robbed of it, had it only been asked for.
#[test]
fn a_client_that_shares_keeps_its_lock() {
    let image = Image::of(&[1; 65536]);
    let (one, other) = (open(&image.spec("")), open(&image.spec("")));
    assert_eq!(worker(&one).write(0, &[2; 512], 0), Ok(()));
    owned(other.check_own_lock());
    owned(other.acquire_own_lock());
    assert_eq!(worker(&one).write(0, &[3; 512], 0), Ok(()));
}

/// Whoever has taken the lock of a client that seemed to have ended has nothing to fear of it.
#[test]
fn a_client_that_is_shut_out_writes_no_more() {
    let image = Image::of(&[1; 65536]);
    let (one, other) = (open(&image.spec("")), open(&image.spec("")));
    one.acquire_own_lock().unwrap();
    let Err(LockError::Owned(address)) = other.check_own_lock() else { panic!("it is not locked") };
    run("ceph", &["osd", "blocklist", "add", &address], &[]);
    other.acquire_own_lock().unwrap();
    assert_eq!(worker(&one).write(0, &[2; 512], 0), Err(IoError::Os(Errno::SHUTDOWN)));
    let said = one.acquire_own_lock().unwrap_err().to_string();
    assert!(said.contains("blocked this client"), "{said}");
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

/// Waits until the disk has something to say about its size.
fn told(disk: &Disk) {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let waker = disk.resized().unwrap();
    let mut fds = [PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "nobody tells");
    waker.clear();
}

#[test]
fn an_image_grows_and_does_not_shrink() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec(""));
    disk.acquire_own_lock().unwrap();
    assert_eq!(disk.refresh_size().unwrap(), Resized::Same);
    rbd(&["resize", "--no-progress", "--size=2M", &image.name]);
    told(&disk);
    assert_eq!(disk.refresh_size().unwrap(), Resized::Grown { from: LEN, to: 2 * LEN });
    assert_eq!((disk.refresh_size().unwrap(), disk.size()), (Resized::Same, 2 * LEN));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(2 * LEN - 512, &[2; 512], 0), Ok(()));
    assert_eq!(worker.read(2 * LEN - 1024, 1024), (Ok(()), [[0; 512], [2; 512]].concat()));
    rbd(&["resize", "--no-progress", "--allow-shrink", "--size=1M", &image.name]);
    told(&disk);
    assert_eq!(disk.refresh_size().unwrap(), Resized::Shrunk { from: 2 * LEN, to: LEN });
    assert_eq!(disk.size(), 2 * LEN);
    assert_eq!(worker.read(LEN - 512, 512), (Ok(()), vec![1; 512]));
    assert_eq!(worker.read(LEN - 512, 1024).0, Err(IoError::Shrunk));
    assert_eq!(worker.write(LEN - 512, &[2; 1024], 0), Err(IoError::Shrunk));
    assert_eq!(worker.write(LEN, &[2; 512], 0), Err(IoError::Shrunk));
}

#[test]
fn requests_wait_for_a_cluster_that_stands_still_or_goes() {
    let contents = Random(4).bytes(LEN);
    let image = Image::of(&contents);
    let disk = open(&image.spec("stop-timeout=1"));
    for kills in [false, true] {
        let stopped = Osd::stop();
        let mut requests = InFlight::start(&disk, 100, 20);
        // Longer than a stop would wait.
        thread::sleep(Duration::from_millis(1500));
        if kills {
            Osd::kill();
        }
        drop(stopped);
        assert!(requests.finish().iter().all(Result::is_ok), "{kills}");
        let mut read = vec![0; 100 * 4096];
        requests.view.read(Gpa(0), &mut read).unwrap();
        assert!(read == contents[..100 * 4096], "{kills}");
    }
}

#[test]
fn a_stop_does_not_wait_for_a_cluster_that_stands_still() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec("stop-timeout=1"));
    disk.acquire_own_lock().unwrap();
    let stopped = Osd::stop();
    let mut requests = InFlight::start(&disk, 3, 3);
    disk.limit_remote_waits();
    assert_eq!(requests.finish(), [GONE; 6]);
    // Nor does what comes with it.
    let start = Instant::now();
    disk.release_own_lock();
    disk.release_own_lock();
    assert!(start.elapsed() < LIMIT);
    drop(requests);
    drop(stopped);
    // Who comes next waits for it again, and comes after the lock has been given back.
    disk.acquire_own_lock().unwrap();
    disk.reload().unwrap();
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![1; 512]));
}

/// Where all goes well, a stop is no reason for a request to fail.
#[test]
fn a_stop_of_a_cluster_that_answers() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec("stop-timeout=60"));
    let mut requests = InFlight::start(&disk, 64, 64);
    disk.limit_remote_waits();
    assert!(requests.finish().iter().all(Result::is_ok));
}

#[test]
fn an_image_is_left_open_where_nobody_closes_it() {
    let image = Image::of(&[1; LEN as usize]);
    let disk = open(&image.spec("stop-timeout=5"));
    disk.acquire_own_lock().unwrap();
    let stopped = Osd::stop();
    let start = Instant::now();
    // Only the first time something is waited for.
    for _ in 0..LIMIT.as_secs() {
        disk.release_own_lock();
    }
    assert!(start.elapsed() < LIMIT);
    drop(stopped);
    // When it has answered, it is waited for again.
    disk.acquire_own_lock().unwrap();
    let mut requests = InFlight::start(&disk, 64, 0);
    disk.limit_remote_waits();
    assert!(requests.finish().iter().all(Result::is_ok));
    drop(requests);
    let stopped = Osd::stop();
    let start = Instant::now();
    drop(disk);
    assert!(start.elapsed() < LIMIT);
    drop(stopped);
    // In the end it is closed.
    open(&image.spec("")).acquire_own_lock().unwrap();
}

#[test]
fn a_cluster_that_does_not_answer_is_not_waited_for_without_end() {
    let image = Image::of(&[1; LEN as usize]);
    let stopped = Osd::stop();
    let error = Disk::open(&image.spec(""), &options(Cache::None, false)).unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
    drop(stopped);
}

#[test]
fn faults_before_an_image() {
    let image = Image::of(&[3; LEN as usize]);
    let faulty = |rules: &str| {
        let spec = DiskSpec::Fault(rules.parse().unwrap(), Box::new(image.spec("")));
        Disk::open(&spec, &options(Cache::None, false))
    };
    let disk = faulty("eio@0-7,delay=5ms@write,reorder@flush").unwrap();
    disk.acquire_own_lock().unwrap();
    let mut worker = worker(&disk);
    assert_eq!(worker.read(0, 512).0, Err(IoError::Os(Errno::IO)));
    assert_eq!(worker.write(4096, &[7; 4096], 0), Ok(()));
    assert_eq!(worker.flush(), Ok(()));
    assert_eq!(worker.read(4096, 1024), (Ok(()), vec![7; 1024]));
    assert!(matches!(faulty("short@1%"), Err(Error::Fault { under: "rbd:", .. })));
}
