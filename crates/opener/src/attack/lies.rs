//! The lies, and the truth beside some of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::grant::Target;
use crate::wire::{REQUEST_BYTES_MAX, Request, write};

/// The entry of the lies. No device has it.
pub(super) const ENTRY: u64 = 1 << 60;
/// The flags of queues: TUN instead of TAP, and TAP.
const TUN_FLAGS: i32 = 1;
const TAP_FLAGS: i32 = 2;
/// A flag that no queue of this program has.
const NAPI_FLAG: i32 = 0x10;
/// The number of a request that is sent as bytes.
const ID: u64 = 1 << 61;

/// A lie.
#[derive(Debug)]
pub(super) enum Lie {
    /// Requests, until one is refused.
    Ask(Vec<Request>),
    /// A request with a descriptor.
    With(Request, Given),
    /// Bytes, with descriptors, that are no request and end both processes.
    Message(Vec<u8>, Vec<Given>),
}

/// A descriptor that is passed to the opener.
#[derive(Clone, Copy, Debug)]
pub(super) enum Given {
    NamedImage,
    PathOnly,
    Directory,
    Outside,
}

/// Returns all lies about files below a directory. `plain` has the device and the inode of a plain file among
/// the sockets.
pub(super) fn all(directory: &Path, plain: (u64, u64)) -> Vec<(&'static str, Lie)> {
    let files = Files(directory);
    let all = [
        files.images(),
        files.sockets(plain),
        connections(),
        files.entries(),
        files.descriptors(),
        messages(),
    ];
    all.into_iter().flatten().collect()
}

/// The files of a test.
struct Files<'a>(&'a Path);

type Lies = Vec<(&'static str, Lie)>;

fn ask(request: Request) -> Lie {
    Lie::Ask(vec![request])
}

fn image(path: PathBuf, writes: bool) -> Target {
    Target::Image { path, writes, chain: false }
}

fn socket(path: PathBuf) -> Target {
    Target::Socket { path, mode: None, group: None }
}

fn enter(targets: Vec<Target>) -> Request {
    Request::Enter { entry: ENTRY, targets }
}

fn read(path: impl Into<PathBuf>) -> Request {
    Request::Image { path: path.into(), writes: false, is_direct: false }
}

fn written(path: impl Into<PathBuf>) -> Request {
    Request::Image { path: path.into(), writes: true, is_direct: false }
}

impl Files<'_> {
    fn path(&self, name: &str) -> PathBuf {
        // `join` would leave out what a lie is about.
        format!("{}/{name}", self.0.display()).into()
    }

    /// Files that no device has, and other ways to those that one has.
    fn images(&self) -> Lies {
        let path = |name| self.path(name);
        let image = path("disks/image");
        vec![
            ("image:named", ask(written(&image))),
            ("image:read-only", ask(read(path("disks/read-only")))),
            ("image:read-only-written", ask(written(path("disks/read-only")))),
            ("image:neighbour", ask(read(path("disks/other")))),
            ("image:neighbour-written", ask(written(path("disks/other")))),
            ("image:passwd", ask(read("/etc/passwd"))),
            ("image:passwd-written", ask(written("/etc/passwd"))),
            ("image:dot-dot", ask(written(path("disks/../disks/image")))),
            ("image:dot", ask(written(path("disks/./image")))),
            ("image:two-slashes", ask(written(path("disks//image")))),
            ("image:last-slash", ask(written(path("disks/image/")))),
            ("image:relative", ask(written("disks/image"))),
            ("image:empty", ask(written(""))),
            ("image:proc-root", ask(written(format!("/proc/self/root{}", image.display())))),
            ("image:proc-fd", ask(read("/proc/self/fd/0"))),
            ("image:proc-mem", ask(read("/proc/self/mem"))),
            ("image:proc-exe", ask(read("/proc/self/exe"))),
            ("image:link", ask(read(path("disks/link")))),
            ("image:became-a-link", ask(written(path("disks/becomes-link")))),
            ("image:became-a-pipe", ask(written(path("disks/becomes-pipe")))),
            ("image:socket", ask(written(path("sockets/disk")))),
            ("status:passwd", ask(Request::Status { path: "/etc/passwd".into() })),
            ("status:neighbour", ask(Request::Status { path: path("disks/other") })),
            ("status:became-a-link", ask(Request::Status { path: path("disks/becomes-link") })),
            (
                "image:config",
                Lie::Ask(vec![
                    enter(vec![self::image(path("disks/config"), true)]),
                    written(path("disks/config")),
                ]),
            ),
            (
                "capture:config",
                Lie::Ask(vec![
                    enter(vec![Target::Capture { path: path("captures/config") }]),
                    Request::Capture { path: path("captures/config") },
                ]),
            ),
            ("capture:named", ask(Request::Capture { path: path("captures/named") })),
            ("capture:image", ask(Request::Capture { path: image })),
            ("capture:neighbour", ask(Request::Capture { path: path("captures/other") })),
            ("capture:dot", ask(Request::Capture { path: path("captures/./named") })),
            ("capture:became-a-link", ask(Request::Capture { path: path("captures/becomes-link") })),
        ]
    }

    /// Sockets that no device has, and their names.
    fn sockets(&self, (device, inode): (u64, u64)) -> Lies {
        let path = |name| self.path(name);
        let listen = |path| Request::Listen { path, wait_ms: u32::MAX };
        let check = |path| Request::CheckSocket { path };
        let unlink = |path, device, inode| Request::Unlink { path, device, inode };
        let plain = path("sockets/plain");
        let with_group = |group: &str| Target::Socket {
            path: path("sockets/of-group"),
            mode: Some(0o7777),
            group: Some(group.into()),
        };
        vec![
            ("listen:named", ask(listen(path("sockets/disk")))),
            ("listen:neighbour", ask(listen(path("sockets/other")))),
            ("listen:image", ask(listen(path("disks/image")))),
            ("listen:dot-dot", ask(listen(path("sockets/../sockets/disk")))),
            ("listen:became-elsewhere", ask(listen(path("becomes-link/disk")))),
            ("listen:plain", Lie::Ask(vec![enter(vec![socket(plain.clone())]), listen(plain.clone())])),
            (
                "listen:no-group",
                Lie::Ask(vec![enter(vec![with_group("no such group")]), listen(path("sockets/of-group"))]),
            ),
            ("check-socket:neighbour", ask(check(path("sockets/other")))),
            ("check-socket:became-elsewhere", ask(check(path("becomes-link/disk")))),
            ("real-path:neighbour", ask(Request::RealPath { path: path("sockets/other") })),
            ("unlink:neighbour", ask(unlink(path("sockets/plain"), device, inode))),
            ("unlink:image", ask(unlink(path("disks/image"), device, inode))),
            ("unlink:other-inode", ask(unlink(path("sockets/disk"), device, inode))),
            (
                "unlink:plain",
                Lie::Ask(vec![enter(vec![socket(plain.clone())]), unlink(plain, device, inode)]),
            ),
            ("connect-unix:peer", ask(Request::ConnectUnix { path: path("secret/peer") })),
            ("connect-unix:own", ask(Request::ConnectUnix { path: path("sockets/disk") })),
            (
                "connect-unix:dot",
                Lie::Ask(vec![
                    enter(vec![Target::Unix { path: path("sockets/peer") }]),
                    Request::ConnectUnix { path: path("sockets/./peer") },
                ]),
            ),
        ]
    }

    /// Things that entries may not have.
    fn entries(&self) -> Lies {
        let path = |name| self.path(name);
        let one = |target| ask(enter(vec![target]));
        let passt = |argument: &str| one(Target::Passt { arguments: vec![argument.into()] });
        let library = |name: &str| one(Target::Library { name: name.into(), files: Vec::new() });
        let other = || image(path("disks/other"), true);
        let of_disk = |mode, group: Option<&str>| Target::Socket {
            path: path("sockets/disk"),
            mode,
            group: group.map(str::to_owned),
        };
        vec![
            ("enter:neighbour", one(other())),
            ("enter:more-rights", one(image(path("disks/read-only"), true))),
            ("enter:passwd", one(image("/etc/passwd".into(), false))),
            ("enter:device", one(image("/dev/null".into(), true))),
            ("enter:proc-root", one(image("/proc/self/root/etc/passwd".into(), false))),
            ("enter:dot-dot", one(image(path("disks/../secret/file"), false))),
            ("enter:dot-dot-of-nothing", one(image(path("disks/none/../../secret/file"), false))),
            ("enter:link", one(image(path("disks/link"), false))),
            ("enter:capture-of-image", one(Target::Capture { path: path("disks/image") })),
            ("enter:socket-elsewhere", one(socket("/etc/socket".into()))),
            ("enter:other-mode", one(of_disk(Some(0o7777), None))),
            ("enter:other-group", one(of_disk(None, Some("root")))),
            ("enter:socket-of-image", one(socket(path("disks/socket")))),
            ("enter:unix", one(Target::Unix { path: path("sockets/peer") })),
            ("enter:unix-elsewhere", one(Target::Unix { path: path("secret/peer") })),
            ("enter:tcp", one(Target::Tcp { host: "127.0.0.1".into(), port: 9 })),
            ("enter:tap", one(Target::Tap { name: "lo".into() })),
            ("enter:passt", passt("-4")),
            ("enter:passt-file", passt("--log-file=/none/none")),
            ("enter:passt-short", passt("--log=/none/none")),
            ("enter:rbd", library("rbd")),
            ("enter:xdp", library("xdp")),
            ("enter:control", ask(Request::Enter { entry: 0, targets: vec![other()] })),
            ("enter:nothing", ask(enter(Vec::new()))),
            ("enter:nine", ask(enter((0..9).map(|_| other()).collect()))),
            ("leave:control", ask(Request::Leave { entry: 0 })),
            (
                "leave:then-image",
                Lie::Ask(vec![
                    enter(vec![other()]),
                    Request::Leave { entry: ENTRY },
                    written(path("disks/other")),
                ]),
            ),
        ]
    }

    /// Descriptors of the wrong kinds, and numbers of devices and children.
    fn descriptors(&self) -> Lies {
        let reopen = |writes| Request::Reopen { writes, is_direct: false };
        vec![
            ("reopen:image", Lie::With(reopen(true), Given::NamedImage)),
            ("reopen:path-only", Lie::With(reopen(false), Given::PathOnly)),
            ("reopen:directory", Lie::With(reopen(false), Given::Directory)),
            ("reopen:outside", Lie::With(reopen(false), Given::Outside)),
            ("reopen:outside-written", Lie::With(reopen(true), Given::Outside)),
            ("block-facts:any", ask(Request::BlockFacts { device: u64::MAX })),
            ("char-subsystem:any", ask(Request::CharSubsystem { device: u64::MAX })),
            ("end-passt:any", ask(Request::EndPasst { child: 1, wait_ms: u32::MAX })),
            ("read-config", ask(Request::ReadConfig {})),
        ]
    }
}

/// Servers, TAPs and programs.
fn connections() -> Lies {
    let server = || Target::Tcp { host: "127.0.0.1".into(), port: 9 };
    let resolve = |host: &str, port| Request::Resolve { host: host.into(), port };
    let connect = |last, port| Request::ConnectTcp {
        address: SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), port)),
    };
    let to = |address| Lie::Ask(vec![enter(vec![server()]), resolve("127.0.0.1", 9), address]);
    let tap = |name: &str, flags| Request::Tap { name: name.into(), flags };
    let of_tap = |request| Lie::Ask(vec![enter(vec![Target::Tap { name: "kl-attack".into() }]), request]);
    vec![
        ("resolve:any", ask(resolve("localhost", 80))),
        ("resolve:other-port", Lie::Ask(vec![enter(vec![server()]), resolve("127.0.0.1", 10)])),
        ("connect-tcp:any", ask(connect(1, 9))),
        ("connect-tcp:other-address", to(connect(2, 9))),
        ("connect-tcp:other-port", to(connect(1, 10))),
        ("tap:any", ask(tap("lo", TAP_FLAGS))),
        ("tap:other-name", of_tap(tap("lo", TAP_FLAGS))),
        ("tap:tun", of_tap(tap("kl-attack", TUN_FLAGS))),
        ("tap:other-flags", of_tap(tap("kl-attack", TAP_FLAGS | NAPI_FLAG))),
        ("find-passt", ask(Request::FindPasst {})),
        ("start-passt:any", ask(Request::StartPasst { arguments: vec!["-4".into()] })),
        (
            "start-passt:other-arguments",
            Lie::Ask(vec![
                enter(vec![Target::Passt { arguments: vec!["-4".into()] }]),
                Request::StartPasst { arguments: vec!["--log-file=/none/none".into()] },
            ]),
        ),
        ("group", ask(Request::Group { name: "root".into() })),
    ]
}

/// Bytes that are no request.
fn messages() -> Lies {
    let bytes = |request: &Request| write(ID, request, REQUEST_BYTES_MAX).unwrap_or_default();
    let bare = |bytes| Lie::Message(bytes, Vec::new());
    let with = |request, given: &[Given]| Lie::Message(bytes(&request), given.to_vec());
    // The number of a message has eight bytes, its code is the next one, and its fields follow.
    let changed = |request, at: usize, byte| {
        let mut bytes = bytes(&request);
        bytes.get_mut(at).into_iter().for_each(|at| *at = byte);
        bare(bytes)
    };
    let status = || Request::Status { path: "/none".into() };
    let image = || read("/none");
    let last = bytes(&image()).len() - 1;
    let mut shorter = bytes(&status());
    shorter.pop();
    let reopen = || Request::Reopen { writes: false, is_direct: false };
    let resolve = Request::Resolve { host: "none".into(), port: 1 };
    let connect = Request::ConnectTcp { address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)) };
    vec![
        ("message:empty", bare(Vec::new())),
        ("message:short", bare(vec![0; 7])),
        ("message:no-code", bare(vec![0; 8])),
        ("message:unknown-code", changed(status(), 8, 99)),
        ("message:code-0", changed(status(), 8, 0)),
        ("message:shorter", bare(shorter)),
        ("message:longer", bare([bytes(&status()), vec![0]].concat())),
        ("message:nul", changed(status(), 12, 0)),
        ("message:long-text", changed(status(), 10, 0xff)),
        ("message:bool", changed(image(), last, 2)),
        ("message:no-utf8", changed(resolve, 11, 0xff)),
        ("message:family", changed(connect, 9, 5)),
        ("message:long-list", changed(enter(vec![socket("/none".into())]), 18, 0xff)),
        ("message:option", changed(enter(vec![socket("/none".into())]), 27, 2)),
        ("message:too-long", bare([bytes(&status()), vec![0; REQUEST_BYTES_MAX]].concat())),
        ("message:fd", with(status(), &[Given::PathOnly])),
        ("message:no-fd", with(reopen(), &[])),
        ("message:two-fds", with(reopen(), &[Given::PathOnly, Given::Directory])),
    ]
}
