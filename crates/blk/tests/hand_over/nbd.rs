//! Disks of NBD servers: the connection passes.

use crate::common::{OPTIONS, Pair};
use crate::rig::{Rig, TestRequest};
use kickless_device::{Device, HandOver};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_spec::blk::{BlkFeatures, S_IOERR, S_OK};
use kickless_testing::eventually;
use kickless_testing::hostile_nbd::*;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

/// Serves a connection until its end. Sends each command that it gets.
fn serve(stream: &mut UnixStream, commands: &Sender<u16>) {
    greet(stream, &hello(false));
    while let Some(request) = read_request(stream) {
        let _ = commands.send(request.command);
        let data = if request.command == READ { vec![5; request.len as usize] } else { Vec::new() };
        if request.command == DISCONNECT || stream.write_all(&simple(0, request.cookie, &data)).is_err() {
            return;
        }
    }
}

/// Starts a server that tells the commands that it gets.
fn server(connections: usize) -> (HostileNbd, Receiver<u16>) {
    let (sender, commands) = channel();
    (HostileNbd::start(connections, move |_, stream| serve(stream, &sender)), commands)
}

/// Opens the disk. A device that takes it makes a second connection.
fn pair(spec: &DiskSpec) -> Pair {
    Pair::new(Disk::open(spec, &OPTIONS).unwrap(), spec, &OPTIONS)
}

fn start(pair: &Pair) -> Rig {
    Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty())
}

/// Passes the disk while its guest runs.
fn pass(pair: &mut Pair, rig: &mut Rig) {
    let new = pair.make(pair.give()).unwrap();
    let position = rig.park();
    let task = rig.task_of(&new, &position, false);
    pair.finish(&new);
    rig.go_on_with(&new, task);
}

/// The server sees one connection, from the first guest's request to the last.
#[test]
fn a_connection_passes() {
    let (server, commands) = server(2);
    let spec: DiskSpec = server.uri().parse().unwrap();
    let mut pair = pair(&spec);
    assert_eq!(commands.recv_timeout(LONG), Ok(DISCONNECT), "the connection of the open");
    let mut rig = start(&pair);
    assert_eq!(rig.status(TestRequest::write(0, &[1; 512])), S_OK);
    pass(&mut pair, &mut rig);
    let new = pair.end_old();
    assert_eq!(rig.run(TestRequest::read(0, 512)).data, [5; 512]);
    assert_eq!(rig.status(TestRequest::flush()), S_OK);
    drop(rig);
    new.close().unwrap();
    let seen: Vec<u16> = commands.iter().take(4).collect();
    assert_eq!(seen, [WRITE, READ, FLUSH, DISCONNECT]);
}

/// Nothing of the new process reaches the server before it begins. The old one goes on with its connection.
#[test]
fn the_old_process_goes_on_after_each_step() {
    let (server, commands) = server(2);
    let spec: DiskSpec = server.uri().parse().unwrap();
    let pair = pair(&spec);
    assert_eq!(commands.recv_timeout(LONG), Ok(DISCONNECT));
    let mut rig = start(&pair);
    for step in 0..4 {
        let handed = pair.give();
        let new = (step > 0).then(|| pair.make(handed).unwrap());
        rig.park();
        if step > 1 {
            let last = pair.give_final().unwrap();
            if step > 2 {
                pair.receive(new.as_ref().unwrap(), last).unwrap();
            }
        }
        drop(new);
        pair.old.take_back().unwrap();
        rig.unpark();
        assert_eq!(rig.status(TestRequest::write(0, &[1; 512])), S_OK, "{step}");
        assert_eq!(commands.recv_timeout(LONG), Ok(WRITE));
    }
}

/// A request at the server keeps the disk where it is. Its guest gets the answer.
#[test]
fn a_disk_with_a_request_at_its_server_is_not_given() {
    let (answer, may_answer) = channel();
    let server = HostileNbd::start(2, move |_, stream| {
        greet(stream, &hello(false));
        while let Some(request) = read_request(stream).filter(|request| request.command != DISCONNECT) {
            may_answer.recv().unwrap();
            let _ = stream.write_all(&simple(0, request.cookie, &vec![5; request.len as usize]));
        }
    });
    let spec: DiskSpec = server.uri().parse().unwrap();
    let pair = pair(&spec);
    let mut rig = start(&pair);
    let id = rig.send(TestRequest::read(0, 512));
    rig.poll();
    let _handed = pair.give();
    let refused = pair.give_final().err().unwrap();
    assert!(refused.contains("a request is at the NBD server"), "{refused}");
    pair.old.take_back().unwrap();
    answer.send(()).unwrap();
    assert_eq!(rig.finish()[&id].data, [5; 512]);
}

/// A server that does not answer is no obstacle while nothing is asked.
#[test]
fn a_server_that_hangs_sees_no_other_connection() {
    let (release, until) = channel::<()>();
    let server = HostileNbd::start(2, move |connection, stream| {
        greet(stream, &hello(false));
        if connection == 0 {
            read_request(stream);
            return;
        }
        let _ = until.recv();
        while let Some(request) = read_request(stream).filter(|request| request.command != DISCONNECT) {
            let _ = stream.write_all(&simple(0, request.cookie, &vec![5; request.len as usize]));
        }
    });
    let spec: DiskSpec = server.export("", 60).parse().unwrap();
    let mut pair = pair(&spec);
    let mut rig = start(&pair);
    pass(&mut pair, &mut rig);
    let new = pair.end_old();
    let id = rig.send(TestRequest::read(0, 512));
    rig.poll();
    release.send(()).unwrap();
    assert_eq!(rig.finish()[&id].data, [5; 512]);
    drop(rig);
    new.close().unwrap();
}

/// The disk of a server that is away passes without a connection. The new process reaches the next server.
#[test]
fn a_server_that_is_away_is_reached_by_the_new_process() {
    let (sender, commands) = channel();
    let (end, until) = channel::<()>();
    let mut server = HostileNbd::start(2, move |connection, stream| {
        greet(stream, &hello(false));
        // The second connection is that of the guest.
        match connection {
            0 => drop(read_request(stream)),
            _ => drop(until.recv()),
        }
    });
    let spec: DiskSpec = server.export("", 60).parse().unwrap();
    let mut pair = pair(&spec);
    let mut rig = start(&pair);
    let before = pair.old.changes();
    drop(end);
    eventually("the loss of the connection", || pair.old.changes() > before);
    pass(&mut pair, &mut rig);
    let new = pair.end_old();
    server.start_again(1, move |_, stream| serve(stream, &sender));
    assert_eq!(rig.run(TestRequest::read(0, 512)).data, [5; 512]);
    drop(rig);
    new.close().unwrap();
    assert_eq!(commands.iter().take(2).collect::<Vec<_>>(), [READ, DISCONNECT]);
}

/// The end of a connection after it was given is a change.
#[test]
fn a_lost_connection_is_given_again() {
    let (end, until) = channel::<()>();
    let server = HostileNbd::start(3, move |connection, stream| {
        greet(stream, &hello(false));
        match connection {
            0 => drop(read_request(stream)),
            1 => drop(until.recv()),
            _ => drop(serve_requests(stream, 5)),
        }
    });
    let spec: DiskSpec = server.export("", 60).parse().unwrap();
    let mut pair = pair(&spec);
    let mut rig = start(&pair);
    let (before, handed) = (pair.old.changes(), pair.give());
    drop(end);
    eventually("a new connection", || pair.old.changes() == before + 2);
    let refused = pair.give_final().err().unwrap();
    assert!(refused.contains("has changed since it was given"), "{refused}");
    drop(handed);
    pair.old.take_back().unwrap();
    pass(&mut pair, &mut rig);
    let new = pair.end_old();
    assert_eq!(rig.run(TestRequest::read(0, 512)).data, [5; 512]);
    drop(rig);
    new.close().unwrap();
}

/// Writes that the server may lose are reported by the new process, once for each queue: those that the old
/// one has lost, and those that it has written.
#[test]
fn losses_pass() {
    for is_lost_before in [true, false] {
        let (end, until) = channel::<()>();
        let server = HostileNbd::start(3, move |connection, stream| {
            greet(stream, &hello(false));
            if connection != 1 {
                serve_requests(stream, 5);
                return;
            }
            let request = read_request(stream).unwrap();
            stream.write_all(&simple(0, request.cookie, &[])).unwrap();
            let _ = until.recv();
        });
        let spec: DiskSpec = server.export("", 60).parse().unwrap();
        let mut pair = pair(&spec);
        let mut rig = start(&pair);
        assert_eq!(rig.status(TestRequest::write(0, &[1; 512])), S_OK);
        let before = pair.old.changes();
        if is_lost_before {
            end.send(()).unwrap();
            eventually("a new connection", || pair.old.changes() == before + 2);
        }
        pass(&mut pair, &mut rig);
        let new = pair.end_old();
        if !is_lost_before {
            end.send(()).unwrap();
            eventually("a new connection", || new.changes() == 2);
        }
        let statuses = [rig.status(TestRequest::flush()), rig.status(TestRequest::flush())];
        assert_eq!(statuses, [S_IOERR, S_OK], "{is_lost_before}");
        drop(rig);
        // A queue that has reported it does not do so in the third process.
        let mut again = Pair::of(new, &spec, &OPTIONS);
        let mut rig = start(&again);
        pass(&mut again, &mut rig);
        let new = again.end_old();
        assert_eq!(rig.status(TestRequest::flush()), S_OK);
        drop(rig);
        new.close().unwrap();
    }
}

/// The next guest takes a free disk by a connection of its own.
#[test]
fn a_free_disk_passes() {
    let (server, commands) = server(3);
    let spec: DiskSpec = server.uri().parse().unwrap();
    let mut pair = pair(&spec);
    pair.old.close().unwrap();
    let new = pair.pass();
    pair.end_old();
    assert_eq!(commands.iter().take(2).collect::<Vec<_>>(), [DISCONNECT; 2]);
    new.open().unwrap();
    let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.run(TestRequest::read(0, 512)).data, [5; 512]);
    drop(rig);
    new.close().unwrap();
    assert_eq!(commands.iter().take(2).collect::<Vec<_>>(), [READ, DISCONNECT]);
}
