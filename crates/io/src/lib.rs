//! Asynchronous I/O engines with a common interface.
//!
//! An [`Engine`] takes operations on registered files, does many at once, and returns each as a
//! [`Completion`]. There are three: io_uring; Linux AIO, for hosts that forbid io_uring and files that are
//! open for direct I/O; and a pool of threads, which works everywhere.
//!
//! # Ownership
//! An engine belongs to one thread, its worker, which queues, submits and reaps without locks. An engine may
//! be opened on one thread and moved to another before its first operation. After that it stays there. The
//! [`Buffers`] of an operation move into the engine and come back with the completion. So no other code can
//! free or change memory that the kernel still uses. Dropping an engine waits for the operations in flight.
//!
//! # Order
//! Operations in flight have no order. If one must come after another, the caller queues it when the other
//! has completed.
//!
//! # A turn of the worker
//! Call [`Engine::queue`] for any number of operations, [`Engine::submit`] once, [`Engine::reap`] once, and
//! sleep until [`Engine::event`] is readable, unless [`Engine::needs_turn`].
//!
//! ```
//! use kickless_io::{AlignedBuf, BackingFile, Buffers, Engine, EngineKind, Op, OpKind, Owner, Token};
//! use std::sync::Arc;
//!
//! let mut engine = Engine::open(EngineKind::Auto, 64)?;
//! let file = BackingFile::new(Arc::new(std::fs::File::open("/proc/self/exe")?), Owner::unique());
//! let file = engine.register(&file)?;
//! let buffers = Buffers::Owned(AlignedBuf::new(4, 4096)?);
//! let op = Op { file, kind: OpKind::Read, offset: 0, buffers };
//! assert!(engine.queue(op, Token { source: 1, slot: 2 }).is_ok());
//! let mut done = Vec::new();
//! while done.is_empty() {
//!     engine.submit()?;
//!     engine.reap(&mut done);
//! }
//! assert_eq!(done[0].token, Token { source: 1, slot: 2 });
//! assert_eq!(done[0].result, Ok(4));
//! let Buffers::Owned(buf) = &done[0].buffers else { unreachable!() };
//! assert_eq!(&buf[..], b"\x7fELF");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod aio;
mod backend;
mod buffer;
mod early_submit;
mod engine;
mod error;
mod files;
mod op;
mod operations;
mod options;
mod signal;
mod threads;
mod uring;
mod waker;
mod writeback;

pub use buffer::AlignedBuf;
pub use engine::Engine;
pub use error::Error;
pub use files::{BackingFile, Owner};
pub use op::{Buffers, Completion, FileId, Op, OpKind, RangeSyscall, Token};
pub use options::{DEPTH_MAX, EngineKind, EngineOptions, OWNERS_MAX, UnknownEngine};
pub use rustix::io::Errno;
pub use signal::{Signaller, is_eventfd, prepare_to_signal, signal};
#[cfg(debug_assertions)]
#[doc(hidden)]
pub use uring::attack;
pub use waker::Waker;
pub use writeback::writeback_error;
