//! A daemon in the process of the test, with its control sockets.

use kickless_opener::Listener;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kickless_control::{Access, Client, ClientError, Daemon, Hooks, RpcError, SandboxInfo, Server};
use kickless_daemon::{Kinds, Notation, PoolConfig, Registry};
use kickless_testing::LIMIT;
use kickless_worker::WorkerPool;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const DEVICES_MAX: usize = 16;

pub(crate) struct Rig {
    // Dropped first, so that no call finds the registry gone.
    server: Option<Server>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) is_stopping: Arc<AtomicBool>,
    pub(crate) dir: TempDir,
}

impl Rig {
    /// Makes a daemon of devices of these kinds.
    pub(crate) fn of(kinds: Kinds) -> Self {
        kickless_memory::fault::guard().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let pool = PoolConfig::default();
        let options = pool.worker_options(DEVICES_MAX as u32, Notation::Keys).unwrap();
        let registry = Arc::new(Registry::new(DEVICES_MAX, kinds).unwrap());
        registry.set_pool(WorkerPool::start(&options).unwrap());
        let is_stopping = Arc::new(AtomicBool::new(false));
        let stop = is_stopping.clone();
        let hooks = Hooks {
            stop: Box::new(move || stop.store(true, Ordering::Relaxed)),
            reload: Box::new(|_| Err("no file".into())),
            user: 0,
            upgrade: Box::new(|_| Err(RpcError::failed("no program"))),
            set_log: Box::new(|filter| match filter {
                "info" => Ok(()),
                _ => Err("no filter".into()),
            }),
        };
        let sandbox = SandboxInfo { mode: "off".into(), landlock: 0, profile: "none", roots: Vec::new() };
        let daemon = Arc::new(Daemon::new(registry.clone(), sandbox, hooks));
        let listen = |name: &str| Listener::bind(&dir.path().join(name), 0o660).unwrap();
        let sockets =
            vec![(listen("control.sock"), Access::Full), (listen("read-only.sock"), Access::ReadOnly)];
        Self { server: Some(Server::start(daemon, sockets).unwrap()), registry, is_stopping, dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.path("control.sock")).unwrap()
    }

    pub(crate) fn stream(&self) -> UnixStream {
        UnixStream::connect(self.path("control.sock")).unwrap()
    }

    pub(crate) fn end_server(&mut self) {
        self.server = None;
    }
}

/// Makes a call. The error is the message.
pub(crate) fn call(client: &mut Client, method: &str, params: Value) -> Result<Value, String> {
    let Value::Object(params) = params else { panic!("{params}") };
    client.call(method, params).map_err(|error| match error {
        ClientError::Call(error) => error.message,
        other => panic!("{method}: {other}"),
    })
}

/// Reads one answer.
pub(crate) fn answer(stream: &UnixStream) -> Value {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
}

/// Waits until the daemon has closed the connection.
pub(crate) fn is_closed(mut stream: &UnixStream) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
}
