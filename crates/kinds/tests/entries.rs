//! Serves devices whose files another process opens. Threads of this test stand for that process.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod daemon;

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{slice, thread};

use daemon::{BLOCK, LIMIT, Rig};
use kickless_daemon::{
    AddError, AddOutcome, CaptureError, DeviceConfig, PoolConfig, RemoveMode, UsedDevices, reload, sentence,
};
use kickless_opener::{Authority, Calls, PathUse, Root, serve, socket_pair, status, use_opener};
use kickless_testing::eventually;
use rustix::io::Errno;
use serde_json::json;

/// Starts the threads that open files. Calls may name those below the directory of the rig.
fn use_threads(rig: &Rig) {
    let uses = vec![PathUse::Image, PathUse::Socket, PathUse::Capture];
    let directory = rig.dir.path().canonicalize().unwrap();
    let authority = Authority {
        named: Vec::new(),
        control: Vec::new(),
        roots: vec![Root { directory, uses, for_calls: true }],
        calls: Calls::Files,
        libraries: Vec::new(),
    };
    let (ours, theirs) = socket_pair().unwrap();
    thread::spawn(|| serve(theirs, authority, None, None).unwrap());
    use_opener(ours, || ()).unwrap();
}

fn refused(added: Result<AddOutcome, AddError>, option: &str, why: &str) {
    let error = added.unwrap_err();
    assert!(matches!(error, AddError::Refused(_)), "{error:?}");
    assert_eq!(error.option(), Some(option));
    assert!(sentence(&error).contains(why), "{error}");
}

/// All of it is one test, because a process has one opener.
#[test]
fn a_device_uses_what_the_sandbox_allows() {
    let rig = Rig::new(1, 4);
    use_threads(&rig);
    let elsewhere = tempfile::tempdir().unwrap();
    let [path, other] = [rig.dir.path(), elsewhere.path()].map(|dir| dir.join("image"));
    [&path, &other].into_iter().for_each(|path| fs::write(path, [0; 64 * BLOCK]).unwrap());
    let (config, refused_config) =
        (rig.config("a", path.to_str().unwrap()), rig.config("a", other.to_str().unwrap()));
    // Only the files of entries have a status.
    let is_entered = || match status(&path).map_err(|error| error.raw_os_error()) {
        Ok(_) => true,
        Err(errno) => errno != Some(Errno::PERM.raw_os_error()),
    };
    assert!(!is_entered());

    assert_eq!(rig.registry.add(config.clone()).unwrap(), AddOutcome::New);
    assert!(is_entered());
    UnixStream::connect(rig.socket("a")).unwrap();
    // The entry of a device that is served already goes, and that of the first one stays.
    assert_eq!(rig.registry.add(config.clone()).unwrap(), AddOutcome::Identical);
    assert!(is_entered());
    // The path of a socket is resolved by its entry.
    let mut same = rig.config("b", "mem:1M");
    fs::create_dir(rig.socket("directory")).unwrap();
    same.serve.socket_path = Some(rig.socket("directory").join("../a"));
    assert!(matches!(rig.registry.add(same), Err(AddError::SocketTaken { name, .. }) if name == "a"));
    // The socket is removed by its entry, which goes afterwards.
    assert!(rig.registry.remove("a", RemoveMode::Drain, LIMIT).unwrap());
    assert!(!is_entered() && !rig.socket("a").exists());

    fs::remove_file(&path).unwrap();
    assert!(matches!(rig.registry.add(config.clone()), Err(AddError::Make(_))));
    assert!(!is_entered());
    fs::write(&path, [0; 64 * BLOCK]).unwrap();

    let outside = format!(
        "image is outside of the directories that the sandbox allows: add --allow-root={}, or one above it",
        elsewhere.path().canonicalize().unwrap().display()
    );
    refused(rig.registry.add(refused_config.clone()), "blk-file", &outside);
    let mut socket = config.clone();
    socket.serve.socket_path = Some(elsewhere.path().join("socket"));
    refused(rig.registry.add(socket), "socket-path", "or one above it");
    refused(rig.registry.add(rig.config("a", "nbd://127.0.0.1/a")), "blk-file", "what only a call names");
    assert!(rig.states().is_empty() && !is_entered());

    captures(&rig, elsewhere.path());
    reloads(rig, config, refused_config, &outside);
    // The thread that refreshes the device may be the last to close it.
    eventually("the entry stays", || !is_entered());
}

fn captures(rig: &Rig, elsewhere: &Path) {
    let socket = rig.socket("card");
    let card =
        json!({ "name": "card", "socket-path": socket, "port": "null", "capture": rig.socket("first") });
    rig.registry.add(rig.read(&card)).unwrap();
    let set = |path: Option<PathBuf>| rig.registry.set_capture("card", path, None);
    let present = || {
        let listed = rig.registry.list().into_iter().find(|listed| listed.config.name() == Some("card"));
        listed.unwrap().config.kind.capture().unwrap().capture.clone()
    };
    set(Some(rig.socket("second"))).unwrap();
    assert!(rig.socket("first").exists() && rig.socket("second").exists());
    let refused = set(Some(elsewhere.join("third"))).unwrap_err();
    assert!(matches!(refused, CaptureError::Refused(_)));
    assert!(sentence(&refused).starts_with("capture: /"), "{refused}");
    // The refusal changes nothing.
    assert_eq!(present(), Some(rig.socket("second")));
    set(None).unwrap();
    assert_eq!(present(), None);
    assert!(status(&rig.socket("second")).is_err());
    assert!(rig.registry.remove("card", RemoveMode::Drain, LIMIT).unwrap());
}

/// A device whose new options are refused goes on with those before, and one that is refused is not tried
/// again.
fn reloads(rig: Rig, config: DeviceConfig, refused: DeviceConfig, why: &str) {
    let mut new = refused.clone();
    new.identity.name = Some("new".into());
    new.serve.socket_path = Some(rig.socket("new"));
    let Rig { registry, dir: _dir } = rig;
    let (registry, pool) = (Arc::new(registry), PoolConfig::default());
    registry.add(config.clone()).unwrap();
    let reloaded =
        reload(&registry, slice::from_ref(&config), &pool, &[refused, new.clone()], UsedDevices::Keep);
    let failed: Vec<_> = reloaded.failed.iter().map(|failed| failed.device.as_str()).collect();
    assert_eq!(failed, ["a", "new"]);
    assert!(reloaded.failed.iter().all(|failed| failed.error.contains(why)), "{:?}", reloaded.failed);
    let listed: Vec<_> = registry.list().into_iter().map(|listed| listed.config).collect();
    assert_eq!(listed, [config]);
    let refused = registry.add_when_available(new);
    assert!(matches!(refused, Err(AddError::Refused(_))) && registry.list().len() == 1);
}
