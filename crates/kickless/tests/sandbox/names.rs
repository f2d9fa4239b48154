//! Things that have a name of their own: groups, servers, programs, captures.

use std::fs;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use kickless_driver::{Card, CardOptions, Disk, Options, Outgoing};
use kickless_testing::hostile_nbd::{HostileNbd, greet, hello, serve_requests};
use kickless_testing::{add_uplink, eventually, has_passt, in_network_namespace, parse_pcapng};
use rustix::process::{Pid, Signal, getegid, geteuid, kill_process};
use serde_json::json;

use super::common::{Daemon, children, disk};
use super::sandboxed;

#[test]
fn a_group_is_found_by_its_name() {
    // Root may give the socket to any group.
    let is_usable = |id: u32| if geteuid().is_root() { id != 0 } else { id == getegid().as_raw() };
    let groups = fs::read_to_string("/etc/group").unwrap();
    let found = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?.parse().ok()?);
        is_usable(id).then_some((name, id))
    });
    let Some((name, id)) = found else {
        println!("skipped: there is no group");
        return;
    };
    let daemon = Daemon::serve(&disk("a", &format!("socket-group = '{name}'")), &[]);
    daemon.wait_for("serving");
    assert_eq!(fs::metadata(daemon.path("a.sock")).unwrap().gid(), id);
    // By a call, too.
    let socket = daemon.path("b.sock");
    let added = json!({"kind": "blk", "socket-path": socket, "blk-file": "null:1M", "socket-group": name});
    daemon.call("device.add", added);
    assert_eq!(fs::metadata(&socket).unwrap().gid(), id);
    let wrong = json!({"kind": "blk", "socket-path": daemon.path("c.sock"), "blk-file": "null:1M",
        "socket-group": "no-such-group"});
    assert!(daemon.refused(&["device.add", &wrong.to_string()]).contains("there is no group no-such-group"));
}

/// An address of this host for a server on a unix socket. Keeps the last connection.
struct Relay {
    port: u16,
    last: Arc<Mutex<Option<TcpStream>>>,
}

impl Relay {
    fn start(server: &Path) -> Self {
        let listener = TcpListener::bind("localhost:0").unwrap();
        let (server, last) = (server.to_owned(), Arc::default());
        let relay = Self { port: listener.local_addr().unwrap().port(), last };
        let last = relay.last.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = UnixStream::connect(&server) else { return };
                *last.lock().unwrap() = Some(client.try_clone().unwrap());
                let (mut reader, mut writer) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = io::copy(&mut reader, &mut writer);
                    let _ = writer.shutdown(Shutdown::Both);
                });
                thread::spawn(move || {
                    let (mut reader, mut writer) = (client, server);
                    let _ = io::copy(&mut reader, &mut writer);
                    let _ = writer.shutdown(Shutdown::Both);
                });
            }
        });
        relay
    }

    fn cut(&self) {
        self.last.lock().unwrap().take().unwrap().shutdown(Shutdown::Both).unwrap();
    }
}

#[test]
fn a_server_is_found_by_its_name_and_again() {
    let server = HostileNbd::start(8, |connection, stream| {
        greet(stream, &hello(false));
        serve_requests(stream, connection as u8 + 1);
    });
    let uri = server.uri();
    let socket = uri.split_once("socket=").unwrap().1.split('&').next().unwrap();
    let relay = Relay::start(Path::new(socket));
    let file = format!("nbd://localhost:{}/?reconnect-delay=60", relay.port);
    let daemon =
        Daemon::serve(&format!("[[device]]\nsocket-path = 'DIR/a.sock'\nblk-file = '{file}'\n"), &[]);
    daemon.wait_for("serving");
    let disk = Disk::connect(Options::new(daemon.path("a.sock"))).unwrap();
    // The disk has more connections than this one, so it tells which is used.
    let connection = || {
        let mut bytes = [0; 512];
        disk.read_at(&mut bytes, 0).unwrap();
        bytes[0]
    };
    let first = connection();
    relay.cut();
    assert!(connection() > first);
    drop(disk);
    assert_eq!(daemon.call("device.remove", json!({"name": "a"})), json!({"removed": true}));
}

#[test]
fn a_capture_begins_and_ends_by_calls() {
    let config = "[[device]]\nsocket-path = 'DIR/a.sock'\nport = 'loop'\n";
    let capture =
        |daemon: &Daemon, name: &str| json!({"name": "a", "capture": daemon.path(name)}).to_string();
    let daemon = Daemon::serve(config, &[]);
    daemon.wait_for("serving");
    let refused = daemon.refused(&["device.capture", &capture(&daemon, "a.pcapng")]);
    assert!(refused.contains("--allow-root="), "{refused}");
    assert!(!daemon.path("a.pcapng").exists());
    drop(daemon);

    let daemon = Daemon::serve(config, &["--allow-root=DIR"]);
    daemon.wait_for("serving");
    let card = Card::connect(CardOptions::new(daemon.path("a.sock"))).unwrap();
    let mut pair = card.pair(0).unwrap();
    for name in ["a.pcapng", "b.pcapng"] {
        let started = daemon.ctl(&["device.capture", &capture(&daemon, name)]);
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
        let frame = [[0xff; 6].as_slice(), &[2; 54]].concat();
        assert_eq!(pair.send(&[Outgoing::from(&frame[..])]).unwrap(), 1);
        let frames = || parse_pcapng(&fs::read(daemon.path(name)).unwrap()).frames.len();
        // Its way to the port, and the way back.
        eventually("the frame is not in the file", || frames() >= 1);
        daemon.call("device.capture", json!({"name": "a"}));
    }
}

/// Returns the processes of passt that the helpers of a daemon have started.
fn passts(daemon: &Daemon) -> Vec<u32> {
    let named = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("passt"))
    };
    // A helper or passt may end meanwhile.
    let children = |pid| children(pid).unwrap_or_default();
    children(daemon.child.id()).into_iter().flat_map(children).filter(named).collect()
}

#[test]
fn passt_is_started_again() {
    if !has_passt() {
        println!("skipped: this needs passt");
        return;
    }
    in_network_namespace(|| {
        add_uplink();
        let daemon = Daemon::serve("[[device]]\nsocket-path = 'DIR/a.sock'\nport = 'user,-4'\n", &[]);
        daemon.wait_for("serving");
        let card = Card::connect(CardOptions::new(daemon.path("a.sock"))).unwrap();
        let pair = card.pair(0).unwrap();
        for _ in 0..2 {
            eventually("passt does not run", || passts(&daemon).len() == 1);
            let pid = passts(&daemon)[0];
            kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
            eventually("passt goes on", || passts(&daemon) != [pid]);
        }
        eventually("passt does not run", || passts(&daemon).len() == 1);
        drop((pair, card));
        daemon.call("device.remove", json!({"name": "a"}));
        eventually("passt goes on", || passts(&daemon).is_empty());

        // A call names only options that name no file.
        let daemon = sandboxed(&[]);
        let add = |port: &str| {
            json!({"kind": "net", "socket-path": daemon.path("b.sock"), "port": port}).to_string()
        };
        let refused = daemon.refused(&["device.add", &add("user,--log-file=/tmp/log")]);
        assert!(refused.contains("name no file"), "{refused}");
        let added = daemon.ctl(&["device.add", &add("user,--ipv4-only")]);
        assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
        let card = Card::connect(CardOptions::new(daemon.path("b.sock"))).unwrap();
        let _pair = card.pair(0).unwrap();
        eventually("passt does not run", || passts(&daemon).len() == 1);
    });
}
