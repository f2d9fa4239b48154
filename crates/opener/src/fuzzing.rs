//! The decisions of the process that opens files, for fuzzing.

use std::path::PathBuf;

use crate::authority::{Admission, State, Within};
use crate::grant::{Authority, Calls, Target};
use crate::wire::{self, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Reply, Request};

/// The things of a process with a few devices, whose entries requests change.
#[derive(Debug)]
pub struct Devices(State);

/// The file of a request that is allowed.
#[derive(Debug)]
pub struct Allowed {
    /// Its path.
    pub path: PathBuf,
    /// It is written, made or removed.
    pub writes: bool,
    /// No entry names it, so it can only be a backing image.
    pub is_backing: bool,
}

impl Devices {
    /// Returns devices that may use these things. Calls may name no files. The control socket has this path.
    pub fn new(named: Vec<Target>, socket: PathBuf) -> Self {
        let control = vec![Target::Socket { path: socket, mode: None, group: None }];
        let mut state = State::new(Authority {
            named,
            control,
            roots: Vec::new(),
            calls: Calls::All,
            libraries: Vec::new(),
        });
        state.set_file(Vec::new());
        Self(state)
    }

    /// Takes a request. Returns its file if it is allowed.
    pub fn take(&mut self, message: &[u8]) -> Option<Allowed> {
        let (id, request) = wire::parse::<Request>(message)?;
        assert_eq!(wire::write(id, &request, REQUEST_BYTES_MAX).as_deref(), Ok(message));
        let permit = self.0.decide(&request).ok()?;
        self.0.begin(&permit);
        let allowed = |path, writes| {
            // The only requests whose file is not compared with a grant have other directories.
            let is_backing = matches!(permit.within, Within::Beside(_));
            Some(Allowed { path, writes, is_backing })
        };
        let file = match request {
            Request::Status { path } => allowed(path, false),
            Request::Image { path, writes, .. } => allowed(path, writes),
            Request::Capture { path } | Request::Listen { path, .. } | Request::Unlink { path, .. } => {
                allowed(path, true)
            }
            Request::Enter { entry, targets } => {
                let admitted = targets.iter().map(|target| match self.0.admit(target) {
                    Ok(Admission::Granted(granted)) => Some(granted),
                    // No file is below a root.
                    Ok(Admission::IfBelow(..)) | Err(_) => None,
                });
                if let Some(grants) = admitted.collect() {
                    // A full table is no fault.
                    let _ = self.0.enter(entry, grants);
                }
                None
            }
            Request::Leave { entry } => {
                self.0.leave(entry);
                None
            }
            Request::Resolve { host, port } => {
                self.0.resolved(&host, port, &[([192, 0, 2, 1], port).into()]);
                None
            }
            _ => None,
        };
        self.0.finish(&permit);
        file
    }
}

/// Parses a reply.
pub fn reply(message: &[u8]) {
    if let Some((id, reply)) = wire::parse::<Reply>(message) {
        if message.len() <= REPLY_BYTES_MAX {
            assert_eq!(wire::write(id, &reply, REPLY_BYTES_MAX).as_deref(), Ok(message));
        }
    }
}
