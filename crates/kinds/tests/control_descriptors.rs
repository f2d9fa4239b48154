//! Descriptors that come with calls.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod control;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use control::{Rig, answer, is_closed};
use kickless_control::{Client, ClientError, DESCRIPTORS_MAX};
use kickless_daemon::DeviceState;
use kickless_driver::{Disk, Options};
use kickless_testing::eventually;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

const SIZE: u64 = 1 << 20;

/// Held by each test, because all count the descriptors of the process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of open descriptors of this process, which has both ends of each connection.
fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the number of open descriptors after devices have come and gone. The workers have opened by then
/// what they open once. A thread may close its last descriptor a little after its device is gone, so two
/// devices in a row must leave the same number.
fn settled(rig: &Rig, client: &mut Client) -> usize {
    let mut last = 0;
    loop {
        control::call(client, "device.add", rig.disk("first")).unwrap();
        drop(Disk::connect(Options::new(rig.path("first"))).unwrap());
        control::call(client, "device.remove", json!({ "name": "first" })).unwrap();
        let open = open_descriptors();
        if open == std::mem::replace(&mut last, open) {
            return open;
        }
    }
}

fn image(path: &Path) -> File {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    file.set_len(SIZE).unwrap();
    file
}

fn add(client: &mut Client, params: Value, given: &[(&str, BorrowedFd<'_>)]) -> Result<Value, String> {
    let Value::Object(params) = params else { panic!("{params}") };
    let given: Vec<_> = given.iter().map(|(name, fd)| ((*name).to_owned(), *fd)).collect();
    client.call_given("device.add", params, &given).map_err(|error| match error {
        ClientError::Call(error) => error.message,
        other => panic!("{other}"),
    })
}

/// Sends bytes with descriptors.
fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    assert_eq!(try_send(stream, bytes, descriptors), Ok(bytes.len()));
}

fn try_send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

#[test]
fn a_disk_and_its_socket_are_served_from_descriptors() {
    let _alone = alone();
    let rig = Rig::new();
    let (path, socket) = (rig.path("image"), rig.path("front-ends"));
    let (file, listener) = (image(&path), UnixListener::bind(&socket).unwrap());
    // Only the descriptor leads to the image now.
    fs::remove_file(&path).unwrap();
    let mut client = rig.client();
    let before = settled(&rig, &mut client);
    let config = json!({ "name": "a", "socket-path": "fd:socket", "blk-file": "fd:image" });
    let given = [("image", file.as_fd()), ("socket", listener.as_fd())];
    assert_eq!(add(&mut client, config.clone(), &given).unwrap(), json!({ "added": true }));

    let disk = Disk::connect(Options::new(&socket)).unwrap();
    disk.write_at(&[7; 512], 4096).unwrap();
    let mut found = [0; 512];
    file.read_exact_at(&mut found, 4096).unwrap();
    assert_eq!(found, [7; 512]);
    drop(disk);

    // Descriptors cannot be compared, and a file cannot describe them.
    let refused = add(&mut client, config, &given).unwrap_err();
    assert!(refused.contains("descriptors cannot be compared"), "{refused}");
    let refused = client.call("config.save", serde_json::Map::new()).unwrap_err().to_string();
    assert!(refused.ends_with("added by descriptors: a"), "{refused}");
    let shown = control::call(&mut client, "device.get", json!({ "name": "a" })).unwrap();
    assert_eq!(shown["config"]["blk-file"], "fd:image");

    let removed = control::call(&mut client, "device.remove", json!({ "name": "a" })).unwrap();
    assert_eq!(removed, json!({ "removed": true }));
    eventually("all descriptors are closed", || open_descriptors() == before);
    // The name of the socket is its maker's.
    assert!(socket.exists());
    assert!(control::call(&mut client, "config.save", json!({})).is_ok());
}

#[test]
fn direct_io_is_chosen_by_the_configuration_and_the_sender_keeps_its_flags() {
    let _alone = alone();
    let rig = Rig::new();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("image");
    let file = image(&path);
    let before = fcntl_getfl(&file).unwrap();
    let mut client = rig.client();
    for (cache, is_direct) in [("none", true), ("writeback", false)] {
        let config = json!({ "name": "a", "socket-path": rig.path("a"), "blk-file": "fd:i", "cache": cache });
        add(&mut client, config, &[("i", file.as_fd())]).unwrap();
        let fds = fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
        let of_image = fds.filter(|fd| fs::read_link(fd).is_ok_and(|name| name == path));
        let flags = of_image.map(|fd| {
            let info =
                fs::read_to_string(Path::new("/proc/self/fdinfo").join(fd.file_name().unwrap())).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
            OFlags::from_bits_retain(u32::from_str_radix(flags, 8).unwrap())
        });
        assert_eq!(flags.into_iter().any(|flags| flags.contains(OFlags::DIRECT)), is_direct, "{cache}");
        assert_eq!(fcntl_getfl(&file).unwrap(), before);
        control::call(&mut client, "device.remove", json!({ "name": "a" })).unwrap();
    }
}

#[test]
fn descriptors_of_the_wrong_kind_are_refused_with_a_sentence() {
    let _alone = alone();
    let rig = Rig::new();
    let path = rig.path("image");
    let _image = image(&path);
    let open = |options: &mut OpenOptions| -> OwnedFd { options.open(&path).unwrap().into() };
    let read_only = open(OpenOptions::new().read(true));
    let write_only = open(OpenOptions::new().write(true));
    let append = open(OpenOptions::new().read(true).append(true));
    let place = open(OpenOptions::new().read(true).custom_flags(OFlags::PATH.bits() as i32));
    let null: OwnedFd = File::open("/dev/null").unwrap().into();
    let directory: OwnedFd = File::open(rig.dir.path()).unwrap().into();
    let empty: OwnedFd = File::create_new(rig.path("empty")).unwrap().into();
    let (stream, _peer) = UnixStream::pair().unwrap();
    let stream: OwnedFd = stream.into();
    let datagrams: OwnedFd = UnixDatagram::unbound().unwrap().into();
    let unlistening =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    let mut client = rig.client();
    let before = settled(&rig, &mut client);
    for (fd, said) in [
        (&write_only, "fd:x cannot be read"),
        (&read_only, "fd:x cannot be written"),
        (&append, "fd:x was opened for appending"),
        (&place, "fd:x cannot be read"),
        (&null, "fd:x is a character device"),
        (&directory, "fd:x is a directory"),
        (&stream, "fd:x is a socket"),
        (&empty, "fd:x"),
    ] {
        let config = json!({ "name": "a", "socket-path": rig.path("a"), "blk-file": "fd:x" });
        let refused = add(&mut client, config, &[("x", fd.as_fd())]).unwrap_err();
        assert!(refused.starts_with("blk-file: ") && refused.contains(said), "{refused}");
    }
    for (fd, said) in [
        (&null, "it is not a socket"),
        (&stream, "it does not listen"),
        (&datagrams, "it is not a unix stream socket"),
        (&unlistening, "neither listens nor is connected"),
    ] {
        let config = json!({ "name": "a", "socket-path": "fd:x", "blk-file": "mem:1M" });
        let refused = add(&mut client, config, &[("x", fd.as_fd())]).unwrap_err();
        assert!(refused.starts_with("socket-path: ") && refused.contains(said), "{refused}");
    }
    assert_eq!(open_descriptors(), before);
    assert!(rig.registry.list().is_empty());
    // A disk that is only read need not be writable.
    let config = json!({ "name": "a", "socket-path": rig.path("a"), "blk-file": "fd:x", "read-only": true });
    assert!(add(&mut client, config, &[("x", read_only.as_fd())]).is_ok());
}

#[test]
fn a_backing_image_of_a_descriptor_needs_a_whole_path() {
    let _alone = alone();
    let rig = Rig::new();
    let (base, top) = (rig.path("base"), rig.path("top"));
    drop(image(&base));
    let make = |backing: &Path| {
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b"])
            .arg(backing)
            .arg(&top)
            .arg("1M")
            .status();
        assert!(made.unwrap().success());
        OpenOptions::new().read(true).write(true).open(&top).unwrap()
    };
    let config = json!({ "name": "a", "socket-path": rig.path("a"), "blk-file": "qcow2:fd:x" });
    let mut client = rig.client();
    let refused = add(&mut client, config.clone(), &[("x", make(Path::new("base")).as_fd())]).unwrap_err();
    assert!(refused.contains("its name begins at the directory of the image"), "{refused}");
    assert!(add(&mut client, config, &[("x", make(&base).as_fd())]).is_ok());
}

#[test]
fn names_and_descriptors_have_to_fit() {
    let _alone = alone();
    let rig = Rig::new();
    let file = image(&rig.path("image"));
    let mut client = rig.client();
    let config = |disk: &str| json!({ "name": "a", "socket-path": rig.path("a"), "blk-file": disk });
    client.call("daemon.info", serde_json::Map::new()).unwrap();
    let before = settled(&rig, &mut client);
    let refused = add(&mut client, config("fd:image"), &[]).unwrap_err();
    assert!(refused.starts_with("blk-file: no descriptor image came with the call"), "{refused}");
    let refused = add(&mut client, config("mem:1M"), &[("image", file.as_fd())]).unwrap_err();
    assert_eq!(refused, "fds: no parameter has fd:image");
    let refused = add(&mut client, config("fd:other"), &[("image", file.as_fd())]).unwrap_err();
    assert!(refused.starts_with("blk-file: no descriptor other came"), "{refused}");
    let refused = client
        .call_given("device.list", serde_json::Map::new(), &[("image".into(), file.as_fd())])
        .unwrap_err();
    assert_eq!(refused.to_string(), "fds: device.list takes no descriptors");
    // More names than descriptors.
    let stream = rig.stream();
    let line = json!({ "jsonrpc": "2.0", "id": 1, "method": "device.add", "params": config("fd:a"), "fds": ["a", "b"] });
    send(&stream, format!("{line}\n").as_bytes(), &[file.as_fd()]);
    assert_eq!(answer(&stream)["error"]["message"], "fds: 2 are named, and 1 came");
    drop(stream);
    eventually("all descriptors are closed", || open_descriptors() == before);
    assert!(rig.registry.list().is_empty());
}

#[test]
fn hostile_clients_leave_no_descriptor_behind() {
    let _alone = alone();
    let rig = Rig::new();
    let file = image(&rig.path("image"));
    let all = vec![file.as_fd(); 253];
    let mut client = rig.client();
    let before = settled(&rig, &mut client);
    let is_clean = || eventually("all descriptors are closed", || open_descriptors() == before);

    // Too many with one message, and too many with one line.
    let stream = rig.stream();
    send(&stream, b"{", &all);
    assert!(answer(&stream)["error"]["message"].as_str().unwrap().contains("more than 128 descriptors"));
    is_closed(&stream);
    drop(stream);
    is_clean();
    let stream = rig.stream();
    send(&stream, b"{", &all[..DESCRIPTORS_MAX]);
    send(&stream, b"\"", &all[..1]);
    assert!(answer(&stream)["error"]["message"].as_str().unwrap().contains("more than 128 descriptors"));
    is_closed(&stream);
    drop(stream);
    is_clean();

    // Half a line, and then the end, in each direction.
    for how in [Shutdown::Write, Shutdown::Both] {
        let stream = rig.stream();
        send(&stream, b"{\"jsonrpc\":", &all[..100]);
        stream.shutdown(how).unwrap();
        is_closed(&stream);
        drop(stream);
        is_clean();
    }

    // Lines that name none, that are no JSON, that are empty, and a batch.
    let stream = rig.stream();
    let info = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.info\"}\n";
    for line in [&info[..], b"nothing\n", b"\n", b"[{\"jsonrpc\":\"2.0\"}]\n", info] {
        send(&stream, line, &all[..9]);
    }
    let mut answers = BufReader::new(&stream);
    for expected in ["result", "error", "error", "result"] {
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert!(serde_json::from_str::<Value>(&line).unwrap().get(expected).is_some(), "{line}");
    }
    // The connection itself has two.
    eventually("only the connection is left", || open_descriptors() == before + 2);
    drop(stream);
    is_clean();

    // The read-only socket takes none. Before Linux 6.16, the daemon closes them.
    let mut stream = UnixStream::connect(rig.path("read-only.sock")).unwrap();
    let line = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"device.list\",\"fds\":[\"a\"]}\n";
    match try_send(&stream, line, &all) {
        Ok(sent) => assert_eq!(sent, line.len()),
        Err(error) => {
            assert_eq!(error, Errno::PERM);
            stream.write_all(line).unwrap();
        }
    }
    assert_eq!(answer(&stream)["error"]["message"], "fds: device.list takes no descriptors");
    assert_eq!(open_descriptors(), before + 2);
    drop(stream);
    is_clean();

    // A client that leaves in the middle of its call: the device stays, as without descriptors.
    let mut stream = rig.stream();
    let params = json!({ "name": "a", "socket-path": rig.path("a"), "blk-file": "fd:a" });
    let line = json!({ "jsonrpc": "2.0", "method": "device.add", "params": params, "fds": ["a"] });
    send(&stream, format!("{line}\n").as_bytes(), &all[..1]);
    stream.flush().unwrap();
    drop(stream);
    eventually("the device is served", || {
        rig.registry.list().iter().any(|status| status.state == DeviceState::Free)
    });
    control::call(&mut client, "device.remove", json!({ "name": "a" })).unwrap();
    is_clean();
}

#[test]
fn one_descriptor_does_not_serve_two_devices_at_once() {
    let _alone = alone();
    let rig = Rig::new();
    let (file, listener) = (image(&rig.path("image")), UnixListener::bind(rig.path("socket")).unwrap());
    let mut client = rig.client();
    for name in ["a", "b"] {
        let config = json!({ "name": name, "socket-path": rig.path(name), "blk-file": "fd:x" });
        add(&mut client, config, &[("x", file.as_fd())]).unwrap();
    }
    // Each has a lock of its own.
    let first = Disk::connect(Options::new(rig.path("a"))).unwrap();
    first.write_at(&[1; 512], 0).unwrap();
    let second = Options { connect_timeout: Duration::from_secs(1), ..Options::new(rig.path("b")) };
    let second = Disk::connect(Options { reconnect_limit: Duration::ZERO, ..second });
    assert!(second.is_err() || second.is_ok_and(|disk| disk.write_at(&[2; 512], 0).is_err()));
    first.write_at(&[1; 512], 0).unwrap();

    let given = [("s", listener.as_fd())];
    let config = |name: &str| json!({ "name": name, "socket-path": "fd:s", "blk-file": "mem:1M" });
    add(&mut client, config("c"), &given).unwrap();
    let refused = add(&mut client, config("d"), &given).unwrap_err();
    assert!(refused.contains("the device c has socket:["), "{refused}");
    let mut config = config("d");
    config["socket-mode"] = "0600".into();
    let refused = add(&mut client, config, &given).unwrap_err();
    assert!(refused.starts_with("socket-mode: "), "{refused}");
}

#[test]
fn disks_that_came_by_one_descriptor_keep_their_locks() {
    let _alone = alone();
    let rig = Rig::new();
    let path = rig.path("image");
    let file = image(&path);
    let mut client = rig.client();
    for name in ["a", "b"] {
        let config =
            json!({ "name": name, "socket-path": rig.path(name), "blk-file": "fd:x", "read-only": true });
        add(&mut client, config, &[("x", file.as_fd())]).unwrap();
    }
    let config = json!({ "name": "c", "socket-path": rig.path("c"), "blk-file": path });
    control::call(&mut client, "device.add", config).unwrap();
    let disks = ["a", "b"].map(|name| Disk::connect(Options::new(rig.path(name))).unwrap());
    disks.iter().for_each(|disk| disk.read_at(&mut [0; 512], 0).unwrap());
    // One of them unlocks the image, and the other still has it.
    let [first, second] = disks;
    drop(first);
    control::call(&mut client, "device.remove", json!({ "name": "a" })).unwrap();
    let writer = Options { connect_timeout: Duration::from_millis(200), ..Options::new(rig.path("c")) };
    let writer = Disk::connect(Options { reconnect_limit: Duration::ZERO, ..writer });
    assert!(writer.is_err() || writer.is_ok_and(|disk| disk.write_at(&[2; 512], 0).is_err()));
    second.read_at(&mut [0; 512], 0).unwrap();
}

#[test]
fn lines_in_pieces_and_lines_together_keep_their_descriptors() {
    let _alone = alone();
    let rig = Rig::new();
    let files: Vec<_> = (0..3).map(|number| image(&rig.path(&format!("image-{number}")))).collect();
    let line = |name: &str| {
        let params = json!({ "name": name, "socket-path": rig.path(name), "blk-file": "fd:x" });
        let line =
            json!({ "jsonrpc": "2.0", "id": 1, "method": "device.add", "params": params, "fds": ["x"] });
        format!("{line}\n")
    };
    let mut stream = rig.stream();
    let first = line("a");
    let (begin, rest) = first.split_at(20);
    send(&stream, begin.as_bytes(), &[files[0].as_fd()]);
    stream.write_all(rest.as_bytes()).unwrap();
    assert_eq!(answer(&stream)["result"], json!({ "added": true }));
    // Two at once, with their descriptors in order.
    send(&stream, format!("{}{}", line("b"), line("c")).as_bytes(), &[files[1].as_fd(), files[2].as_fd()]);
    let mut answers = BufReader::new(&stream);
    for _ in 0..2 {
        let mut text = String::new();
        answers.read_line(&mut text).unwrap();
        assert!(text.contains("\"added\":true"), "{text}");
    }
    for (name, file) in ["a", "b", "c"].iter().zip(&files) {
        let disk = Disk::connect(Options::new(rig.path(name))).unwrap();
        disk.write_at(&[name.as_bytes()[0]; 512], 0).unwrap();
        let mut found = [0; 512];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found[0], name.as_bytes()[0]);
    }
}
