//! Keeps a worker, as a file system can that never answers, for tests. Release builds do not have this
//! module.
//!
//! The variable of the environment has the path of a FIFO. A byte `w` in it keeps the first worker, and any
//! other byte lets it go on.

use std::env;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, OnceLock};
use std::thread;

use anyhow::{Context, Result};
use kickless_worker::WorkerPool;

#[cfg(not(debug_assertions))]
compile_error!("only tests keep a worker");

/// The variable that has the path.
const VARIABLE: &str = "KICKLESS_STALL";

static FIFO: OnceLock<File> = OnceLock::new();

/// Opens the FIFO. Must be called before the process loses its rights.
///
/// # Errors
/// It cannot be opened.
#[expect(clippy::disallowed_methods, reason = "the main thread at the start, which still has its paths")]
pub(crate) fn prepare() -> Result<()> {
    let Some(path) = env::var_os(VARIABLE) else { return Ok(()) };
    // With an end for writing, it never ends.
    let fifo = File::options().read(true).write(true).open(&path);
    let fifo = fifo.with_context(|| format!("{VARIABLE}={}", path.display()))?;
    FIFO.get_or_init(|| fifo);
    Ok(())
}

/// Starts the thread that reads the FIFO, if there is one.
///
/// # Errors
/// The process cannot start a thread.
pub(crate) fn start(pool: &Arc<WorkerPool>) -> Result<()> {
    let Some(mut fifo) = FIFO.get() else { return Ok(()) };
    let pool = Arc::downgrade(pool);
    let run = move || {
        let (mut byte, mut kept) = ([0], None);
        while fifo.read_exact(&mut byte).is_ok() {
            kept = pool.upgrade().filter(|_| byte == *b"w").map(|pool| pool.block(0));
        }
        drop(kept);
    };
    thread::Builder::new().name("stall".into()).spawn(run).map(drop).context("cannot start a thread")
}
