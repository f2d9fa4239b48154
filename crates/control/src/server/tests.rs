//! Drives the thread of the server step by step.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;

use kickless_daemon::{Kinds, Registry};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::daemon::{Hooks, SandboxInfo};

#[path = "../../../daemon/tests/common/toy.rs"]
mod toy;

/// More lines than one turn has, and fewer bytes than one read.
const LINES: usize = 150;

/// A server without a thread, and a counter of the calls that it has executed.
struct Rig {
    sockets: Sockets,
    filters: Arc<AtomicUsize>,
    dir: TempDir,
}

impl Rig {
    /// `on_filter` is called for each `log.set`.
    fn new(on_filter: impl Fn(&Arc<AtomicBool>) + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listen = |name: &str, access| {
            let listener = Listener::bind(&dir.path().join(name), 0o600).unwrap();
            listener.socket().set_nonblocking(true).unwrap();
            (listener, access)
        };
        let listeners = vec![listen("full", Access::Full), listen("read-only", Access::ReadOnly)];
        let (filters, is_ending) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let hooks = Hooks {
            stop: Box::new(|| {}),
            reload: Box::new(|_| Err("no file".into())),
            user: 0,
            upgrade: Box::new(|_| Err(RpcError::failed("no program"))),
            set_log: {
                let (filters, is_ending) = (filters.clone(), is_ending.clone());
                Box::new(move |_| {
                    filters.fetch_add(1, Ordering::Relaxed);
                    on_filter(&is_ending);
                    Ok(())
                })
            },
        };
        let registry = Registry::new(1, Kinds::new(toy::ToyKind(toy::make_toy))).unwrap();
        let sandbox = SandboxInfo { mode: "off".into(), landlock: 0, profile: "none", roots: Vec::new() };
        let daemon = Arc::new(Daemon::new(Arc::new(registry), sandbox, hooks));
        let sockets = Sockets::new(daemon, listeners, Waker::new().unwrap(), is_ending);
        Self { sockets, filters, dir }
    }

    /// Connects a client that sends these lines at once, and waits until they have been read.
    fn client(&mut self, socket: &str, lines: &str) -> UnixStream {
        let mut client = UnixStream::connect(self.dir.path().join(socket)).unwrap();
        client.write_all(lines.as_bytes()).unwrap();
        let id = self.sockets.next_id;
        while !self.sockets.connections.get(&id).is_some_and(Connection::may_have_line) {
            self.sockets.collect();
        }
        client
    }

    /// Serves until no line waits.
    fn serve_all(&mut self) {
        while self.sockets.connections.values().any(|client| client.share.is_ready()) {
            self.sockets.work();
        }
    }
}

/// Returns a line of a request, with an id that has this number.
fn line(id: impl Into<Option<usize>>, method: &str, params: Value) -> String {
    let mut request = json!({ "jsonrpc": "2.0", "method": method, "params": params });
    if let Some(id) = id.into() {
        request["id"] = id.into();
    }
    format!("{request}\n")
}

/// Returns the number of whole lines that have come.
fn answers(mut client: &UnixStream) -> usize {
    client.set_nonblocking(true).unwrap();
    let mut come = Vec::new();
    let _ = client.read_to_end(&mut come);
    come.iter().filter(|byte| **byte == b'\n').count()
}

/// One, ten and sixty clients send what costs most, and read or do not read.
#[test]
fn a_request_waits_for_one_line_of_each_other_client() {
    for (count, reads) in [(1, true), (1, false), (10, true), (60, false)] {
        let mut rig = Rig::new(|_| {});
        let greedy: String = (0..LINES).map(|id| line(id, "rpc.discover", json!({}))).collect();
        let greedy: Vec<_> = (0..count).map(|_| rig.client("read-only", &greedy)).collect();
        let mut served = 0;
        let mut work = |rig: &mut Rig| {
            rig.sockets.work();
            served += greedy.iter().filter(|_| reads).map(answers).sum::<usize>();
        };
        // Each has had a turn.
        (0..count).for_each(|_| work(&mut rig));
        for (socket, turns_max) in [("full", 2), ("read-only", count + 1)] {
            let client = rig.client(socket, &line(1, "daemon.info", json!({})));
            let answered = (0..turns_max).any(|_| {
                work(&mut rig);
                answers(&client) == 1
            });
            assert!(answered, "{socket} {count}");
        }
        assert!(!reads || (count..2 * count + 4).contains(&served), "{served} answers of {count}");
    }
}

#[test]
fn short_lines_of_one_client_take_turns_too() {
    let mut rig = Rig::new(|_| {});
    let many: String = (0..LINES).map(|_| line(None, "log.set", json!({ "filter": "a" }))).collect();
    let _greedy = rig.client("full", &many);
    let client = rig.client("full", &line(1, "daemon.info", json!({})));
    rig.sockets.work();
    assert_eq!(answers(&client), 1);
    let done = rig.filters.load(Ordering::Relaxed);
    assert!(done < 20, "{done}");
    rig.serve_all();
    assert_eq!(rig.filters.load(Ordering::Relaxed), LINES);
}

#[test]
fn the_end_waits_for_one_line() {
    let mut rig = Rig::new(|is_ending| is_ending.store(true, Ordering::Release));
    let many: String = (0..LINES).map(|id| line(id, "log.set", json!({ "filter": "a" }))).collect();
    let _clients: Vec<_> = (0..3).map(|_| rig.client("full", &many)).collect();
    rig.sockets.run();
    assert_eq!(rig.filters.load(Ordering::Relaxed), 1);
}

#[test]
fn a_call_that_only_shows_is_not_executed_without_an_id() {
    let mut rig = Rig::new(|_| {});
    let lines = [
        (0..LINES).map(|_| line(None, "rpc.discover", json!({}))).collect(),
        line(None, "stats.subscribe", json!({ "interval": "1h" })),
        line(None, "nothing", json!({})),
        line(7, "daemon.info", json!({})),
    ];
    let client = rig.client("read-only", &lines.concat());
    // The lines cost little more than their bytes, and none of them the bytes of the document.
    rig.sockets.work();
    let charged = rig.sockets.turns.order(Access::ReadOnly, Default::default()).0;
    assert!(charged < 64 << 10, "{charged}");
    rig.serve_all();
    let mut first = String::new();
    client.set_nonblocking(false).unwrap();
    BufReader::new(&client).read_line(&mut first).unwrap();
    let first: Value = serde_json::from_str(&first).unwrap();
    assert_eq!((&first["id"], first["result"].is_object()), (&json!(7), true));
    // A subscription has an effect.
    assert!(rig.sockets.connections.values().all(|client| client.subscriptions.stats.is_some()));
}
