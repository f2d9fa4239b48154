//! Upgrades with peers that lie: a caller of `daemon.upgrade` that is no kickless, and a process between two
//! real ones that changes what they say. The running daemon serves on, and the new process ends with one
//! sentence.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_control::{CHANNEL, Client, ClientError};
use kickless_driver::{Disk, Options};
use kickless_handover::{FromOld, NewEnd};
use kickless_tests::daemon::{Daemon, wait_for_exit};
use kickless_tests::guest::image_dir;
use kickless_tests::verified_load::{BLOCK, drive_disk};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::{Errno, pread};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use serde_json::{Map, Value, json};

const DEPTH: u64 = 8;
const DISK_LEN: u64 = DEPTH * BLOCK as u64;
const LIMIT: Duration = Duration::from_secs(60);

/// The kinds of messages.
const PLAN: u16 = 1;
const DEVICE: u16 = 2;
const FINAL: u16 = 4;
const LAST: u16 = 5;
const REFUSED: u16 = 7;
const MADE: u16 = 9;
const GOT: u16 = 10;
const TAKEN: u16 = 11;

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Returns a message without descriptors.
fn message(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
    let head = [&kind.to_le_bytes()[..], &[0, 0], &number.to_le_bytes(), &(body.len() as u32).to_le_bytes()];
    [&head.concat()[..], body].concat()
}

fn send_to(channel: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(channel, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Receives what has come. No bytes are the end.
fn receive(channel: impl AsFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let mut bytes = vec![0; 1 << 16];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(channel, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    bytes.truncate(got.bytes);
    Ok((bytes, fds))
}

/// Calls `daemon.upgrade` with these parameters and this descriptor.
fn call(socket: &Path, more: &Value, channel: Option<BorrowedFd<'_>>) -> Result<Value, ClientError> {
    let mut params: Map<String, Value> =
        json!({ "formats": [1, 1], "version": "9.9" }).as_object().unwrap().clone();
    params.extend(more.as_object().unwrap().clone());
    let given: Vec<_> = channel.map(|channel| (CHANNEL.to_owned(), channel)).into_iter().collect();
    Client::connect(socket)?.call_given("daemon.upgrade", params, &given)
}

/// A daemon under verified load. Another program must not find its image free.
fn with_load(run: impl FnOnce(&mut Daemon)) {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
    let devices = [
        ("disk", &*format!("blk-file = \"{}\"", image.display())),
        ("card", "port = \"loop\""),
        ("idle", "blk-file = \"null:1M\""),
    ];
    let mut daemon = Daemon::serve_with(&["--control"], "workers = 1", &devices).unwrap();
    let driver = Disk::connect(Options { queues: 1, ..Options::new(daemon.socket_of("disk")) }).unwrap();
    let (queue, is_over) = (driver.queue(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let load = scope.spawn(|| drive_disk(&queue, DEPTH, &is_over));
        thread::sleep(Duration::from_millis(50));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&mut daemon)));
        is_over.store(true, Ordering::Relaxed);
        assert!(load.join().unwrap() > 0);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    drop((queue, driver));
    assert!(daemon.stop().unwrap().0.success());
}

/// Waits until the daemon says that an upgrade has failed, for a reason that has these words.
fn fails(daemon: &Daemon, seen: usize, words: &str) {
    let has = |line: &str| {
        (line.contains("the upgrade to version 9.9 failed") && line.contains(words)).then_some(())
    };
    daemon.log().wait_from(seen, words, LIMIT, has).unwrap();
}

#[test]
fn only_a_pair_of_sockets_is_a_channel() {
    with_load(|daemon| {
        let socket = daemon.socket_of("control");
        let refused = |more: &Value, channel: Option<BorrowedFd<'_>>, words: &str| {
            let error = call(&socket, more, channel).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        let (channel, _other) = pair();
        let (stream, datagram) = (UnixStream::pair().unwrap().0, UnixDatagram::pair().unwrap().0);
        let file = File::open("/dev/null").unwrap();
        for wrong in [stream.as_fd(), datagram.as_fd(), file.as_fd()] {
            refused(&json!({}), Some(wrong), "SOCK_SEQPACKET");
        }
        refused(&json!({}), None, "channel");
        refused(&json!({ "formats": [7, 9] }), Some(channel.as_fd()), "format");
        refused(&json!({ "formats": [9, 7] }), Some(channel.as_fd()), "format");
        refused(&json!({ "drain": "1h" }), Some(channel.as_fd()), "100ms to 30s");
        refused(&json!({ "drain": "0s" }), Some(channel.as_fd()), "100ms to 30s");
        refused(&json!({ "force": true }), Some(channel.as_fd()), "force");
        daemon.upgrade().unwrap();
    });
}

#[test]
fn a_new_process_that_lies_gets_nothing() {
    with_load(|daemon| {
        let before = daemon.holdings().unwrap();
        let socket = daemon.socket_of("control");
        let long = vec![b'x'; 60_000];
        // Sends these messages instead of an answer to the plan.
        for (sent, words) in [
            (&[message(TAKEN, 0, &[])][..], "that it serves out of order"),
            (&[message(MADE, 0, &[])], "an answer to a device out of order"),
            (&[message(8, 77, &[])], "an answer to the plan out of order"),
            (&[message(GOT, 0, &[])], "out of order"),
            (&[message(PLAN, 0, &[])], "a plan out of order"),
            (&[message(99, 0, &[])], "an unknown message"),
            (&[b"?".to_vec()], "too few bytes"),
            (&[message(TAKEN, 0, &long)], "too many bytes"),
            (&[message(REFUSED, 0, b"\x1b[31mno\nWARN it has failed")], " [31mno WARN it has failed"),
            (&[], "it has ended"),
        ] {
            let seen = daemon.log().len();
            let (own, theirs) = pair();
            call(&socket, &json!({}), Some(theirs.as_fd())).unwrap();
            drop(theirs);
            for bytes in sent {
                send_to(&own, bytes, &[]).unwrap();
            }
            if sent.is_empty() {
                // It dies with the plan unread.
                drop(own);
            }
            fails(daemon, seen, words);
        }
        // It floods the daemon, with descriptors.
        let seen = daemon.log().len();
        let (own, theirs) = pair();
        let null = File::open("/dev/null").unwrap();
        call(&socket, &json!({}), Some(theirs.as_fd())).unwrap();
        drop(theirs);
        while send_to(&own, &message(TAKEN, 0, &[0; 8192]), &[null.as_fd(); 100]).is_ok() {}
        fails(daemon, seen, "that it serves out of order");
        drop(own);
        daemon.returns_to(before).unwrap();
        daemon.upgrade().unwrap();
    });
}

/// Answers as a real process until all have come, but never says that it serves, or says so too late.
#[test]
fn a_new_process_that_stops_before_its_last_word_gets_nothing() {
    with_load(|daemon| {
        let before = daemon.holdings().unwrap();
        let socket = daemon.socket_of("control");
        for (sends, words) in [(true, "it does not answer"), (false, "it has ended")] {
            let seen = daemon.log().len();
            let (own, theirs) = pair();
            let late = own.try_clone().unwrap();
            call(&socket, &json!({}), Some(theirs.as_fd())).unwrap();
            drop(theirs);
            let mut new = NewEnd::new(own);
            while !matches!(new.receive(Instant::now() + LIMIT).unwrap(), FromOld::Last) {
                new.confirm(Instant::now() + LIMIT).unwrap();
            }
            if sends {
                fails(daemon, seen, words);
                assert_eq!(send(&late, &message(TAKEN, 0, &[]), SendFlags::NOSIGNAL), Err(Errno::PIPE));
            } else {
                drop((late, new));
                fails(daemon, seen, words);
            }
        }
        // Two at once.
        let (own, theirs) = pair();
        call(&socket, &json!({}), Some(theirs.as_fd())).unwrap();
        let error = call(&socket, &json!({}), Some(pair().0.as_fd())).unwrap_err();
        assert!(matches!(&error, ClientError::Call(rpc) if rpc.code == -32002), "{error}");
        let seen = daemon.log().len();
        drop((own, theirs));
        fails(daemon, seen, "it has ended");
        daemon.returns_to(before).unwrap();
        daemon.upgrade().unwrap();
    });
}

type Change = dyn Fn(&mut Value, &mut Vec<OwnedFd>);

/// Changes a record of the old process.
struct Lie {
    kind: u16,
    name: &'static str,
    change: Box<Change>,
    /// Words of the new process, or nothing if it cannot know that this is a lie.
    words: &'static str,
}

fn lie(
    kind: u16,
    name: &'static str,
    words: &'static str,
    change: impl Fn(&mut Value, &mut Vec<OwnedFd>) + 'static,
) -> Lie {
    Lie { kind, name, change: Box::new(change), words }
}

/// Sets one value of a record.
fn value(kind: u16, path: &'static str, to: Value, words: &'static str) -> Lie {
    lie(kind, path, words, move |text, _| *text.pointer_mut(path).unwrap() = to.clone())
}

/// Returns a record with its text changed, in memory.
fn changed(bytes: &[u8], mut fds: Vec<OwnedFd>, lie: &Lie) -> (Vec<u8>, Vec<OwnedFd>) {
    let (text, rest) = if bytes[8..12] == [0xff; 4] {
        let memory = fds.remove(0);
        let mut all = vec![0; rustix::fs::fstat(&memory).unwrap().st_size as usize];
        assert_eq!(pread(&memory, &mut all[..], 0).unwrap(), all.len());
        let len = u64::from_le_bytes(all[16..24].try_into().unwrap()) as usize;
        (all[32..][..len].to_vec(), all[32 + len..].to_vec())
    } else {
        (bytes[12..].to_vec(), Vec::new())
    };
    let mut text: Value = serde_json::from_slice(&text).unwrap();
    (lie.change)(&mut text, &mut fds);
    let format = if text["format"] == 9 { 9u32 } else { 1 };
    let text = text.to_string().into_bytes();
    let memory = memfd_create("record", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let mut file = File::from(memory);
    let head = [
        &b"kickless"[..],
        &u64::from(format).to_le_bytes(),
        &(text.len() as u64).to_le_bytes(),
        &(rest.len() as u64).to_le_bytes(),
    ];
    file.write_all(&[&head.concat()[..], &text, &rest].concat()).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL).unwrap();
    fds.insert(0, file.into());
    let count = (fds.len() as u16).to_le_bytes();
    ([&bytes[..2], &count, &bytes[4..8], &[0xff; 4]].concat(), fds)
}

/// Passes messages between two processes until one has ended, or until all have come. Changes the plan, or a
/// record of the first device.
fn relay(old: &OwnedFd, new: &OwnedFd, lie: &Lie) {
    let mut has_lied = false;
    loop {
        let mut fds = [PollFd::new(old, PollFlags::IN), PollFd::new(new, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        let (is_old, is_new) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if is_old {
            let Ok((mut bytes, mut fds)) = receive(old) else { return };
            if bytes.is_empty() || bytes[0] == LAST as u8 {
                assert!(bytes.is_empty() || has_lied, "{}: no lie was told", lie.name);
                return;
            }
            if bytes[0] == lie.kind as u8 && (lie.kind == PLAN || bytes[4] == 0) && !has_lied {
                has_lied = true;
                (bytes, fds) = changed(&bytes, fds, lie);
            }
            let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if send_to(new, &bytes, &borrowed).is_err() {
                return;
            }
        }
        if is_new {
            match receive(new) {
                Ok((bytes, _)) if !bytes.is_empty() => drop(send_to(old, &bytes, &[])),
                _ => return,
            }
        }
    }
}

/// Lets a new process take over through a process that lies. Returns its last line.
fn lied_to(daemon: &mut Daemon, lie: &Lie) -> String {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("between.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut new = daemon.begin_upgrade(&[], &[&format!("--upgrade-from={}", socket.display())]).unwrap();
    let connection = listener.accept().unwrap().0;
    let (mut line, mut given) = receive(&connection).unwrap();
    let mut reader = BufReader::new(&connection);
    if line.last() != Some(&b'\n') {
        reader.read_until(b'\n', &mut line).unwrap();
    }
    let request: Value = serde_json::from_slice(&line).unwrap();
    let (of_old, theirs) = pair();
    let answer = call(&daemon.socket_of("control"), &json!({}), Some(theirs.as_fd())).unwrap();
    drop(theirs);
    let answer = json!({ "jsonrpc": "2.0", "id": request["id"], "result": answer });
    (&connection).write_all(format!("{answer}\n").as_bytes()).unwrap();
    let of_new = given.remove(0);
    relay(&of_old, &of_new, lie);
    drop((of_old, of_new));
    let status = wait_for_exit(&mut new.child, LIMIT).unwrap();
    let lines = new.log.wait_for_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(1), "{}: {lines:?}", lie.name);
    let said = lines.join("\n");
    assert!(!said.contains("panicked") && !said.contains("took over"), "{}: {said}", lie.name);
    kickless_tests::daemon::check_sandbox(&lines).unwrap();
    lines.last().cloned().unwrap_or_default()
}

fn lies() -> Vec<Lie> {
    let of_first = |key: &'static str, to: Value, words| {
        lie(PLAN, key, words, move |plan, _| {
            drop(plan["devices"][0]["config"].as_object_mut().unwrap().insert(key.into(), to.clone()))
        })
    };
    let many = |phase: Value, words| {
        lie(PLAN, "many devices", words, move |plan, _| {
            let device = |at| {
                json!({ "config": { "kind": "blk", "name": format!("d{at}"), "blk-file": "null:1M" },
                "is_inherited": true, "phase": phase })
            };
            plan["devices"] = (0..30_000).map(device).collect();
        })
    };
    let other_fd = |at: usize, words| {
        lie(DEVICE, "another descriptor", words, move |_, fds| {
            let Some(fd) = fds.get_mut(at) else { return };
            *fd = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap().0;
        })
    };
    let mut lies = vec![
        lie(PLAN, "another format", "known format", |plan, _| plan["format"] = 9.into()),
        lie(PLAN, "no plan", "descriptor 0", |plan, _| *plan = json!([])),
        lie(PLAN, "an unknown key", "unknown field `magic`", |plan, _| plan["magic"] = true.into()),
        of_first("blk-file", json!("/etc/shadow"), "--allow-root=/etc"),
        of_first("blk-file", json!("nbd:host.invalid:10809"), ""),
        of_first("kind", json!("toy"), "kind"),
        of_first("color", json!("red"), "the option color"),
        of_first("socket-path", json!("/etc/kickless.sock"), "--allow-root=/etc"),
        of_first("name", json!("../x"), "name: it must be"),
        of_first("name", json!("idle"), "name: the device idle"),
        many(json!("served"), "512 devices"),
        many(json!({ "unavailable": { "error": "no" } }), "30000 devices that are unavailable"),
        value(PLAN, "/control/0/socket", json!({ "fd": 9 }), "descriptor 9"),
        value(PLAN, "/devices/2/phase", json!({ "ended": { "error": null } }), "not in the plan"),
        value(DEVICE, "/session/connection", json!({ "fd": 4000 }), "descriptor 4000"),
        lie(DEVICE, "one descriptor twice", "not used once", |device, _| {
            device["session"]["connection"] = device["listener"]["socket"].clone();
        }),
        value(DEVICE, "/session/features", json!(u64::MAX), "were not offered"),
        value(DEVICE, "/session/protocol_features", json!(u64::MAX), "were not offered"),
        value(DEVICE, "/session/regions/0/len", json!(1u64 << 60), "which has 0x"),
        value(DEVICE, "/session/regions/0/offset", json!(u64::MAX), "cannot be"),
        value(DEVICE, "/session/regions/0/gpa", json!(u64::MAX), "cannot be"),
        value(DEVICE, "/session/regions/0/file", json!(7), "file of a region"),
        value(DEVICE, "/session/rings/0/size", json!(65_535), "size of a ring"),
        value(DEVICE, "/session/rings/0/index", json!(9_999), "ring index 9999"),
        value(DEVICE, "/session/rings/0/addresses/desc", json!(1), ""),
        value(DEVICE, "/session/rings/0/kick", Value::Null, "not used once"),
        value(DEVICE, "/listener/name/path", json!("\0"), "path of a socket"),
        value(DEVICE, "/own/medium/images/0/inode", json!(1), "another file"),
        value(DEVICE, "/own/medium/images/0/size", json!(1u64 << 62), "another size"),
        value(DEVICE, "/own/medium/images/0/alignment", json!([3, 5]), "alignment"),
        value(DEVICE, "/own/medium", json!("anew"), "not used once"),
        value(DEVICE, "/own", json!({}), "not used once"),
        lie(DEVICE, "no session and no socket", "not used once", |device, _| {
            (device["session"], device["listener"]) = (Value::Null, Value::Null);
        }),
        lie(DEVICE, "no descriptors", "missing", |_, fds| fds.clear()),
        value(FINAL, "/session", Value::Null, "session"),
        value(FINAL, "/rings/0/next_avail", json!(null), ""),
        value(FINAL, "/rings/0/index", json!(5), ""),
        value(FINAL, "/rings", json!([]), "number of rings"),
        value(FINAL, "/own", json!(7), "invalid type"),
        value(FINAL, "/stops", json!(vec![1; 2000]), "ring index 1999"),
        value(FINAL, "/tokens", json!({ "iops": u64::MAX, "nothing": u64::MAX }), ""),
        value(FINAL, "/parked_ns", json!(-1), "invalid value"),
    ];
    // The first one is memory, and the last one listens.
    lies.extend([(0, "cannot be mapped"), (7, "listens")].map(|(at, words)| other_fd(at, words)));
    lies.extend((1..7).map(|at| other_fd(at, "descriptor")));
    lies
}

#[test]
fn an_old_process_that_lies_is_refused() {
    with_load(|daemon| {
        let before = daemon.holdings().unwrap();
        for lie in lies() {
            let said = lied_to(daemon, &lie);
            println!("{} {}: {said}", lie.kind, lie.name);
            assert!(said.contains(lie.words), "{}: {said}", lie.name);
        }
        daemon.returns_to(before).unwrap();
        daemon.upgrade().unwrap();
    });
}
