//! Parses correct and wrong command lines.

use std::time::Duration;

use kickless_daemon::Switch;
use kickless_disk::{Cache, DiskSpec};
use kickless_io::EngineKind;
use kickless_memory::quota;
use kickless_worker::Poll;

use super::*;
use crate::service::InheritedSocket;
use crate::testing::{card_of, disk_of};

fn parsed(line: &str) -> Result<Invocation, String> {
    parse(line.split_whitespace().map(OsString::from))
}

fn service(line: &str) -> Service {
    match parsed(line) {
        Ok(Invocation::Run { work: Work::Serve(service), .. }) => *service,
        other => panic!("{line}: {other:?}"),
    }
}

fn workers(service: &Service) -> kickless_worker::Options {
    service.pool.worker_options(1, service.notation).unwrap()
}

#[test]
fn defaults() {
    let service = service("kickless blk --socket-path=/run/a.sock --blk-file=/a.img");
    let [device] = &service.devices[..] else { panic!("{service:?}") };
    assert_eq!(device.serve.socket_path.as_deref(), Some(Path::new("/run/a.sock")));
    assert_eq!((device.serve.socket_mode, &device.serve.socket_group, service.fd), (None, &None, None));
    let (pool, disk) = (workers(&service), disk_of(device));
    assert_eq!(disk.blk_file, DiskSpec::File("/a.img".into()));
    assert_eq!(
        (disk.num_queues, device.serve.queue_size, disk.cache, disk.lock),
        (64, 1024, Cache::None, Switch::On)
    );
    assert!(!disk.read_only && !disk.incoming && disk.serial.is_none());
    assert_eq!((disk.blk_size, disk.cache_size, disk.logical_block_size), (None, None, 512));
    assert_eq!((pool.workers, pool.engine.kind, pool.cpus.len()), (1, EngineKind::Auto, 0));
    assert_eq!(disk.discard, Switch::On);
    assert_eq!(pool.poll, Poll::default());
    assert_eq!((device.name(), device.share.weight), (None, 1));
    assert_eq!(
        (device.serve.memory_max, device.serve.allow_slow_memory),
        (quota::DEVICE_BYTES_DEFAULT, false)
    );
}

#[test]
fn everything_said() {
    let service = service(
        "/usr/bin/kickless-blk --fd 3 --blk-file mem:1.5G --read-only --serial=disk-1 --num-queues=4 --queue-size=256 \
         --engine=io_uring --cache=writeback --lock=off --workers=4 --cpu=8,0-1 --poll=rate --poll-start-rate=0 \
         --poll-stop-idle=1.5ms --discard=off --logical-block-size=4096",
    );
    let (pool, disk, serve) = (workers(&service), disk_of(&service.devices[0]), &service.devices[0].serve);
    assert_eq!((service.fd, &serve.socket_path), (Some(InheritedSocket::Fd(3)), &None));
    assert_eq!(disk.blk_file, DiskSpec::Memory(3 << 29));
    assert_eq!(
        (disk.num_queues, serve.queue_size, disk.cache, disk.lock),
        (4, 256, Cache::Writeback, Switch::Off)
    );
    assert_eq!(disk.serial.as_deref(), Some("disk-1"));
    assert!(disk.read_only);
    assert_eq!((pool.workers, pool.engine.kind), (4, EngineKind::Uring));
    assert_eq!((disk.discard, disk.logical_block_size), (Switch::Off, 4096));
    assert_eq!(pool.cpus, [8, 0, 1]);
    assert_eq!(pool.poll, Poll::Rate { start_per_sec: 0, stop_idle: Duration::from_micros(1500) });
}

#[test]
fn an_image_with_a_size_and_a_cache() {
    for file in ["qcow2:a", "fault:eio@1%:qcow2:a"] {
        let line = format!("kickless blk --fd=3 --blk-file={file} --blk-size=1.5T --cache-size=64K");
        let service = service(&line);
        let disk = disk_of(&service.devices[0]);
        assert_eq!((disk.blk_size, disk.cache_size), (Some(3 << 39), Some(64 << 10)));
    }
}

#[test]
fn a_card() {
    let service = service("kickless net --socket-path=/run/a.sock --port=null");
    let [device] = &service.devices[..] else { panic!("{service:?}") };
    let card = card_of(device);
    assert_eq!(
        (card.port.to_string(), card.mac, card.mtu, card.pairs_max()),
        ("null".into(), None, None, 64)
    );
    assert_eq!(device.serve.queue_size, 1024);
    let service = self::service(
        "kickless net --fd=3 --port=null,rate=7,length=60-99 --mac=52:54:00:12:34:56 --mtu=9000 --num-queue-pairs=2 \
         --queue-size=256 --memory-max=1G --workers=2",
    );
    let (card, serve) = (card_of(&service.devices[0]), &service.devices[0].serve);
    assert_eq!(card.port.to_string(), "null,rate=7,length=60-99");
    assert_eq!(card.mac.map(|mac| mac.bytes()), Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    assert_eq!((card.mtu, card.pairs_max()), (Some(9000), 2));
    assert_eq!((serve.queue_size, serve.memory_max, workers(&service).workers), (256, 1 << 30, 2));
}

#[test]
fn pairs_of_queues_follow_from_the_port() {
    for (options, pairs) in [
        ("--port=null", 64),
        ("--port=loop", 64),
        ("--port=tap:tap0", 1),
        ("--port=tap:tap0 --num-queue-pairs=4", 4),
        ("--port=tap-fd:7", 1),
        ("--port=tap-fd:7,8,9", 3),
        ("--port=tap-fd:7,8,9 --num-queue-pairs=3", 3),
    ] {
        let service = service(&format!("kickless net --socket-path=/run/a.sock {options}"));
        assert_eq!(card_of(&service.devices[0]).pairs_max(), pairs, "{options}");
    }
}

#[test]
fn wrong_options_of_a_card() {
    for (options, said) in [
        ("--fd=3", "kickless net needs --port=PORT"),
        ("--port=null", "--socket-path: this command needs it, or --fd"),
        ("--fd=3 --port=null --offload=yes", "--offload=yes: it must be on or off"),
        ("--fd=3 --port=null --capture=", "--capture: it is empty"),
        ("--fd=3 --port=null --capture=/a --capture-length=13", "it must be a number from 14 to 65550"),
        (
            "--fd=3 --port=tap",
            "--port=tap: a port is tap:NAME, tap-fd:N, switch:NAME, user, stream:PATH, xdp:IFNAME, loop or null",
        ),
        ("--fd=3 --port=vhost-user:/a", "there is no port vhost-user:PATH any more: connect the hypervisor"),
        ("--fd=3 --port=tap:a/b", "the name of a TAP has 1 to 15 letters"),
        ("--fd=3 --port=loop,rate=1", "a loop port has no option \"rate=1\""),
        ("--fd=3 --port=tap-fd:4,4", "the descriptor 4 is named twice"),
        ("--fd=3 --port=tap-fd:4 --num-queue-pairs=2", "--num-queue-pairs: this port has exactly 1"),
        ("--fd=3 --port=null,speed=1", "a null port has no option \"speed=1\""),
        ("--fd=3 --port=null --mac=01:00:00:00:00:01", "it is the address of a group"),
        ("--fd=3 --port=null --mtu=67", "it must be a number from 68 to 65535"),
        ("--fd=3 --port=xdp:a --mtu=3811", "--mtu: the port xdp:a carries packets of at most 3810 bytes"),
        ("--fd=3 --port=null --num-queue-pairs=128", "it must be a number from 1 to 127"),
        (
            "--fd=3 --port=null --blk-file=a",
            "--blk-file is an option of kickless blk, and not of kickless net",
        ),
        ("--fd=3 --port=null --num-queues=2", "did you mean --num-queue-pairs?"),
    ] {
        let sentence = parsed(&format!("kickless net {options}")).unwrap_err();
        assert!(sentence.contains(said) && !sentence.contains('\n'), "{options}: {sentence}");
    }
    assert!(
        parsed("kickless blk --fd=3 --blk-file=a --port=null")
            .unwrap_err()
            .contains("--port is an option of kickless net")
    );
}

#[test]
fn polling() {
    let micros = Duration::from_micros;
    for (options, poll) in [
        ("--poll=auto", Poll::default()),
        ("--poll-latency=1ms", Poll::Auto { latency: micros(1000), kick_price: micros(3) }),
        ("--poll=auto --poll-latency=0us", Poll::Auto { latency: micros(0), kick_price: micros(3) }),
        ("--poll-kick-price=0us", Poll::Auto { latency: micros(100), kick_price: micros(0) }),
        ("--poll=always", Poll::Always),
        ("--poll=never", Poll::Never),
        ("--poll=rate", Poll::Rate { start_per_sec: Poll::START_PER_SEC, stop_idle: Poll::STOP_IDLE }),
        ("--poll-start-rate=9", Poll::Rate { start_per_sec: 9, stop_idle: Poll::STOP_IDLE }),
        ("--poll-stop-idle=7us", Poll::Rate { start_per_sec: Poll::START_PER_SEC, stop_idle: micros(7) }),
    ] {
        assert_eq!(
            workers(&service(&format!("kickless blk --fd=3 --blk-file=a {options}"))).poll,
            poll,
            "{options}"
        );
    }
}

#[test]
fn one_worker_for_each_cpu() {
    assert_eq!(workers(&service("kickless blk --fd=3 --blk-file=a --cpu=0-2")).workers, 3);
    assert_eq!(workers(&service("kickless blk --fd=3 --blk-file=a --cpu=0-2 --workers=6")).workers, 6);
}

#[test]
fn a_path_that_only_looks_like_a_keyword() {
    let service = service("kickless blk --fd=3 --blk-file=./null:1G");
    assert_eq!(disk_of(&service.devices[0]).blk_file, DiskSpec::File("./null:1G".into()));
}

#[test]
fn capabilities_are_printed_with_any_other_options() {
    for line in [
        "kickless blk --print-capabilities",
        "kickless-blk --print-capabilities",
        "/opt/kickless-blk --no-such-option --fd=x --print-capabilities --fd=4",
    ] {
        let Ok(Invocation::Print(text)) = parsed(line) else { panic!("{line}") };
        assert!(text.contains("blk-file") && text.ends_with('\n'), "{line}: {text}");
    }
    for line in
        ["kickless net --port=wrong --print-capabilities", "/usr/libexec/kickless-net --print-capabilities"]
    {
        let net = parsed(line);
        assert!(matches!(net, Ok(Invocation::Print(text)) if text == "{\"type\":\"net\"}\n"), "{line}");
    }
    assert!(parsed("kickless --print-capabilities").is_err());
}

#[test]
fn faults_are_written_before_their_disk() {
    let text = "fault:seed=7,eio@1.5%+read,delay=1ms@nth=3:/dev/disk/by-id:1";
    let parsed = DiskSpec::parse(text.as_ref()).unwrap();
    assert_eq!((parsed.to_string(), parsed.path()), (text.to_owned(), Some("/dev/disk/by-id:1".as_ref())));
    let DiskSpec::Fault(rules, _) = parsed else { panic!("{text}") };
    assert_eq!(Ok(rules), "seed=7,eio@1.5%+read,delay=1ms@nth=3".parse());
}

#[test]
fn disks_that_are_not_raw_images() {
    for text in
        ["qcow2:/srv/a:b.qcow2", "nbd://host:1/disk", "nbd+unix:///?socket=/run/nbd.sock&reconnect-delay=5"]
    {
        let service = service(&format!("kickless blk --fd=3 --incoming --blk-file={text}"));
        assert_eq!(disk_of(&service.devices[0]).blk_file.to_string(), text);
        let faulty = DiskSpec::parse(format!("fault:eio@1%:{text}").as_ref()).unwrap();
        let DiskSpec::Fault(_, under) = faulty else { panic!("{text}") };
        assert_eq!(*under, disk_of(&service.devices[0]).blk_file);
    }
    // These are names of files.
    for text in ["nbd:host", "qcow2/a", "./qcow2:a", "rbd/a"] {
        assert_eq!(DiskSpec::parse(text.as_ref()), Ok(DiskSpec::File(text.into())));
    }
}

#[test]
fn images_of_a_ceph_cluster() {
    let text = "rbd:pool/tenant/image@monday?conf=/etc/ceph/ceph.conf&id=me";
    #[cfg(feature = "rbd")]
    {
        let service = service(&format!("kickless blk --fd=3 --incoming --blk-file={text}"));
        assert_eq!(disk_of(&service.devices[0]).blk_file.to_string(), text);
        let faulty = DiskSpec::parse(format!("fault:eio@1%:{text}").as_ref()).unwrap();
        let DiskSpec::Fault(_, under) = faulty else { panic!("{text}") };
        assert_eq!(*under, disk_of(&service.devices[0]).blk_file);
    }
    #[cfg(not(feature = "rbd"))]
    {
        let said = DiskSpec::parse(text.as_ref()).unwrap_err().to_string();
        assert!(said.contains("feature rbd"), "{said}");
    }
}

#[test]
fn help_and_version_are_no_mistakes() {
    for line in ["kickless --help", "kickless --version", "kickless blk --help", "kickless-blk -h"] {
        assert!(matches!(parsed(line), Ok(Invocation::Print(_))), "{line}");
    }
}

#[test]
fn each_command_has_a_manual_page() {
    let directory = tempfile::tempdir().unwrap();
    let Ok(Invocation::Run { work: Work::Man(given), .. }) = parsed("kickless man /usr/share/man/man1")
    else {
        panic!("the command is hidden, but it is there");
    };
    assert_eq!(given, Path::new("/usr/share/man/man1"));
    write_man(directory.path()).unwrap();
    for (page, words) in [
        ("kickless", "kickless\\-serve(1)"),
        ("kickless-blk", "\\-\\-blk\\-file"),
        ("kickless-net", "\\-\\-port"),
        ("kickless-net", "EXAMPLES"),
        ("kickless-serve", "/etc/kickless/devices.toml"),
        ("kickless-top", "EXIT STATUS"),
        ("kickless-bench-net", "frame"),
    ] {
        let text = std::fs::read_to_string(directory.path().join(format!("{page}.1"))).unwrap();
        assert!(text.contains(words), "{page}: {text}");
    }
    for command in Cli::command().get_subcommands() {
        let page = directory.path().join(format!("kickless-{}.1", command.get_name()));
        assert_eq!(page.exists(), !command.is_hide_set(), "{}", page.display());
    }
    for hidden in ["man", "bench-ring"] {
        assert!(!directory.path().join(format!("kickless-{hidden}.1")).exists(), "{hidden}");
    }
}

/// Returns the lines of a unit that set something.
fn settings(unit: &'static str) -> impl Iterator<Item = &'static str> {
    unit.lines().filter(|line| !line.starts_with('#'))
}

#[test]
fn the_units_of_systemd_start_daemons() {
    let host = include_str!("../../../../dist/systemd/kickless.service");
    let instance = include_str!("../../../../dist/systemd/kickless@.service");
    for unit in [host, instance] {
        let line = |key: &str| settings(unit).find_map(|line| line.strip_prefix(key)).unwrap();
        let start = line("ExecStart=");
        assert!(matches!(parsed(start), Ok(Invocation::Run { work: Work::ServeFile { .. }, .. })), "{start}");
        let check = line("ExecStartPre=");
        assert!(matches!(parsed(check), Ok(Invocation::Run { work: Work::Check(_), .. })), "{check}");
        assert_eq!(check, format!("{start} --check"));
        // The next process has the options of this one.
        let reload = line("ExecReload=");
        let Ok(Invocation::Run { work: Work::ServeFile { upgrade, .. }, .. }) = parsed(reload) else {
            panic!("{reload}")
        };
        assert!(
            reload.starts_with(start) && upgrade.background && upgrade.upgrade_from.is_some(),
            "{reload}"
        );
        let stop = line("ExecStop=-");
        assert!(matches!(parsed(stop), Ok(Invocation::Run { work: Work::Store(_), .. })), "{stop}");
    }
    // Both take the same rights away.
    let limits = |unit| settings(unit).skip_while(|line| *line != "KillMode=mixed").collect::<Vec<_>>();
    assert_eq!(limits(host), limits(instance));
    let metrics = include_str!("../../../../dist/systemd/kickless-metrics.service");
    let start = settings(metrics).find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    assert!(matches!(parsed(start), Ok(Invocation::Run { work: Work::Metrics(_), .. })), "{start}");
}

#[test]
fn each_shell_gets_completions() {
    for (shell, words) in [("bash", "--blk-file"), ("zsh", "#compdef kickless"), ("fish", "-l blk-file")] {
        let line = format!("kickless completions {shell}");
        let Ok(Invocation::Run { work: Work::Completions(shell), .. }) = parsed(&line) else {
            panic!("{line}");
        };
        let script = completions(shell);
        assert!(script.contains(words), "{script}");
    }
}

#[test]
fn each_mistake_gets_one_sentence_that_names_the_option() {
    for (line, named) in [
        ("kickless", "kickless blk"),
        ("kickless blk", "--blk-file"),
        ("kickless serve --config=a --background", "--upgrade-from"),
        ("kickless store --control=", "--control"),
        ("kickless blk --blk-file=a", "--socket-path"),
        ("kickless blk --socket-path=s", "--blk-file"),
        ("kickless blk --socket-path= --blk-file=a", "--socket-path"),
        ("kickless blk --socket-path=s --fd=3 --blk-file=a", "--fd"),
        ("kickless blk --fd=0 --blk-file=a", "--fd"),
        ("kickless blk --fd=-1 --blk-file=a", "--fd"),
        ("kickless blk --fd=3 --socket-mode=0600 --blk-file=a", "--socket-mode"),
        ("kickless blk --fd=3 --socket-group=kvm --blk-file=a", "--socket-group"),
        ("kickless blk --fd=3 --blk-file=", "--blk-file"),
        ("kickless blk --fd=3 --blk-file=null:", "--blk-file"),
        ("kickless blk --fd=3 --blk-file=null:0", "--blk-file"),
        ("kickless blk --fd=3 --blk-file=null:1000", "512"),
        ("kickless blk --fd=3 --blk-file=mem:9E", "too large"),
        ("kickless blk --fd=3 --blk-file=a --blk-file=b", "--blk-file"),
        ("kickless blk --fd=3 --blk-file=qcow2:", "qcow2:PATH"),
        ("kickless blk --fd=3 --blk-file=nbd:///disk", "not a host"),
        ("kickless blk --fd=3 --blk-file=nbd+unix:///disk", "?socket=PATH"),
        ("kickless blk --fd=3 --blk-file=nbds://host/disk", "TLS"),
        ("kickless blk --fd=3 --blk-file=rbd:image", "rbd:POOL/IMAGE"),
        ("kickless blk --fd=3 --blk-file=rbd:pool/image:id=me", "?id=NAME&conf=PATH"),
        ("kickless blk --fd=3 --blk-file=rbd:pool/image?key=AQ==", "keyring=PATH"),
        ("kickless blk --fd=3 --blk-file=fault:a", "fault:RULES:DISK"),
        ("kickless blk --fd=3 --blk-file=fault::a", "needs rules"),
        ("kickless blk --fd=3 --blk-file=fault:fire:a", "not a fault"),
        ("kickless blk --fd=3 --blk-file=fault:eio@often:a", "not a condition"),
        ("kickless blk --fd=3 --blk-file=fault:eio:", "--blk-file"),
        ("kickless blk --fd=3 --blk-file=fault:eio:mem:0", "above 0"),
        ("kickless blk --fd=3 --blk-file=fault:eio:fault:short:a", "one fault: only"),
        ("kickless blk --fd=3 --blk-file=fault:eio:null:1G --incoming", "--incoming"),
        ("kickless blk --fd=3 --blk-file=a --num-queues=0", "--num-queues"),
        ("kickless blk --fd=3 --blk-file=a --num-queues=257", "--num-queues"),
        ("kickless blk --fd=3 --blk-file=a --queue-size=0", "--queue-size"),
        ("kickless blk --fd=3 --blk-file=a --queue-size=300", "power of two"),
        ("kickless blk --fd=3 --blk-file=a --queue-size=65536", "--queue-size"),
        ("kickless blk --fd=3 --blk-file=a --engine=spdk", "--engine"),
        (
            "kickless blk --fd=3 --blk-file=a --completion=thread",
            "--completion: it was removed, because it made disks slower: leave it out",
        ),
        ("kickless blk --completion worker --fd=3 --blk-file=a", "--completion: it was removed"),
        ("kickless net --fd=3 --port=null --sqpoll", "--sqpoll: it was removed"),
        ("kickless serve --config=a --fixed-buffers", "--fixed-buffers: it was removed"),
        (
            "kickless blk --fd=3 --blk-file=a --merge=on",
            "--merge: it was removed, because neighbouring requests are always merged: leave it out",
        ),
        ("kickless blk --fd=3 --blk-file=a --cache=unsafe", "--cache"),
        ("kickless blk --fd=3 --blk-file=a --cache-size=63K", "from 64K to 64G"),
        ("kickless blk --fd=3 --blk-file=a --cache-size=65G", "from 64K to 64G"),
        ("kickless blk --fd=3 --blk-file=a --cache-size=", "--cache-size"),
        ("kickless blk --fd=3 --blk-file=qcow2:a --blk-size=0", "above 0"),
        ("kickless blk --fd=3 --blk-file=qcow2:a --blk-size=1000", "512"),
        ("kickless blk --fd=3 --blk-file=qcow2:a --blk-size=9E", "too large"),
        ("kickless blk --fd=3 --blk-file=a --blk-size=1G", "--blk-size: only a qcow2: image grows by it"),
        (
            "kickless blk --fd=3 --blk-file=qcow2:a --blk-size=1G --read-only",
            "--blk-size: a read-only image cannot grow",
        ),
        ("kickless blk --fd=3 --blk-file=a --lock=maybe", "--lock"),
        ("kickless blk --fd=3 --blk-file=a --logical-block-size=768", "--logical-block-size"),
        ("kickless blk --fd=3 --blk-file=a --discard=unmap", "--discard"),
        ("kickless blk --fd=3 --blk-file=a --serial=123456789012345678901", "--serial"),
        ("kickless blk --fd=3 --blk-file=a --serial=disk\u{e9}", "--serial"),
        ("kickless blk --fd=3 --blk-file=a --memory-max=1023K", "--memory-max"),
        ("kickless blk --fd=3 --blk-file=a --memory-max=97T", "from 1M to 96T"),
        ("kickless blk --fd=3 --blk-file=a --workers=0", "--workers"),
        ("kickless blk --fd=3 --blk-file=a --workers=1 --cpu=0-3", "--workers"),
        ("kickless blk --fd=3 --blk-file=a --cpu=3-1", "--cpu"),
        ("kickless blk --fd=3 --blk-file=null:1G --incoming", "--incoming"),
        ("kickless blk --socket-path=s --blk-file=a --socket-mode=0999", "--socket-mode"),
        ("kickless blk --socket-path=s --blk-file=a --socket-mode=1777", "--socket-mode"),
        ("kickless blk --fd=3 --blk-file=a --workers=257", "1 to 256"),
        ("kickless blk --fd=3 --blk-file=a --poll=sometimes", "--poll"),
        ("kickless blk --fd=3 --blk-file=a --poll=", "--poll"),
        ("kickless blk --fd=3 --blk-file=a --poll-latency=", "--poll-latency"),
        ("kickless blk --fd=3 --blk-file=a --poll-latency=100", "no unit"),
        ("kickless blk --fd=3 --blk-file=a --poll-latency=-1us", "--poll-latency"),
        ("kickless blk --fd=3 --blk-file=a --poll-latency=2s", "1s at most"),
        ("kickless blk --fd=3 --blk-file=a --poll-kick-price=2s", "1s at most"),
        (
            "kickless blk --fd=3 --blk-file=a --poll=always --poll-kick-price=1us",
            "--poll-kick-price: it is for --poll=auto",
        ),
        (
            "kickless blk --fd=3 --blk-file=a --poll=never --poll-latency=1ms",
            "--poll-latency: it is for --poll=auto",
        ),
        (
            "kickless blk --fd=3 --blk-file=a --poll-latency=1ms --poll-stop-idle=1s",
            "or --poll-stop-idle out",
        ),
        ("kickless blk --fd=3 --blk-file=a --poll-start-rate=-1", "--poll-start-rate"),
        ("kickless blk --fd=3 --blk-file=a --poll-start-rate=5k", "--poll-start-rate"),
        ("kickless blk --fd=3 --blk-file=a --poll-start-rate=1000000001", "from 0 to 1000000000"),
        (
            "kickless blk --fd=3 --blk-file=a --poll=auto --poll-start-rate=1",
            "--poll-start-rate: it is for --poll=rate",
        ),
        (
            "kickless blk --fd=3 --blk-file=a --poll=always --poll-stop-idle=1s",
            "leave it or --poll=always out",
        ),
        ("kickless blk --fd=3 --blk-file=a --poll-stop-idle=0s", "above 0"),
        ("kickless blk --fd=3 --blk-file=a --poll-stop-idle=61m", "1h at most"),
        ("kickless blk --fd=3 --blk-file=a --poll-stop-idle=3", "--poll-stop-idle"),
        ("kickless blk --fd=3 --blk-file=a --poll-latency=soon", "--poll-latency"),
        ("kickless blk --fd=3 --blk-file=a --poll-latency=1.1s", "--poll-latency"),
        (
            "kickless net --fd=3 --port=null --call-coalesce=20us",
            "--call-coalesce: it was removed, because calls are sent at once: leave it out",
        ),
        ("kickless blk --fd=3 --blk-file=a stray", "stray"),
        ("kickless net", "net"),
        ("kickless serve", "--config=FILE"),
        ("kickless serve --config", "--config"),
        ("kickless serve --config=", "--config"),
        ("kickless serve --config=a --blk-file=b", "--blk-file is an option of kickless blk"),
        ("kickless metrics --listen=9750", "--listen"),
        ("kickless metrics --listen=127.0.0.1:9750 --textfile=a", "--textfile"),
        ("kickless metrics stray", "kickless metrics --help"),
        ("kickless top --once", "--json"),
        ("kickless top --json", "--once"),
        ("kickless top --interval=1ms", "100ms"),
        ("kickless bench", "kickless bench blk"),
        ("kickless bench blk", "--socket-path"),
        ("kickless bench blk --socket-path=s --depth=0", "--depth"),
        ("kickless bench blk --socket-path=s --block-size=4000", "--block-size"),
        ("kickless bench blk --socket-path=s --read=101", "--read"),
        ("kickless bench blk --socket-path=s --time=1ms", "--time"),
        ("kickless bench blk --socket-path=s --verify", "--verify"),
        ("kickless bench compare a", "TARGET"),
        ("kickless bench compare a b --packed=maybe", "--packed=maybe"),
        ("kickless bench net", "--socket-path"),
        ("kickless bench net --socket-path=s --frame-size=59", "--frame-size"),
        ("kickless bench net --socket-path=s --rate=9 --direction=receive", "--rate"),
        ("kickless bench compare-net a", "TARGET"),
        ("kickless bench core-latency --cpu=1", "--cpu: list two CPUs"),
        ("kickless bench ring", "bench ring and bench memory were removed: use cargo bench"),
        (
            "kickless bench memory --rounds=1 --json",
            "bench ring and bench memory were removed: use cargo bench",
        ),
        ("kickless bench ring --help", "bench ring and bench memory were removed: use cargo bench"),
    ] {
        let sentence = match parsed(line) {
            Err(sentence) => sentence,
            Ok(request) => panic!("{line}: {request:?}"),
        };
        assert!(sentence.contains(named), "{line}: {sentence}");
        assert!(!sentence.contains('\n'), "{line}: {sentence}");
    }
}
