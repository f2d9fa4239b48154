//! A guest of libvirt, as docs/libvirt.md describes it: its disk and its card are those of kickless. It works
//! while kickless is killed, while other devices come and go, and after it was saved and restored.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use kickless_testing::in_network_namespace;
use kickless_tests::daemon::{Daemon, repository};
use kickless_tests::guest::Assets;
use kickless_tests::guest::libvirt::{Libvirt, QEMU_USER, fixtures};
use kickless_tests::guest::network::network;
use kickless_tests::guest::qemu::{LIMIT, Results};
use kickless_tests::guest::scratch::Scratch;
use kickless_tests::transcript::Transcript;

/// The pages whose XML is that of the fixtures.
const PAGES: [&str; 3] = ["README.md", "docs/libvirt.md", "docs/networking.md"];
/// The XML that the test gives to libvirt.
const FIXTURES: [&str; 3] = ["web.xml", "hot-disk.xml", "hot-card.xml"];
/// The number of kills under load, before the machine is saved and after.
const KILLS: usize = 3;
/// The work of the guest that goes on, by the names of its reports.
const WORK: [&str; 2] = ["verified", "echoed"];

/// The guest, as the test sees it through its second serial port.
struct Guest<'a> {
    libvirt: &'a Libvirt,
    /// The lines before the machine was saved, if it was, and those of now.
    results: Vec<Transcript>,
    port: UnixStream,
}

impl<'a> Guest<'a> {
    fn start(libvirt: &'a Libvirt) -> Guest<'a> {
        libvirt.virsh(&["define", "web.xml"]).unwrap();
        libvirt.virsh(&["start", "web"]).unwrap();
        let (results, port) = libvirt.accept_results().unwrap();
        Guest { libvirt, results: vec![results], port }
    }

    fn now(&self) -> &Transcript {
        self.results.last().unwrap()
    }

    /// Waits until a report has come `times` times, from line `from` on.
    fn wait_from(&self, from: usize, report: &str, times: usize) {
        let mut count = 0;
        let found = self.now().wait_from(from, report, LIMIT, |line| {
            assert_ne!(line, "KL: end=failed", "{:#?}", self.now().lines());
            count += usize::from(line.strip_prefix("KL: ").is_some_and(|line| line.starts_with(report)));
            (count == times).then_some(())
        });
        found.unwrap();
    }

    /// Waits until the guest has completed each kind of its work twice from now on. The first time may have
    /// begun before.
    fn works(&self) {
        let from = self.now().len();
        WORK.iter().for_each(|name| self.wait_from(from, &format!("progress.{name}="), 2));
    }

    /// Tells the guest to expect a device, plugs and unplugs it.
    fn plug(&mut self, name: &str, xml: &str) {
        let from = self.now().len();
        writeln!(self.port, "{name}").unwrap();
        self.libvirt.virsh(&["attach-device", "web", xml, "--live"]).unwrap();
        self.wait_from(from, &format!("{name}=flowing"), 1);
        self.libvirt.virsh(&["detach-device", "web", xml, "--live"]).unwrap();
        self.wait_from(from, &format!("{name}=gone"), 1);
    }

    /// Saves the machine, which ends its QEMU, and restores it.
    fn save_and_restore(&mut self) {
        self.libvirt.virsh(&["save", "web", "/var/lib/libvirt/web.save"]).unwrap();
        assert!(self.libvirt.virsh(&["domstate", "web"]).unwrap().contains("shut off"));
        self.libvirt.virsh(&["restore", "/var/lib/libvirt/web.save"]).unwrap();
        let (results, port) = self.libvirt.accept_results().unwrap();
        self.results.push(results);
        self.port = port;
    }

    /// Ends the work of the guest, and returns what it has reported.
    fn finish(mut self) -> Results {
        writeln!(self.port, "stop").unwrap();
        self.wait_from(0, "end=ok", 1);
        let lines = self.results.iter().flat_map(Transcript::lines);
        let pair = |line: String| {
            line.strip_prefix("KL: ")?.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
        };
        lines.filter_map(pair).collect()
    }
}

#[test]
fn a_guest_of_libvirt() {
    if let Some(why) = Libvirt::is_missing() {
        return println!("skipped: {why}");
    }
    // It can need the network of the host.
    Assets::get().unwrap();
    in_network_namespace(|| {
        network(0, &["vm0"], "").unwrap();
        network(1, &["vm1"], "").unwrap();
        let [scratch, hot] = [(); 2].map(|()| Scratch::new().unwrap());
        let may_connect = format!("socket-mode = '0660'\nsocket-group = '{QEMU_USER}'");
        let devices = [
            ("web", format!("blk-file = '{}'\n{may_connect}", scratch.path().display())),
            ("hot", format!("blk-file = '{}'\n{may_connect}", hot.path().display())),
            ("net", format!("port = 'tap:vm0'\n{may_connect}")),
            ("hot-net", format!("port = 'tap:vm1'\n{may_connect}")),
        ];
        let devices = devices.each_ref().map(|(name, lines)| (*name, lines.as_str()));
        let mut daemon = Daemon::serve("", &devices).unwrap();
        let sockets = daemon.socket_of("web").parent().unwrap().to_owned();
        let libvirt = Libvirt::start(&sockets, &fixtures().join("tasks")).unwrap();
        let mut guest = Guest::start(&libvirt);
        guest.wait_from(0, "libvirt=ready", 1);
        guest.works();
        let owner = fs::metadata(sockets.join("web.sock")).unwrap();
        assert_eq!(
            (owner.uid(), owner.gid(), owner.mode() & 0o777),
            (0, QEMU_USER, 0o660),
            "libvirt took it"
        );
        for _ in 0..KILLS {
            daemon.restart().unwrap();
            guest.works();
        }
        guest.plug("disk", "hot-disk.xml");
        guest.plug("card", "hot-card.xml");
        guest.save_and_restore();
        guest.works();
        for _ in 0..KILLS {
            daemon.restart().unwrap();
            guest.works();
        }
        let results = guest.finish();
        scratch.compare(&results, "vda").unwrap();
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        // With `config-wce=off`, no write is slower after a kill.
        let is_trouble = |line: &String| line.contains(" ERROR ") || line.contains("is made durable");
        assert!(!log.iter().any(is_trouble), "{log:#?}");
    });
}

/// Returns the lines of a text without their indentation.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

/// Each part of the XML of a page, up to a line `...`, is a part of a fixture.
#[test]
fn pages_show_the_xml_of_this_test() {
    let fixtures = FIXTURES.map(|name| fs::read_to_string(fixtures().join(name)).unwrap());
    let mut used = BTreeSet::new();
    for page in PAGES {
        let text = fs::read_to_string(repository().join(page)).unwrap();
        for block in text.split("```xml\n").skip(1).map(|rest| rest.split("```").next().unwrap()) {
            for part in lines(block).split(|line| *line == "...") {
                let is_in =
                    |fixture: &&String| lines(fixture).windows(part.len()).any(|window| window == part);
                let at = fixtures.iter().position(|fixture| is_in(&fixture));
                used.insert(at.unwrap_or_else(|| panic!("{page} has XML that was not tried: {part:#?}")));
            }
        }
    }
    assert_eq!(used.len(), FIXTURES.len(), "a page shows each file");
}
