//! Asks for everything through an opener and a launcher in processes of their own. They are this program too,
//! with their sockets as standard input and output.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use std::env;
use std::fs::{self, File};
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kickless_opener::{
    Address, Authority, Calls, Config, ConfigFile, Grant, Listener, LookUp, PathUse, Reason, Root,
    StartedPasst, Target, begin_tcp, capture, char_subsystem, config_file, connect, enter, has_passt, image,
    launch, real_path, reopen, resolve, serve, socket_pair, start_passt, status, use_opener,
};
use rustix::process::Pid;
use tempfile::TempDir;

/// The variable that makes this program a helper, and the directory of a helper.
const ROLE: &str = "KICKLESS_OPENER_TEST_ROLE";
const DIRECTORY: &str = "KICKLESS_OPENER_TEST_DIRECTORY";

fn main() {
    let role = env::var(ROLE).unwrap_or_default();
    let directory = || PathBuf::from(env::var_os(DIRECTORY).unwrap());
    let input = || std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let output = || std::io::stdout().as_fd().try_clone_to_owned().unwrap();
    match role.split_once(' ') {
        Some(("look-up", name)) => look_up(name, &input()),
        _ if role == "launcher" => std::process::exit(launch(input(), &start_look_up).status()),
        _ if role == "opener" => std::process::exit(open_files(input(), output(), &directory())),
        _ => test(),
    }
}

fn start_look_up(name: LookUp, pipe: OwnedFd, _: BorrowedFd<'_>) -> std::io::Result<Pid> {
    let name = match name {
        LookUp::Host { host, port } => format!("look-up host {port} {host}"),
        LookUp::Group { name } => format!("look-up group 0 {name}"),
    };
    let mut command = Command::new(env::current_exe()?);
    let child = command.env(ROLE, name).stdin(Stdio::from(pipe)).stdout(Stdio::null()).spawn()?;
    Ok(Pid::from_child(&child))
}

fn look_up(name: &str, pipe: &OwnedFd) {
    let mut words = name.splitn(3, ' ');
    let (kind, port, name) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    match kind {
        "host" => LookUp::Host { host: name.into(), port: port.parse().unwrap() }.run(pipe),
        _ => LookUp::Group { name: name.into() }.run(pipe),
    }
}

/// The process that opens files below a directory.
fn open_files(socket: OwnedFd, launcher: OwnedFd, directory: &Path) -> i32 {
    let path = directory.join("config");
    let of_reader = path.clone();
    let read = move || {
        let text = fs::read(&of_reader)?;
        let named = Some(vec![Target::Passt { arguments: vec!["--pcap=named".into()] }]);
        Ok(ConfigFile { text, named })
    };
    let authority = Authority {
        named: Vec::new(),
        control: vec![Target::Socket { path: directory.join("control"), mode: Some(0o660), group: None }],
        roots: vec![Root {
            directory: directory.to_owned(),
            uses: vec![PathUse::Image, PathUse::Socket, PathUse::Capture],
            for_calls: true,
        }],
        calls: Calls::All,
        libraries: Vec::new(),
    };
    serve(socket, authority, Some(launcher), Some(Config { path, read: Box::new(read) })).unwrap().status()
}

fn helper(role: &str, directory: &Path, input: OwnedFd, output: Stdio) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .env(ROLE, role)
        .env(DIRECTORY, directory)
        .stdin(Stdio::from(input))
        .stdout(output)
        .spawn()
        .unwrap()
}

fn test() {
    let dir = TempDir::new().unwrap();
    let directory = dir.path().canonicalize().unwrap();
    let ((ours, of_opener), (to_launcher, of_launcher)) = (socket_pair().unwrap(), socket_pair().unwrap());
    let mut launcher = helper("launcher", &directory, of_launcher, Stdio::null());
    let mut opener = helper("opener", &directory, of_opener, Stdio::from(to_launcher));
    let (ended, end) = mpsc::channel();
    use_opener(ours, move || ended.send(()).unwrap()).unwrap();
    images(&directory);
    println!("images: ok");
    sockets(&directory);
    println!("sockets: ok");
    connections(&directory);
    println!("connections: ok");
    programs();
    println!("programs: ok");
    speed(&directory);

    // The opener ends with the launcher, and all calls with the opener.
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_eq!(opener.wait().unwrap().code(), Some(3));
    end.recv().unwrap();
    assert!(status(&directory.join("a")).is_err());
    println!("ends: ok");
}

fn grant(option: &'static str, to: Target) -> Grant {
    Grant { option, to }
}

fn images(directory: &Path) {
    let path = directory.join("image");
    fs::write(&path, [7; 4096]).unwrap();
    assert!(image(&path, true, false).is_err());
    let target = Target::Image { path: path.clone(), writes: true, chain: false };
    let entry = enter(&[grant("blk-file", target.clone())]).unwrap();
    let opened = image(&path, true, false).unwrap();
    let status = status(&path).unwrap();
    let own = fs::metadata(&path).unwrap();
    assert_eq!((status.device, status.inode, status.size), (own.dev(), own.ino(), 4096));
    let same = |file: &File| assert_eq!(file.metadata().unwrap().ino(), status.inode);
    same(&opened.file);
    same(&reopen(opened.file.as_fd(), false, false).unwrap().file);
    let outside = Target::Image { path: "/proc/self/exe".into(), writes: false, chain: false };
    let refused = enter(&[grant("socket-path", target), grant("blk-file", outside)]).unwrap_err();
    assert_eq!(refused.option, "blk-file");
    assert!(refused.to_string().ends_with("or one above it"), "{refused}");
    drop(entry);
    assert!(image(&path, true, false).is_err());
    assert!(enter(&[]).is_ok());

    let mut entry = enter(&[grant("tap", Target::Tap { name: "none".into() })]).unwrap();
    let path = directory.join("capture");
    assert!(capture(&path).is_err());
    entry.replace(&[grant("capture", Target::Capture { path: path.clone() })]).unwrap();
    assert!(capture(&path).is_ok());
    assert!(matches!(char_subsystem(0).map_err(|error| error.raw_os_error()), Err(Some(_))));

    assert!(config_file().unwrap().is_err());
    fs::write(directory.join("config"), "text").unwrap();
    let mut text = String::new();
    config_file().unwrap().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "text");
}

fn sockets(directory: &Path) {
    let path = directory.join("control");
    let control = Listener::bind(&path, 0o660).unwrap();
    assert!(path.exists() && control.socket().local_addr().unwrap().as_pathname() == Some(&path));
    drop(control);
    assert!(!path.exists());

    let path = directory.join("socket");
    let target = |group: &str| Target::Socket { path: path.clone(), mode: None, group: Some(group.into()) };
    let mut entry = enter(&[grant("socket-path", target("root"))]).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    let address = Address::new(&path, None, Some("root")).unwrap();
    let listener = address.listen(Instant::now());
    assert_eq!(listener.is_ok(), is_root || fs::metadata(directory).unwrap().gid() == 0);
    if listener.is_ok() {
        assert_eq!(fs::metadata(&path).unwrap().gid(), 0);
        let refused = Address::new(&path, None, Some("root")).unwrap_err();
        let why = std::error::Error::source(&refused).unwrap().to_string();
        assert!(why.starts_with("another process is listening there"), "{why}");
    }
    drop(listener);
    entry.replace(&[grant("socket-path", target("no such group"))]).unwrap();
    let refused = Address::new(&path, None, Some("no such group")).unwrap_err();
    assert_eq!(
        (refused.option, refused.to_string().as_str()),
        ("socket-group", "there is no group no such group: name one of /etc/group, or give its number")
    );
    let spelled = directory.join("../").join(directory.file_name().unwrap()).join("s");
    entry
        .replace(&[grant("socket-path", Target::Socket { path: spelled.clone(), mode: None, group: None })])
        .unwrap();
    assert_eq!(real_path(&spelled), directory.join("s"));
}

fn connections(directory: &Path) {
    let (path, listener) = (directory.join("peer"), TcpListener::bind("127.0.0.1:0").unwrap());
    let port = listener.local_addr().unwrap().port();
    let tcp = |host: &str, port| grant("blk-file", Target::Tcp { host: host.into(), port });
    let grants = [
        tcp("localhost", port),
        tcp("no.such.host.invalid", 1),
        grant("port", Target::Unix { path: path.clone() }),
    ];
    let _entry = enter(&grants).unwrap();
    let _peer = UnixListener::bind(&path).unwrap();
    connect(&path).unwrap();
    let found = resolve("localhost", port).unwrap();
    let here = found.iter().find(|address| address.is_ipv4()).unwrap();
    begin_tcp(*here).unwrap();
    listener.accept().unwrap();
    assert!(begin_tcp(([127, 0, 0, 1], 1).into()).is_err());
    // The sentence is that of the C library.
    let unknown = resolve("no.such.host.invalid", 1).unwrap_err().to_string();
    assert!(unknown.starts_with("failed to lookup address information"), "{unknown}");
}

fn programs() {
    let passt = |argument: &str| grant("port", Target::Passt { arguments: vec![argument.into()] });
    assert!(matches!(enter(&[passt("--log-file=/l")]).unwrap_err().reason, Reason::PasstOption));
    // The configuration file names it.
    enter(&[passt("--pcap=named")]).unwrap();
    let _entry = enter(&[passt("-4")]).unwrap();
    let start = || start_passt(&["-4".into()]);
    if !has_passt() {
        println!("passt is not installed");
        assert_eq!(start().unwrap_err().kind(), std::io::ErrorKind::NotFound);
        return;
    }
    // It ends with its socket.
    let StartedPasst { process, socket, errors } = start().unwrap();
    assert!(process.id() > 0);
    drop(socket);
    assert!(process.end(Duration::from_secs(5)).is_some());
    // No other process has the other end of the pipe.
    fs::File::from(errors).read_to_end(&mut Vec::new()).unwrap();
    // Without that it is killed.
    let StartedPasst { process, socket: _socket, errors: _errors } = start().unwrap();
    assert!(process.end(Duration::from_millis(1)).is_none());
    drop(start().unwrap());
    assert!(start_passt(&["--pcap=named".into()]).is_err());
}

/// Prints the time of a request with a descriptor.
fn speed(directory: &Path) {
    const ROUNDS: u32 = 1000;
    let path = directory.join("image");
    let target = Target::Image { path: path.clone(), writes: true, chain: false };
    let _entry = enter(&[grant("blk-file", target)]).unwrap();
    let start = Instant::now();
    (0..ROUNDS).for_each(|_| drop(image(&path, true, false).unwrap()));
    println!("an image is opened in {:?}", start.elapsed() / ROUNDS);
}
