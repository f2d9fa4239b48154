//! Makes sockets in a directory whose owner exchanges the names in it at any moment.
#![allow(clippy::unwrap_used, reason = "a test may")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use kickless_opener::Address;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, fstat, open, renameat_with};
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use tempfile::TempDir;

/// Starts and ends of the socket. Without the checks, a few of them are enough to lose.
const ROUNDS: usize = 2000;
/// The user who owns the directory, and a group that neither user is in.
const ATTACKER: u32 = 65534;
const GROUP: u32 = 54321;

/// Exchanges the socket for each bait and back, until it is over.
fn attack(socket: &Path, baits: &[PathBuf], is_over: &AtomicBool) {
    if geteuid().is_root() {
        // Only this thread becomes another user.
        let attacker = Uid::from_raw(ATTACKER);
        set_thread_res_uid(attacker, attacker, attacker).unwrap();
    }
    let exchange = |bait: &Path| renameat_with(CWD, bait, CWD, socket, RenameFlags::EXCHANGE).is_ok();
    for bait in baits.iter().cycle() {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        if exchange(bait) {
            while !exchange(bait) && !is_over.load(Ordering::Relaxed) {}
        }
    }
}

#[test]
fn the_owner_of_the_directory_gains_nothing() {
    let (dir, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let in_dir = |name: &str| dir.path().join(name);
    // A file of another directory, and a socket in use.
    let secret = elsewhere.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    let in_use = UnixListener::bind(in_dir("in-use")).unwrap();
    for path in [&secret, &in_dir("in-use")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    symlink(&secret, in_dir("link")).unwrap();
    fs::hard_link(&secret, in_dir("hard-link")).unwrap();
    let in_use_file = open(in_dir("in-use"), OFlags::PATH, Mode::empty()).unwrap();
    let own_group = fs::metadata(&secret).unwrap().gid();
    let group = geteuid().is_root().then(|| GROUP.to_string());
    if geteuid().is_root() {
        chown(dir.path(), Some(ATTACKER), None).unwrap();
    }
    let (socket, is_over) = (in_dir("socket"), AtomicBool::new(false));
    let baits = ["link", "hard-link", "in-use"].map(in_dir);
    let made = thread::scope(|scope| {
        let attacker = scope.spawn(|| attack(&socket, &baits, &is_over));
        // The attacker takes no lock, so there is no wait for one.
        let listen = || Address::new(&socket, Some(0o666), group.as_deref())?.listen(Instant::now());
        let made = (0..ROUNDS).filter(|_| listen().is_ok()).count();
        is_over.store(true, Ordering::Relaxed);
        attacker.join().unwrap();
        made
    });
    println!("{made} of {ROUNDS} sockets were made");
    let after = fs::metadata(&secret).unwrap();
    assert_eq!((after.mode() & 0o7777, after.gid()), (0o600, own_group));
    assert_eq!(fs::read(&secret).unwrap(), b"secret");
    let after = fstat(&in_use_file).unwrap();
    assert_eq!((after.st_mode & 0o7777, after.st_gid), (0o600, own_group));
    drop(in_use);
}
