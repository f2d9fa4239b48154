//! Tests of the server, in threads of this process.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Weak;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, OFlags, fcntl_getfl, flock, makedev, mknodat};
use tempfile::TempDir;

use super::*;
use crate::client::without_refusal;
use crate::error::{Parts, SocketError};
use crate::file::{FileUse, file_here, status_of, with_alignment};
use crate::grant::{Calls, PathUse, Root, Target};
use crate::message::socket_pair;
use crate::perform::{ConfigFile, NOT_NAMED};
use crate::socket::HostAddress;
use crate::sysfs::{block_facts_here, char_subsystem_here};
use crate::tap::tap_here;

/// A server with a directory for everything.
struct Rig {
    dir: TempDir,
    client: Client,
    server: Option<JoinHandle<End>>,
    /// It is gone when the last thread of the server is.
    threads: Weak<()>,
}

/// Returns the authority of a process for which nothing was named.
fn nothing_named() -> Authority {
    Authority {
        named: Vec::new(),
        control: Vec::new(),
        roots: Vec::new(),
        calls: Calls::Nothing,
        libraries: Vec::new(),
    }
}

/// Starts a server. Files of the directory `named` are named at its start, and calls may name those of
/// `called`. It has no rights elsewhere.
fn rig(calls: Calls) -> Rig {
    let dir = TempDir::new().unwrap();
    let real = dir.path().canonicalize().unwrap();
    let directories = ["named", "called", "elsewhere"].map(|name| real.join(name));
    directories.iter().for_each(|directory| fs::create_dir(directory).unwrap());
    let [named, called, _] = directories;
    let path = |name: &str| dir.path().join("named").join(name);
    let uses = vec![PathUse::Image, PathUse::Socket, PathUse::Capture];
    let authority = Authority {
        named: vec![
            Target::Image { path: path("a.img"), writes: true, chain: false },
            Target::Image { path: path("b.img"), writes: false, chain: false },
            Target::Image { path: path("c.img"), writes: true, chain: true },
            Target::Capture { path: path("capture") },
            Target::Socket { path: path("socket"), mode: Some(0o640), group: None },
            Target::Unix { path: path("peer") },
            Target::Tcp { host: "127.0.0.1".into(), port: 1 },
            Target::Tap { name: "lo".into() },
        ],
        control: vec![Target::Socket { path: path("control"), mode: Some(0o600), group: None }],
        roots: vec![
            Root { directory: named, uses: uses.clone(), for_calls: false },
            Root { directory: called, uses, for_calls: true },
        ],
        calls,
        libraries: Vec::new(),
    };
    let (config, held) = (path("config"), Arc::new(()));
    let of_config = config.clone();
    let threads = Arc::downgrade(&held);
    let read_config = move || {
        let _ = &held;
        let text = fs::read(&config)?;
        let named = text.starts_with(b"valid").then(|| vec![Target::Tap { name: "of-file".into() }]);
        Ok(ConfigFile { text, named })
    };
    let (ours, theirs) = socket_pair().unwrap();
    let server = thread::spawn(|| {
        serve(theirs, authority, None, Some(Config { path: of_config, read: Box::new(read_config) })).unwrap()
    });
    let client = Client::start(ours, || ()).unwrap();
    Rig { dir, client, server: Some(server), threads }
}

impl Rig {
    /// Enters a socket whose directory is locked, so that a request for it waits. Returns its path and the
    /// lock.
    fn enter_socket_in_locked_directory(&self) -> (PathBuf, File) {
        let path = self.path("called/s");
        let socket = Target::Socket { path: path.clone(), mode: None, group: None };
        assert_eq!(self.enter(9, vec![socket]), Reply::Done {});
        let directory = File::open(self.path("called")).unwrap();
        flock(&directory, FlockOperation::LockExclusive).unwrap();
        (path, directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, name.repeat(512)).unwrap();
        path
    }

    /// Returns the reply and the descriptor.
    fn ask(&self, request: Request) -> Answer {
        self.client.ask_with(&request, None).unwrap()
    }

    fn enter(&self, entry: u64, targets: Vec<Target>) -> Reply {
        self.ask(Request::Enter { entry, targets }).0
    }

    /// Enters an image of the start.
    fn enter_image(&self, name: &str, writes: bool, chain: bool) -> PathBuf {
        let path = self.path(name);
        let target = Target::Image { path: path.clone(), writes, chain };
        assert_eq!(self.enter(self.client.number(), vec![target]), Reply::Done {});
        path
    }

    fn image(&self, path: &Path, writes: bool) -> Answer {
        self.ask(Request::Image { path: path.into(), writes, is_direct: false })
    }

    fn reopen(&self, fd: BorrowedFd<'_>, writes: bool) -> Answer {
        self.client.ask_with(&Request::Reopen { writes, is_direct: false }, Some(fd)).unwrap()
    }

    fn end(mut self) -> End {
        drop(self.client);
        let end = self.server.take().unwrap().join().unwrap();
        // Each thread sees the end, and starts no other one.
        let late = Instant::now() + Duration::from_secs(60);
        while self.threads.strong_count() > 0 {
            assert!(Instant::now() < late);
            thread::sleep(Duration::from_millis(1));
        }
        end
    }
}

fn errno(errno: Errno) -> Reply {
    errno.into()
}

/// Returns the number of a reply about a path that is refused for a reason.
fn explained(reply: Reply) -> Option<Errno> {
    let Reply::Explained { errno, .. } = reply else { return None };
    Some(Errno::from_raw_os_error(errno))
}

#[test]
fn an_image_is_opened_as_without_a_server() {
    let rig = rig(Calls::Nothing);
    for (name, writes) in [("named/a.img", true), ("named/b.img", false)] {
        let path = rig.enter_image(name, writes, false);
        // The device comes before its file.
        assert_eq!(explained(rig.ask(Request::Status { path: path.clone() }).0), Some(Errno::NOENT));
        rig.write(name);
        let own = file_here(&path, FileUse::Image { writes, is_direct: false }).unwrap();
        let status = status_of(&own).unwrap();
        assert_eq!(rig.ask(Request::Status { path: path.clone() }).0, Reply::Status { status });
        let (reply, file) = rig.image(&path, writes);
        let own = with_alignment(own);
        assert_eq!(reply, Reply::Opened { alignment: own.alignment });
        let file = File::from(file.unwrap());
        assert_eq!(fcntl_getfl(&file).unwrap(), fcntl_getfl(&own.file).unwrap());
        assert_eq!(file.metadata().unwrap().ino(), status.inode);
        let mut first = [0; 8];
        file.read_exact_at(&mut first, 0).unwrap();
        assert_eq!(&first, &name.as_bytes()[..8]);
    }
    // Another file gets the name.
    let path = rig.path("named/a.img");
    fs::rename(rig.write("named/new"), &path).unwrap();
    let (_, file) = rig.image(&path, true);
    assert_eq!(File::from(file.unwrap()).metadata().unwrap().ino(), fs::metadata(&path).unwrap().ino());
    assert_eq!(rig.image(&rig.path("named/b.img"), true).0, errno(Errno::PERM));
    assert_eq!(rig.image(&rig.write("named/other"), false).0, errno(Errno::PERM));
    assert_eq!(rig.end(), End::Closed);
}

#[test]
fn an_image_is_a_file_in_a_root() {
    let rig = rig(Calls::Nothing);
    let path = rig.enter_image("named/a.img", true, false);
    let secret = rig.write("elsewhere/secret").canonicalize().unwrap();
    let refused = |reply| assert_eq!(reply, Reply::Outside { grant: 0, path: secret.clone() });
    symlink(&secret, &path).unwrap();
    refused(rig.image(&path, true).0);
    refused(rig.ask(Request::Status { path: path.clone() }).0);
    assert_eq!(fs::read(&secret).unwrap().len(), 16 * 512);
    // A link that stays in a root.
    fs::remove_file(&path).unwrap();
    symlink(rig.write("named/real"), &path).unwrap();
    assert!(rig.image(&path, true).1.is_some());
    // A pipe is not opened, so that no wait for its other end begins.
    fs::remove_file(&path).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(matches!(rig.ask(Request::Status { path: path.clone() }).0, Reply::Status { .. }));
    assert_eq!(rig.image(&path, true).0, errno(Errno::PERM));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(rig.image(&path, false).0, errno(Errno::PERM));
}

#[test]
fn backing_images_are_read_beside_their_image() {
    let rig = rig(Calls::Nothing);
    let image = rig.enter_image("named/c.img", true, true);
    let bases = ["named/base", "called/base", "elsewhere/base"].map(|name| rig.write(name));
    let outside = |nth: usize| Reply::Outside { grant: 0, path: bases[nth].canonicalize().unwrap() };
    // The image is not open yet, so its directory is not known.
    assert_eq!(rig.image(&bases[0], false).0, outside(0));
    rig.write("named/c.img");
    assert!(rig.image(&image, true).1.is_some());
    for base in &bases[..2] {
        assert!(rig.image(base, false).1.is_some(), "{}", base.display());
        assert!(matches!(rig.ask(Request::Status { path: base.clone() }).0, Reply::Status { .. }));
        assert_eq!(rig.image(base, true).0, errno(Errno::PERM));
    }
    assert_eq!(rig.image(&bases[2], false).0, outside(2));
    let through_parent = rig.path("named/../elsewhere/base");
    assert_eq!(rig.image(&through_parent, false).0, outside(2));
    symlink(&bases[2], rig.path("named/link")).unwrap();
    assert_eq!(rig.image(&rig.path("named/link"), false).0, outside(2));
}

#[test]
fn backing_images_of_a_descriptor_are_below_the_roots_for_calls() {
    let rig = rig(Calls::Files);
    let [named, called] = ["named/base", "called/base"].map(|name| rig.write(name));
    assert_eq!(rig.image(&called, false).0, errno(Errno::PERM));
    assert_eq!(rig.enter(9, vec![Target::Backing]), Reply::Done {});
    assert!(rig.image(&called, false).1.is_some());
    assert_eq!(rig.image(&called, true).0, errno(Errno::PERM));
    let outside = Reply::Outside { grant: 0, path: named.canonicalize().unwrap() };
    assert_eq!(rig.image(&named, false).0, outside);
}

#[test]
fn calls_name_files_below_their_roots() {
    let rig = rig(Calls::Files);
    let image = |name: &str| vec![Target::Image { path: rig.path(name), writes: true, chain: false }];
    let outside =
        |name: &str| Reply::Outside { grant: 0, path: rig.dir.path().canonicalize().unwrap().join(name) };
    assert_eq!(rig.enter(9, image("called/later/a.img")), Reply::Done {});
    for name in ["named/a2.img", "none/a"] {
        assert_eq!(rig.enter(10, image(name)), outside(name));
    }
    assert_eq!(rig.enter(10, image("called/../elsewhere/a")), outside("elsewhere/a"));
    // It is not known which directory this is.
    let unclear = "called/none/../../elsewhere/a";
    assert_eq!(rig.enter(10, image(unclear)), Reply::Outside { grant: 0, path: rig.path(unclear) });
    symlink(rig.path("elsewhere"), rig.path("called/link")).unwrap();
    assert_eq!(rig.enter(10, image("called/link/a")), outside("elsewhere/a"));
    let socket = |name: &str| Target::Socket { path: rig.path(name), mode: None, group: None };
    assert_eq!(
        rig.enter(10, vec![socket("called/s"), socket("elsewhere/s")]),
        match outside("elsewhere/s") {
            Reply::Outside { path, .. } => Reply::Outside { grant: 1, path },
            other => other,
        }
    );
    assert_eq!(rig.enter(10, vec![socket("called/s")]), Reply::Done {});
    let tap = vec![socket("called/s"), Target::Tap { name: "vm1".into() }];
    assert_eq!(rig.enter(10, tap), Reply::Refused { grant: 1, reason: NOT_NAMED, text: String::new() });
    // The entry is as it was.
    assert_eq!(rig.ask(Request::CheckSocket { path: rig.path("called/s") }).0, Reply::Done {});
    rig.ask(Request::Leave { entry: 10 });
    assert_eq!(rig.ask(Request::CheckSocket { path: rig.path("called/s") }).0, errno(Errno::PERM));
    // A directory that leaves the root after it was entered.
    fs::create_dir(rig.path("called/later")).unwrap();
    rig.write("called/later/a.img");
    assert!(rig.image(&rig.path("called/later/a.img"), true).1.is_some());
    fs::remove_dir_all(rig.path("called/later")).unwrap();
    symlink(rig.path("elsewhere"), rig.path("called/later")).unwrap();
    rig.write("elsewhere/a.img");
    assert_eq!(rig.image(&rig.path("called/later/a.img"), true).0, outside("elsewhere/a.img"));
}

#[test]
fn a_file_is_opened_again_with_no_more_rights() {
    let rig = rig(Calls::Nothing);
    let path = rig.write("elsewhere/a");
    let [read, both] =
        [false, true].map(|writes| file_here(&path, FileUse::Image { writes, is_direct: false }).unwrap());
    // It has no name any more.
    fs::remove_file(&path).unwrap();
    for (file, writes, is_open) in
        [(&read, false, true), (&both, false, true), (&both, true, true), (&read, true, false)]
    {
        let (reply, again) = rig.reopen(file.as_fd(), writes);
        assert_eq!(again.is_some(), is_open, "{reply:?}");
        let mode = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        assert!(again.is_none_or(|again| fcntl_getfl(again).unwrap() & OFlags::ACCMODE == mode));
        assert!(is_open || reply == errno(Errno::PERM));
    }
    let write_only = fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path).unwrap();
    let named = crate::name::name_here(&path).unwrap();
    let directory = File::open(rig.path("named")).unwrap();
    let device = File::open("/dev/null").unwrap();
    for file in [&write_only, &named, &directory, &device] {
        assert_eq!(rig.reopen(file.as_fd(), false).0, errno(Errno::PERM), "{file:?}");
    }
}

#[test]
fn sockets_are_made_and_removed() {
    let rig = rig(Calls::Nothing);
    let path = rig.path("named/socket");
    let listen = |wait_ms| rig.ask(Request::Listen { path: path.clone(), wait_ms });
    assert_eq!(listen(0).0, errno(Errno::PERM));
    assert_eq!(
        rig.enter(9, vec![Target::Socket { path: path.clone(), mode: Some(0o640), group: None }]),
        Reply::Done {}
    );
    assert_eq!(rig.ask(Request::CheckSocket { path: path.clone() }).0, Reply::Done {});
    let (reply, socket) = listen(0);
    let Reply::Listening { device, inode, was_locked: false, .. } = reply else { panic!("{reply:?}") };
    let listener = UnixListener::from(socket.unwrap());
    let status = fs::metadata(&path).unwrap();
    assert_eq!((status.dev(), status.ino(), status.mode() & 0o7777), (device, inode, 0o640));
    let _client = std::os::unix::net::UnixStream::connect(&path).unwrap();
    listener.accept().unwrap();
    // The same sentence as without a server.
    let own = HostAddress::of(&path, None, None, &|_| Ok(())).check().unwrap_err();
    for (reply, _) in [listen(0), rig.ask(Request::CheckSocket { path: path.clone() })] {
        let Reply::Socket { option, problem, number, text } = reply else { panic!("{reply:?}") };
        let parts = Parts { option, problem, number, text };
        assert_eq!(parts, own.to_parts());
        assert!(SocketError::from_parts(parts, &path).is_some());
    }
    let unlink = |inode| rig.ask(Request::Unlink { path: path.clone(), device, inode }).0;
    assert_eq!((unlink(inode + 1), path.exists()), (Errno::NOENT.into(), true));
    assert_eq!((unlink(inode), path.exists()), (Reply::Done {}, false));
    // Another file of this name is none to remove.
    fs::write(&path, "precious").unwrap();
    assert_eq!(unlink(fs::metadata(&path).unwrap().ino()), Errno::NOENT.into());
    fs::remove_file(&path).unwrap();
    assert!(matches!(listen(0).0, Reply::Listening { was_locked: false, .. }));
    assert_eq!(
        rig.ask(Request::RealPath { path: path.clone() }).0,
        Reply::Path { path: path.canonicalize().unwrap() }
    );
    // The control sockets are there from the start.
    let (reply, control) = rig.ask(Request::Listen { path: rig.path("named/control"), wait_ms: 0 });
    assert!(matches!(reply, Reply::Listening { .. }) && control.is_some());
    assert_eq!(fs::metadata(rig.path("named/control")).unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn a_socket_is_in_a_root() {
    let rig = rig(Calls::Files);
    let (path, moved) = (rig.path("called/dir/s"), rig.path("called/dir"));
    fs::create_dir(&moved).unwrap();
    let targets = vec![
        Target::Socket { path: path.clone(), mode: None, group: Some("0".into()) },
        Target::Capture { path: path.with_file_name("c") },
    ];
    assert_eq!(rig.enter(9, targets), Reply::Done {});
    fs::remove_dir(&moved).unwrap();
    symlink(rig.path("elsewhere"), &moved).unwrap();
    let real = rig.path("elsewhere").canonicalize().unwrap();
    for request in
        [Request::CheckSocket { path: path.clone() }, Request::Listen { path: path.clone(), wait_ms: 0 }]
    {
        let Reply::Socket { problem, text, .. } = rig.ask(request).0 else { panic!() };
        assert_eq!((problem, text), (11, real.join("s").display().to_string()));
    }
    assert_eq!(
        rig.ask(Request::Capture { path: path.with_file_name("c") }).0,
        Reply::Outside { grant: 0, path: real.join("c") }
    );
    // The socket of another program there is not removed, even if the request knows it.
    let _other = UnixListener::bind(rig.path("elsewhere/s")).unwrap();
    let status = fs::metadata(rig.path("elsewhere/s")).unwrap();
    let unlink = Request::Unlink { path, device: status.dev(), inode: status.ino() };
    assert_eq!(rig.ask(unlink).0, Reply::Outside { grant: 0, path: real.join("s") });
    assert_eq!(fs::read_dir(real).unwrap().count(), 1);
}

#[test]
fn captures_connections_and_facts() {
    let rig = rig(Calls::Nothing);
    let targets = vec![
        Target::Capture { path: rig.path("named/capture") },
        Target::Unix { path: rig.path("named/peer") },
        Target::Tcp { host: "127.0.0.1".into(), port: 1 },
    ];
    assert_eq!(rig.enter(9, targets), Reply::Done {});
    let capture = || rig.ask(Request::Capture { path: rig.path("named/capture") });
    let made = File::from(capture().1.unwrap());
    let own = file_here(&rig.path("named/capture"), FileUse::Capture).unwrap();
    assert_eq!(fcntl_getfl(&made).unwrap(), fcntl_getfl(&own).unwrap());
    assert_eq!(
        (made.metadata().unwrap().mode() & 0o7777, made.metadata().unwrap().ino()),
        (0o600, own.metadata().unwrap().ino())
    );
    fs::remove_file(rig.path("named/capture")).unwrap();
    symlink(rig.write("named/precious"), rig.path("named/capture")).unwrap();
    assert_eq!(capture().0, errno(Errno::LOOP));

    let connect = || rig.ask(Request::ConnectUnix { path: rig.path("named/peer") });
    assert_eq!(explained(connect().0), Some(Errno::NOENT));
    let listener = UnixListener::bind(rig.path("named/peer")).unwrap();
    let connected = connect().1.unwrap();
    assert!(fcntl_getfl(connected).unwrap().contains(OFlags::NONBLOCK));
    listener.accept().unwrap();

    let address = "127.0.0.1:1".parse().unwrap();
    assert_eq!(rig.ask(Request::ConnectTcp { address }).0, errno(Errno::PERM));
    let resolve = rig.ask(Request::Resolve { host: "127.0.0.1".into(), port: 1 }).0;
    assert_eq!(resolve, Reply::Addresses { addresses: vec![address] });
    let (reply, socket) = rig.ask(Request::ConnectTcp { address });
    // Nothing listens on this port, and the kernel may say so later.
    assert!(socket.is_some() || reply == errno(Errno::CONNREFUSED), "{reply:?}");

    let null = fs::metadata("/dev/null").unwrap().rdev();
    let subsystem = rig.client.ask(&Request::CharSubsystem { device: null });
    let text = |answer: io::Result<Answer>| match answer {
        Ok((Reply::Text { text }, _)) => Ok(text),
        other => Err(other.map(|_| ()).map_err(|error| error.raw_os_error())),
    };
    let own = char_subsystem_here(null).map_err(|error| Err(error.raw_os_error()));
    assert_eq!(text(subsystem), own);
    assert_eq!(rig.ask(Request::BlockFacts { device: 0 }).0, Reply::Block { facts: block_facts_here(0) });
    // No TAP has this name, and each reason is passed on.
    assert_eq!(rig.enter(9, vec![Target::Tap { name: "lo".into() }]), Reply::Done {});
    let own = tap_here("lo", libc::IFF_TAP).unwrap_err();
    assert_eq!(rig.ask(Request::Tap { name: "lo".into(), flags: libc::IFF_TAP }).0, own.to_reply());
    // There is no launcher.
    assert_eq!(rig.ask(Request::FindPasst {}).0, errno(Errno::PERM));
    assert_eq!(rig.ask(Request::Group { name: "disk".into() }).0, errno(Errno::PERM));
}

#[test]
fn the_configuration_file_is_text_that_nothing_changes() {
    let rig = rig(Calls::Nothing);
    let read = || without_refusal(rig.ask(Request::ReadConfig {}));
    let tap = || rig.enter(9, vec![Target::Tap { name: "of-file".into() }]);
    assert_eq!(read().unwrap_err().kind(), io::ErrorKind::NotFound);
    for (text, is_known) in [("broken", false), ("valid", true), ("broken again", true)] {
        fs::write(rig.path("named/config"), text).unwrap();
        let mut file = File::from(read().unwrap().1.unwrap());
        let mut found = String::new();
        file.read_to_string(&mut found).unwrap();
        assert_eq!(found, text);
        assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
        assert_eq!(tap() == Reply::Done {}, is_known, "{text}");
    }
}

#[test]
fn nothing_else_opens_or_makes_the_configuration_file() {
    let rig = rig(Calls::Files);
    let config = rig.path("named/config");
    let entered = |target| assert_eq!(rig.enter(rig.client.number(), vec![target]), Reply::Done {});
    // The operator named the capture so, and calls can name files beside the link to the file.
    let link = rig.path("called/link");
    fs::write(&config, "valid").unwrap();
    fs::hard_link(&config, &link).unwrap();
    entered(Target::Image { path: link.clone(), writes: true, chain: true });
    entered(Target::Capture { path: link.clone() });
    let refused = [
        Request::Image { path: link.clone(), writes: true, is_direct: false },
        Request::Image { path: link.clone(), writes: false, is_direct: false },
        Request::Image { path: config.clone(), writes: false, is_direct: false },
        Request::Capture { path: link.clone() },
    ];
    for request in refused {
        assert!(rig.ask(request.clone()).1.is_none(), "{request:?}");
    }
    // While it is away, nothing makes it.
    fs::remove_file(&config).unwrap();
    fs::rename(rig.path("called"), rig.path("away")).unwrap();
    symlink(rig.path("named"), rig.path("called")).unwrap();
    entered(Target::Capture { path: rig.path("named/capture") });
    assert_eq!(rig.ask(Request::Capture { path: rig.path("called/config") }).0, errno(Errno::PERM));
    assert!(!config.exists());
}

#[test]
fn a_capture_is_no_device() {
    let rig = rig(Calls::Files);
    let path = rig.path("called/device");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    if mknodat(CWD, &path, FileType::CharacterDevice, mode, makedev(1, 3)).is_err() {
        println!("skipped: this user may make no device");
        return;
    }
    assert_eq!(rig.enter(9, vec![Target::Capture { path: path.clone() }]), Reply::Done {});
    assert_eq!(rig.ask(Request::Capture { path }).0, errno(Errno::PERM));
}

#[test]
fn calls_connect_to_sockets_below_a_root() {
    let rig = rig(Calls::All);
    let _other = UnixListener::bind(rig.path("elsewhere/s")).unwrap();
    let _listener = UnixListener::bind(rig.path("called/s")).unwrap();
    symlink(rig.path("elsewhere/s"), rig.path("called/link")).unwrap();
    let unix = |name: &str| vec![Target::Unix { path: rig.path(name) }];
    let connect = |name: &str| rig.ask(Request::ConnectUnix { path: rig.path(name) });
    assert!(matches!(rig.enter(9, unix("elsewhere/s")), Reply::Outside { grant: 0, .. }));
    assert_eq!(rig.enter(9, unix("called/s")), Reply::Done {});
    assert!(connect("called/s").1.is_some());
    assert_eq!(rig.enter(9, unix("called/link")), Reply::Done {});
    assert!(matches!(connect("called/link").0, Reply::Outside { .. }));
}

/// A lock on a directory makes requests wait, as a file system that does not answer does.
#[test]
fn requests_that_wait_hold_the_share_of_their_entry() {
    let rig = rig(Calls::Files);
    let (path, other) = (rig.path("called/s"), rig.path("named/a.img"));
    assert_eq!(
        rig.enter(9, vec![Target::Socket { path: path.clone(), mode: None, group: None }]),
        Reply::Done {}
    );
    rig.enter_image("named/a.img", true, false);
    rig.write("named/a.img");
    let directory = File::open(rig.path("called")).unwrap();
    flock(&directory, FlockOperation::LockExclusive).unwrap();
    let listen = || loop {
        // A look at the socket, below, can have the last place of the share for a moment.
        let answer = rig.ask(Request::Listen { path: path.clone(), wait_ms: 5000 });
        if answer.0 != errno(Errno::AGAIN) {
            return answer;
        }
    };
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..16).map(|_| scope.spawn(listen)).collect();
        // Each of them is carried out, and another one is refused at once.
        while rig.ask(Request::CheckSocket { path: path.clone() }).0 != errno(Errno::AGAIN) {
            assert!(waiting.iter().all(|thread| !thread.is_finished()));
            thread::sleep(Duration::from_millis(1));
        }
        assert!(waiting.iter().all(|thread| !thread.is_finished()));
        assert!(rig.image(&other, true).1.is_some());
        flock(&directory, FlockOperation::Unlock).unwrap();
        let answers: Vec<_> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        // The socket is in use.
        let is_made = |answer: &&Answer| matches!(answer.0, Reply::Listening { .. });
        assert_eq!(answers.iter().filter(is_made).count(), 1);
    });
    assert_eq!(rig.end(), End::Closed);
}

#[test]
fn a_directory_that_stays_locked_is_told() {
    let rig = rig(Calls::Files);
    let (path, _directory) = rig.enter_socket_in_locked_directory();
    let (reply, _socket) = rig.ask(Request::Listen { path, wait_ms: 1 });
    assert!(matches!(reply, Reply::Listening { was_locked: true, .. }), "{reply:?}");
}

#[test]
fn a_message_that_is_no_request_ends_all() {
    let request = |id: u64, request: &Request| wire::write(id, request, REQUEST_BYTES_MAX).unwrap();
    let facts = request(1, &Request::BlockFacts { device: 0 });
    let reopen = request(1, &Request::Reopen { writes: false, is_direct: false });
    let null = File::open("/dev/null").unwrap();
    let cases: [(Vec<u8>, Option<&File>); 7] = [
        (facts[..facts.len() - 1].to_vec(), None),
        ([&facts[..], &[0]].concat(), None),
        (vec![0; 16], None),
        (vec![3; 40 << 10], None),
        ([&1_u64.to_le_bytes()[..], &[3, 255, 255], b"/a"].concat(), None),
        (facts, Some(&null)),
        (reopen, None),
    ];
    for (bytes, fd) in cases {
        let (ours, theirs) = socket_pair().unwrap();
        let server = thread::spawn(|| serve(theirs, nothing_named(), None, None).unwrap());
        message::send(&ours, &bytes, fd.map(AsFd::as_fd)).unwrap();
        assert_eq!(server.join().unwrap(), End::Malformed, "{} bytes", bytes.len());
        assert_eq!(message::receive(&ours, &mut [0; 9]).unwrap().len, 0);
    }
}

#[test]
fn a_number_in_use_ends_all() {
    let mut rig = rig(Calls::Files);
    let (path, _directory) = rig.enter_socket_in_locked_directory();
    let bytes = wire::write(1 << 40, &Request::Listen { path, wait_ms: 5000 }, REQUEST_BYTES_MAX).unwrap();
    let socket = rig.client.socket();
    message::send(socket, &bytes, None).unwrap();
    message::send(socket, &bytes, None).unwrap();
    assert_eq!(rig.server.take().unwrap().join().unwrap(), End::Malformed);
}

#[test]
fn the_end_of_the_launcher_ends_all() {
    let ((_ours, theirs), (launcher, of_launcher)) = (socket_pair().unwrap(), socket_pair().unwrap());
    let server = thread::spawn(|| serve(theirs, nothing_named(), Some(launcher), None).unwrap());
    drop(of_launcher);
    let end = server.join().unwrap();
    assert_eq!((end, end.status()), (End::LauncherGone, 3));
}
