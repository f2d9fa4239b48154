//! Clients that send descriptors whose close waits, and clients that send too many.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use common::{Rig, answer, call, is_closed};
use kickless_control::{Client, DESCRIPTORS_MAX};
use kickless_testing::{Resources, eventually};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

/// The time for which the close of a socket waits here.
const LINGER: Duration = Duration::from_secs(120);
/// A daemon that answers within this time does not wait for a close.
const PROMPT: Duration = Duration::from_secs(60);

/// Connections with unsent data, whose close waits until their other ends are closed.
struct Lingering {
    listener: TcpListener,
    /// They are never read.
    peers: Vec<TcpStream>,
}

impl Lingering {
    fn new() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").unwrap(), peers: Vec::new() }
    }

    fn connect(&mut self) -> TcpStream {
        let mut socket = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        self.peers.push(self.listener.accept().unwrap().0);
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        sockopt::set_socket_linger(&socket, Some(LINGER)).unwrap();
        socket
    }
}

/// Closes a socket whose last descriptor this may be.
fn close_apart(socket: TcpStream) {
    thread::spawn(move || drop(socket));
}

fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// The other clients are served.
fn serves(rig: &Rig, clients: &mut [Client]) {
    for client in clients {
        call(client, "daemon.info", json!({})).unwrap();
    }
    let since = Instant::now();
    let mut client = rig.client();
    call(&mut client, "device.add", rig.toy("other")).unwrap();
    call(&mut client, "device.remove", json!({ "name": "other" })).unwrap();
    assert!(since.elapsed() < PROMPT);
}

/// Returns what the process holds after a device has come and gone, and the workers have what they open once.
fn settled(rig: &Rig) -> Resources {
    serves(rig, &mut []);
    Resources::now()
}

#[test]
fn hostile_descriptors() {
    closes_that_wait_stop_no_other_client();
    the_end_does_not_wait_for_clients_that_are_not_accepted();
    clients_share_a_budget();
}

fn closes_that_wait_stop_no_other_client() {
    let rig = Rig::new();
    let before = settled(&rig);
    let read_only = || Client::connect(&rig.path("read-only.sock")).unwrap();
    let mut clients = [rig.client(), read_only()];
    let mut lingering = Lingering::new();
    serves(&rig, &mut clients);
    let add = json!({ "name": "a", "socket-path": rig.path("a"), "toy": "car" });
    let add = json!({ "jsonrpc": "2.0", "id": 1, "method": "device.add", "params": add, "fds": ["a"] });
    let list = json!({ "jsonrpc": "2.0", "id": 1, "method": "device.list", "fds": ["a"] });
    // A line that names none, one whose call refuses them, a call that waits and refuses them, half a line.
    for text in [" \n".to_owned(), format!("{list}\n"), format!("{add}\n"), "{".to_owned()] {
        let (mut stream, socket) = (rig.stream(), lingering.connect());
        let (begin, rest) = text.split_at(1);
        send(&stream, begin.as_bytes(), &[socket.as_fd()]).unwrap();
        // The daemon has the last descriptor now.
        drop(socket);
        stream.write_all(rest.as_bytes()).unwrap();
        serves(&rig, &mut clients);
        drop(stream);
        serves(&rig, &mut clients);
    }
    // More than a line can have.
    let (stream, socket) = (rig.stream(), lingering.connect());
    let file = File::open("/dev/null").unwrap();
    send(&stream, b"{", &[socket.as_fd()]).unwrap();
    drop(socket);
    send(&stream, b"{", &[file.as_fd(); DESCRIPTORS_MAX]).unwrap();
    is_closed(&stream);
    drop((stream, file));
    serves(&rig, &mut clients);
    // Sent and not read, before the daemon refuses the line: the close of the connection closes them.
    let (mut stream, socket) = (rig.stream(), lingering.connect());
    let _ = stream.write_all(&[b'a'; 1 << 17]);
    let _ = send(&stream, b"a", &[socket.as_fd()]);
    close_apart(socket);
    is_closed(&stream);
    drop(stream);
    serves(&rig, &mut clients);
    // The read-only socket refuses them since Linux 6.16. Before, the kernel closes them in a read.
    let (stream, socket) = (UnixStream::connect(rig.path("read-only.sock")).unwrap(), lingering.connect());
    let sent = send(&stream, b"\n", &[socket.as_fd()]);
    assert!(sent == Ok(1) || sent == Err(Errno::PERM), "{sent:?}");
    close_apart(socket);
    serves(&rig, &mut clients);
    drop((stream, clients));
    // With their peers, the sockets have nothing more to send.
    drop(lingering);
    before.wait_until_back();
}

fn the_end_does_not_wait_for_clients_that_are_not_accepted() {
    let before = Resources::now();
    let mut rig = Rig::new();
    let mut lingering = Lingering::new();
    for _ in 0..4 {
        let (stream, socket) = (rig.stream(), lingering.connect());
        send(&stream, b"\n", &[socket.as_fd()]).unwrap();
        close_apart(socket);
    }
    let since = Instant::now();
    rig.end_server();
    assert!(since.elapsed() < PROMPT);
    assert!(!rig.path("control.sock").exists());
    drop((rig, lingering));
    before.wait_until_back();
}

fn clients_share_a_budget() {
    let limit = getrlimit(Resource::Nofile);
    // A quarter is for the descriptors of clients: those of eight whole lines.
    let of_clients = 8 * DESCRIPTORS_MAX;
    let current = Some(4 * of_clients as u64);
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let rig = Rig::new();
    setrlimit(Resource::Nofile, limit).unwrap();
    let before = settled(&rig);
    let file = File::open("/dev/null").unwrap();
    let all = [file.as_fd(); DESCRIPTORS_MAX];
    let mut clients = [rig.client()];
    let mut holding = Vec::new();
    for held in 1..=of_clients / DESCRIPTORS_MAX {
        let stream = rig.stream();
        send(&stream, b"{", &all).unwrap();
        holding.push(stream);
        // The daemon installs those of a message at once.
        let all_held = before.descriptors + held * DESCRIPTORS_MAX;
        eventually("they are held", || Resources::now().descriptors >= all_held);
    }
    // One more gets a sentence, and the others are served.
    let stream = rig.stream();
    send(&stream, b"{\n", &all[..1]).unwrap();
    serves(&rig, &mut clients);
    let refused = answer(&stream);
    assert_eq!(refused["error"]["code"], -32002, "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("all clients together can have 1024"), "{message}");
    is_closed(&stream);
    drop(stream);
    // There is room again when one has left.
    holding.pop();
    let stream = rig.stream();
    send(&stream, b"nothing\n", &all[..1]).unwrap();
    assert!(answer(&stream)["error"]["message"].as_str().unwrap().starts_with("no JSON"));
    drop((holding, stream, clients, file));
    before.wait_until_back();
}
