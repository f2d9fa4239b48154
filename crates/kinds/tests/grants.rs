//! Compares the things of the host that devices use with their options.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use kickless_daemon::values;
use kickless_kinds::kinds;
use kickless_opener::{Grant, Target};
use serde_json::{Value, json};

fn grants(keys: &Value) -> Vec<Grant> {
    kinds().read(&values(keys.as_object().unwrap())).unwrap().grants()
}

fn image(path: &str, writes: bool, chain: bool) -> Target {
    Target::Image { path: path.into(), writes, chain }
}

fn server(host: &str, port: u16) -> Target {
    Target::Tcp { host: host.into(), port }
}

fn unix(path: &str) -> Target {
    Target::Unix { path: path.into() }
}

fn tap(name: &str) -> Target {
    Target::Tap { name: name.into() }
}

#[test]
fn a_disk_uses_what_its_name_says() {
    for (disk, target) in [
        ("/srv/a.img", Some(image("/srv/a.img", true, false))),
        ("../a//b/.", Some(image("../a//b/.", true, false))),
        ("qcow2:/srv/a.qcow2", Some(image("/srv/a.qcow2", true, true))),
        ("fault:eio:qcow2:/srv/a.qcow2", Some(image("/srv/a.qcow2", true, true))),
        ("nbd://host/export", Some(server("host", 10809))),
        ("nbd://[::1]:7/export", Some(server("::1", 7))),
        ("nbd+unix:///export?socket=/run/nbd", Some(unix("/run/nbd"))),
        ("null:1G", None),
        ("mem:1G", None),
        ("fd:image", None),
        ("qcow2:fd:image", Some(Target::Backing)),
    ] {
        let expected: Vec<_> = target.map(|to| Grant { option: "blk-file", to }).into_iter().collect();
        assert_eq!(grants(&json!({ "blk-file": disk })), expected, "{disk}");
    }
    let [read_only] = &grants(&json!({ "blk-file": "qcow2:/a", "read-only": true }))[..] else { panic!() };
    assert_eq!(read_only.to, image("/a", false, true));
}

#[test]
fn a_card_uses_its_port_and_its_capture() {
    let passt =
        |arguments: &[&str]| Target::Passt { arguments: arguments.iter().map(|&s| s.into()).collect() };
    for (port, target) in [
        ("null", None),
        ("loop", None),
        ("tap:vm1", Some(tap("vm1"))),
        ("tap-fd:queue", None),
        ("tap-fd:3", None),
        ("stream:/run/peer", Some(unix("/run/peer"))),
        ("switch:lan,vlan=7", None),
        ("switch:lan,uplink=vm0", Some(tap("vm0"))),
        ("user", Some(passt(&[]))),
        ("user,--tcp-ports=22,-4", Some(passt(&["--tcp-ports=22", "-4"]))),
        ("xdp:eth0", Some(Target::Library { name: "xdp".into(), files: Vec::new() })),
    ] {
        let expected: Vec<_> = target.map(|to| Grant { option: "port", to }).into_iter().collect();
        assert_eq!(grants(&json!({ "port": port })), expected, "{port}");
    }
    let capture = Grant { option: "capture", to: Target::Capture { path: "/srv/c.pcapng".into() } };
    assert_eq!(grants(&json!({ "port": "null", "capture": "/srv/c.pcapng" })), [capture]);
}

#[test]
fn a_device_uses_its_socket() {
    let socket = |mode, group| {
        let to = Target::Socket { path: "/run/a".into(), mode, group };
        vec![Grant { option: "socket-path", to }]
    };
    let mut keys = json!({ "blk-file": "mem:1G", "socket-path": "/run/a" });
    assert_eq!(grants(&keys), socket(None, None));
    keys["socket-mode"] = "0660".into();
    keys["socket-group"] = "disk".into();
    assert_eq!(grants(&keys), socket(Some(0o660), Some("disk".into())));
    assert_eq!(grants(&json!({ "blk-file": "mem:1G", "socket-path": "fd:socket" })), []);
}
