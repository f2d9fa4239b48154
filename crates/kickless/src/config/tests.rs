//! Parses correct and wrong configuration files.

use std::time::Duration;

use kickless_daemon::Switch;
use kickless_disk::{Cache, DiskSpec};
use kickless_io::EngineKind;
use kickless_kinds::BlkConfig;
use kickless_worker::Poll;
use proptest::prelude::*;

use super::*;
use crate::testing::{card_of, disk_of};

fn parsed(text: &str) -> Result<Service, String> {
    parse(Path::new("disks.toml"), text).map_err(|error| format!("{error:#}"))
}

#[test]
fn one_device_and_nothing_else() {
    let service = parsed("[[device]]\nsocket-path = '/run/web.sock'\nblk-file = 'null:1G'").unwrap();
    let [device] = &service.devices[..] else { panic!("{service:?}") };
    assert_eq!(device.serve.socket_path.as_deref(), Some(Path::new("/run/web.sock")));
    assert_eq!((&device.serve.socket_mode, &device.serve.socket_group), (&None, &None));
    assert_eq!((device.name(), device.share.weight), (Some("web"), 1));
    let disk = disk_of(device);
    assert_eq!(
        (&disk.blk_file, disk.num_queues, device.serve.queue_size),
        (&DiskSpec::Null(1 << 30), 64, 1024)
    );
    assert_eq!(
        (disk.cache, disk.lock, disk.read_only, disk.incoming),
        (Cache::None, Switch::On, false, false)
    );
    let pool = service.pool.worker_options(1, Notation::Keys).unwrap();
    assert_eq!((pool.workers, pool.poll), (1, Poll::default()));
}

#[test]
fn a_socket_can_come_from_the_service_manager() {
    let service = parsed("\n[[device]]\nname = 'web'\nblk-file = 'null:1G'").unwrap();
    assert_eq!(service.devices[0].serve.socket_path, None);
    assert!(service.check_sockets(|name| name == "web").is_ok());
    let lacks = service.check_sockets(|_| false).unwrap_err().to_string();
    assert!(
        lacks.starts_with("disks.toml:2: socket-path: this [[device]] needs one, unless systemd"),
        "{lacks}"
    );
}

#[test]
fn everything_said() {
    let service = parsed(
        r#"
        [pool]
        workers = 4
        cpu = "8,0-1"
        engine = "auto"
        poll = "rate"
        poll-start-rate = 10_000
        poll-stop-idle = "1.5ms"
        [defaults]
        kind = "blk"
        num-queues = 4
        cache = "writeback"
        cache-size = "64M"
        lock = "off"
        discard = "off"
        weight = 7
        memory-max = "64G"
        allow-slow-memory = true
        socket-mode = "0660"
        [[device]]
        name = "web"
        kind = "blk"
        socket-path = "/run/1.sock"
        blk-file = "/srv/web.img"
        serial = "web-1"
        incoming = true
        socket-group = "kvm"
        [[device]]
        name = "db"
        socket-path = "/run/2.sock"
        blk-file = "mem:64M"
        read-only = true
        num-queues = 8
        queue-size = 0x100
        cache = "none"
        lock = "on"
        discard = "on"
        weight = 1000
        socket-mode = "0600"
        "#,
    )
    .unwrap();
    let pool = &service.pool.worker_options(1, Notation::Keys).unwrap();
    assert_eq!((pool.workers, &pool.cpus[..], pool.engine.kind), (4, &[8, 0, 1][..], EngineKind::Auto));
    assert_eq!(pool.poll, Poll::Rate { start_per_sec: 10_000, stop_idle: Duration::from_micros(1500) });
    let [web, db] = &service.devices[..] else { panic!("{service:?}") };
    assert_eq!((web.name(), db.name()), (Some("web"), Some("db")));
    assert_eq!((web.share.weight, db.share.weight), (7, 1000));
    assert_eq!((web.serve.memory_max, web.serve.allow_slow_memory), (64 << 30, true));
    let socket = |device: &DeviceConfig| {
        (device.serve.socket_mode.map(|mode| mode.0), device.serve.socket_group.clone())
    };
    assert_eq!((socket(web), socket(db)), ((Some(0o660), Some("kvm".into())), (Some(0o600), None)));
    assert_eq!((web.serve.queue_size, db.serve.queue_size), (1024, 256));
    let (web, db) = (disk_of(web), disk_of(db));
    let of = |disk: &BlkConfig| (disk.num_queues, disk.cache, disk.lock == Switch::On);
    assert_eq!((web.discard, db.discard), (Switch::Off, Switch::On));
    assert_eq!(of(web), (4, Cache::Writeback, false));
    assert_eq!(of(db), (8, Cache::None, true));
    assert_eq!((web.cache_size, db.cache_size), (Some(64 << 20), Some(64 << 20)));
    assert_eq!((web.incoming, web.read_only), (true, false));
    assert_eq!((db.incoming, db.read_only), (false, true));
    assert_eq!(web.serial.as_deref(), Some("web-1"));
}

#[test]
fn disks_and_cards_in_one_file() {
    let service = parsed(
        r#"
        [defaults]
        cache = "writeback"
        num-queue-pairs = 2
        mtu = 1400
        queue-size = 256
        [[device]]
        socket-path = "/run/disk.sock"
        blk-file = "null:1G"
        [[device]]
        socket-path = "/run/card.sock"
        port = "null,rate=5"
        mac = "52:54:00:12:34:56"
        mtu = 9000
        [[device]]
        kind = "net"
        socket-path = "/run/other.sock"
        port = "null"
        "#,
    )
    .unwrap();
    let [disk, card, other] = &service.devices[..] else { panic!("{service:?}") };
    assert_eq!((disk_of(disk).cache, disk.serve.queue_size), (Cache::Writeback, 256));
    let (config, other) = (card_of(card), card_of(other));
    assert_eq!(
        (config.port.to_string(), config.mtu, config.pairs_max()),
        ("null,rate=5".into(), Some(9000), 2)
    );
    assert_eq!((card.name(), card.serve.queue_size), (Some("card"), 256));
    assert!(config.mac.is_some());
    assert_eq!((other.mac, other.mtu), (None, Some(1400)));
}

#[test]
fn the_example_of_the_manual() {
    let manual = include_str!("../../../../docs/operating.md");
    let (_, rest) = manual.split_once("```toml\n").unwrap();
    let (example, _) = rest.split_once("```").unwrap();
    assert!(parsed(example).unwrap().devices.len() > 1);
}

#[test]
fn each_mistake_gets_one_sentence_with_its_line_and_key() {
    let device = "[[device]]\nsocket-path = '/a/b.sock'\nblk-file = 'null:1G'\n";
    for (text, said) in [
        ("[pool\n", "disks.toml:1: "),
        ("a = \n", "disks.toml:1: "),
        ("[pool]\nworkers = 1\nworkers = 2\n", "disks.toml:3: workers is there twice: leave one out"),
        ("[pool]\n[pool]\n", "disks.toml:2: [pool] is there twice: leave one out"),
        ("\n[pol]\n", "disks.toml:2: \"pol\" is no key of the file: did you mean pool?"),
        ("pool = 1", "disks.toml:1: pool: it must be a table: write [pool]"),
        ("[[pool]]", "disks.toml:1: pool: it must be a table"),
        ("[device]\nname='a'", "disks.toml:1: device: begin each with [[device]]"),
        ("device = [1]", "disks.toml:1: device: begin each with [[device]]"),
        ("[pool]\nwokers = 1\n", "disks.toml:2: \"wokers\" is no key of [pool]: did you mean workers?"),
        ("[pool]\nworkers = 0\n", "disks.toml:2: workers = 0: it must be a number from 1 to 256"),
        ("[pool]\nworkers = -1\n", "disks.toml:2: workers = -1: it must be a number from 1 to 256"),
        (
            "[pool]\nworkers = '2'\n",
            "disks.toml:2: workers = '2': it must be a whole number, without quotes: write 2",
        ),
        ("[pool]\nworkers = 2k\n", "disks.toml:2: workers = 2k: it must be a number from 1 to 256"),
        ("[pool]\nworkers = 2.0\n", "without quotes"),
        ("[pool]\nworkers = 999999999999999999999999999999999999999999\n", "disks.toml:2: workers = 9999"),
        ("[pool]\nworkers = [\n1,\n2]\n", "disks.toml:2: workers = [...: it must be a whole number"),
        (
            "[pool]\nworkers = 1\ncpu = '0-3'\n",
            "disks.toml:2: workers: 1 leaves some of the 4 CPUs of cpu idle",
        ),
        ("[pool]\ncpu = 3\n", "disks.toml:2: cpu = 3: it must be text, in quotes"),
        ("[pool]\ncpu = 'x'\n", "is not the number of a CPU"),
        ("[pool]\nengine = 'spdk'\n", "disks.toml:2: engine = 'spdk': an engine is one of"),
        ("[pool]\nengine = 'spdk'\n", "disks.toml:2: engine = 'spdk': an engine is"),
        (
            "[pool]\ncompletion = 'worker'\n",
            "disks.toml:2: completion: it was removed, because it made disks slower: leave it out",
        ),
        ("[pool]\nengine = 'auto'\nsqpoll = false\n", "disks.toml:3: sqpoll: it was removed"),
        ("[pool]\nfixed-buffers = true\n", "disks.toml:2: fixed-buffers: it was removed"),
        (
            "[pool]\npoll = 'sometimes'\n",
            "disks.toml:2: poll = 'sometimes': it must be auto, always, never or rate",
        ),
        ("[pool]\npoll = true\n", "disks.toml:2: poll = true: it must be text, in quotes"),
        ("[pool]\npoll-latency = 100\n", "disks.toml:2: poll-latency = 100: it must be text, in quotes"),
        ("[pool]\npoll-latency = '100'\n", "has no unit"),
        ("[pool]\npoll-latency = ''\n", "disks.toml:2: poll-latency = '': \"\" is not a duration"),
        ("[pool]\npoll-latency = '5s'\n", "1s at most"),
        ("[pool]\npoll-kick-price = '3'\n", "has no unit"),
        ("[pool]\npoll-stop-idle = '0s'\n", "disks.toml:2: poll-stop-idle = '0s': it must be above 0"),
        ("[pool]\npoll-start-rate = -4\n", "disks.toml:2: poll-start-rate = -4: it must be a number from 0"),
        (
            "[pool]\npoll-stop-idle = '1s'\npoll = 'always'",
            "disks.toml:2: poll-stop-idle: it is for poll = \"rate\"; leave it or poll = \"always\" out",
        ),
        (
            "[pool]\npoll = 'never'\npoll-latency = '1us'",
            "disks.toml:3: poll-latency: it is for poll = \"auto\"",
        ),
        ("[pool]\ncall-coalesce = '20us'\n", "disks.toml:2: call-coalesce: it was removed"),
        ("[defaults]\nmerge = 'on'\n", "disks.toml:2: merge: it was removed"),
        ("[defaults]\nsocket-path = 'a'\n", "disks.toml:2: socket-path: it is each device's own"),
        ("[defaults]\nname = 'a'\n", "disks.toml:2: name: it is each device's own"),
        ("[defaults]\nblk-size = '1G'\n", "disks.toml:2: blk-size: it is each device's own"),
        ("[[device]]\ncache-size = '1K'\n", "disks.toml:2: cache-size = '1K': it must be from 64K to 64G"),
        (
            "[[device]]\nsocket-path = 'a'\nblk-file = 'a'\nblk-size = '1G'\n",
            "disks.toml:4: blk-size: only a qcow2: image grows by it",
        ),
        (
            "[defaults]\nworkers = 1\n",
            "disks.toml:2: \"workers\" is no key of [defaults]: it belongs to [pool]",
        ),
        (
            "[defaults]\nweight = 1001\n[[device]]\n",
            "disks.toml:2: weight = 1001: it must be a number from 1 to 1000",
        ),
        ("\n[[device]]\nblk-file = 'a'\n", "disks.toml:2: socket-path: this [[device]] needs one"),
        (
            "[[device]]\nsocket-path = 'a'\n",
            "disks.toml:1: blk-file: a disk needs one, and a network card needs a port",
        ),
        ("[[device]]\nsocket-path = ''\n", "disks.toml:2: socket-path = '': it is empty"),
        (
            "[[device]]\nsocket-path = '/'\nblk-file = 'a'\n",
            "disks.toml:2: socket-path: no name can be made of it",
        ),
        ("[[device]]\nblk-file = 'null:1000'\n", "not a multiple of 512"),
        ("[[device]]\nblk-file = 'mem:1X'\n", "disks.toml:2: blk-file = 'mem:1X': \"X\" is not a unit"),
        ("[[device]]\nkind = 'tpm'\n", "disks.toml:2: kind = 'tpm': a kind of device is blk or net"),
        ("[[device]]\nkind = 'blk'\n", "disks.toml:1: blk-file: a disk needs one"),
        ("[[device]]\nkind = 'net'\n", "disks.toml:1: port: a network card needs one"),
        (
            "[[device]]\nblk-file = 'null:1G'\nport = 'null'\n",
            "disks.toml:3: port: a device is a disk or a network card: leave it or blk-file out",
        ),
        (
            "[[device]]\nkind='net'\nblk-file = 'a'\n",
            "disks.toml:3: blk-file: it is for disks, and kind is net",
        ),
        (
            "[[device]]\nkind='blk'\nport='null'\n",
            "disks.toml:3: port: it is for network cards, and kind is blk",
        ),
        (
            "[[device]]\nport = 'null'\ncache = 'none'\n",
            "disks.toml:3: cache: only disks have it, and this device is a network card",
        ),
        (
            "[[device]]\nblk-file = 'null:1G'\nmtu = 1500\n",
            "disks.toml:3: mtu: only network cards have it, and this device is a disk",
        ),
        (
            "[[device]]\nport = 'tap'\n",
            "disks.toml:2: port = 'tap': a port is tap:NAME, tap-fd:N, switch:NAME, user, stream:PATH, xdp:IFNAME, loop or null",
        ),
        ("[[device]]\nport = 'null'\nmac = '1'\n", "disks.toml:3: mac = '1': it must be six bytes"),
        (
            "[[device]]\nport = 'null'\nmtu = 67\n",
            "disks.toml:3: mtu = 67: it must be a number from 68 to 65535",
        ),
        ("[defaults]\nport = 'null'\n", "disks.toml:2: port: it is each device's own"),
        ("[[device]]\nname = 'a b'\n", "disks.toml:2: name = 'a b': it must be 1 to 64 letters"),
        ("[[device]]\nserial = '123456789012345678901'\n", "disks.toml:2: serial"),
        ("[[device]]\nread-only = 'yes'\n", "disks.toml:2: read-only = 'yes': it must be true or false"),
        ("[[device]]\nlock = true\n", "disks.toml:2: lock = true: it must be text, in quotes"),
        ("[[device]]\nlock = 'maybe'\n", "disks.toml:2: lock = 'maybe': it must be on or off"),
        ("[[device]]\ndiscard = false\n", "disks.toml:2: discard = false: it must be text, in quotes"),
        ("[[device]]\ncache = 'unsafe'\n", "disks.toml:2: cache = 'unsafe': a cache mode is"),
        (
            "[[device]]\nnum-queues = 257\n",
            "disks.toml:2: num-queues = 257: it must be a number from 1 to 256",
        ),
        ("[[device]]\nqueue-size = 300\n", "disks.toml:2: queue-size = 300: it must be a power of two"),
        (
            "[[device]]\nsocket-mode = 0o660\n",
            "disks.toml:2: socket-mode = 0o660: it must be text, in quotes",
        ),
        (
            "[[device]]\nsocket-mode = '0999'\n",
            "disks.toml:2: socket-mode = '0999': it must be an octal number",
        ),
        ("[[device]]\nfd = 3\n", "disks.toml:2: \"fd\" is no key of [[device]]"),
        (
            "[[device]]\nsocket-path='s'\nblk-file='null:1G'\nincoming=true",
            "disks.toml:4: incoming: it needs a blk-file that another host can use",
        ),
        (&format!("{device}\n{device}name = 'b'"), "disks.toml:8: name: the device of line 1 has b already"),
        (
            &format!("{device}\n{device}name = 'c'"),
            "disks.toml:6: socket-path: the device of line 2 has /a/b.sock already",
        ),
        (
            "[[device]]\nsocket-path='/tmp/../tmp/a'\nblk-file='null:1G'\n[[device]]\nname='b'\nsocket-path='/tmp/a'\nblk-file='null:1G'",
            "disks.toml:6: socket-path: the device of line 2 has /tmp/a already",
        ),
    ] {
        let sentence = parsed(text).unwrap_err();
        assert!(sentence.starts_with("disks.toml:") && sentence.contains(said), "{text}: {sentence}");
        assert!(!sentence.contains('\n'), "{text}: {sentence}");
    }
}

#[test]
fn a_file_without_devices_needs_a_control_socket() {
    for text in ["", "[pool]\n", "device = []"] {
        let mut service = parsed(text).unwrap();
        let refused = service.check().unwrap_err().to_string();
        assert!(refused.starts_with("disks.toml: there is no device to serve"), "{refused}");
        service.control.control = Some("control.sock".into());
        assert!(service.check().is_ok() && service.outlives_devices());
    }
}

/// Generates text that resembles a line of a file.
fn line() -> impl Strategy<Value = String> {
    let key = "pool|defaults|device|port|mac|kind|workers|cpu|poll|poll-latency|poll-kick-price|name|socket-path|blk-file|weight|lock|[a-z.\"-]{0,6}";
    let value = "'[a-z0-9:./-]{0,8}'|[0-9]{1,40}|-?0x[0-9a-f]{1,9}|true|\\[[0-9,]{0,4}\\]|\\{[a-z=1]{0,5}\\}|\\PC{0,10}";
    prop_oneof![
        Just("[[device]]".to_owned()),
        Just("[pool]".to_owned()),
        Just("[defaults]".to_owned()),
        (key, value).prop_map(|(key, value)| format!("{key} = {value}")),
        "\\PC{0,30}",
    ]
}

proptest! {
    #[test]
    fn never_panics(lines in prop::collection::vec(line(), 0..20)) {
        if let Err(sentence) = parsed(&lines.join("\n")) {
            prop_assert!(sentence.starts_with("disks.toml:") && !sentence.contains('\n'), "{sentence:?}");
        }
    }
}
