//! Guest memory: addresses, slots, the map of all slots, and the only way to touch guest bytes.
//!
//! The guest and the front-end can write this memory at any time. So this crate never makes a Rust reference
//! to it: it reads bytes once into a copy, and writes by copy. Addresses of different spaces ([`Gpa`],
//! [`Iova`], [`UserAddr`]) are different types. Only a [`Map`] or a [`View`] converts one into another.
//!
//! # Ownership
//! * A [`Mapping`] is one `mmap` of a file that the front-end shares. It keeps the file open.
//! * A [`Slot`] gives a mapping its range of guest-physical addresses.
//! * A [`Map`] is the immutable set of all slots.
//! * A [`View`] is a map with the log in which writes are marked. Devices use guest memory through a view.
//!
//! A change of memory makes a *new* view. The session makes it, and each worker takes it when it next handles
//! its mailbox. The data path takes no lock for this.
//!
//! A request in flight ([`Iov`]) and a ring ([`Area`]) hold a reference to the view that they use. They take
//! the reference when the view is installed, not for each request.
//!
//! When the last reference to a mapping is gone, a thread of its device unmaps it. The holder of the last
//! reference, often a worker, does not wait for that (`unmapper` says why). [`Released`] lets the session
//! wait. This crate starts these threads, one for each [`Mapper`] that has mapped something. Memory that was
//! mapped without one ([`Slot::map`]), such as a driver's, is unmapped by the thread that drops it.
//!
//! # Invariants
//! * A write of a device is marked in the log of its queue's *current* view, after the data and before the
//!   driver learns of it. Each function that writes takes the queue's [`Marks`], so that no caller can forget
//!   them ([`log`] has the argument).
//! * Behind a vIOMMU a queue uses a translation only until the session acknowledges its invalidation
//!   ([`Iotlb`]).
//! * A front-end that truncates a shared file breaks the rings of its own device, and nothing else. See
//!   [`fault`]; the program has to install the signal handler.
//!
//! ```
//! use kickless_memory::{Gpa, Iov, Map, Marks, Slot, UserAddr, View};
//! use std::sync::Arc;
//!
//! let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
//! rustix::fs::ftruncate(&file, 1 << 20)?;
//! let slot = Slot::map(&file, 0, Gpa(0x1000), UserAddr(0x7000_0000), 1 << 20)?;
//! let view = Arc::new(View::new(Map::new(vec![slot])?));
//! view.write(Gpa(0x2000), b"hello", &mut Marks::off())?;
//! let mut iov = Iov::default();
//! iov.push(&view, Gpa(0x2001), 3)?;
//! let mut copy = [0; 3];
//! iov.read(0, &mut copy);
//! assert_eq!(&copy, b"ell");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod addr;
mod area;
mod backing;
mod error;
pub mod fault;
mod files;
mod host_index;
mod inflight;
mod iotlb;
mod iov;
pub mod log;
mod map;
mod mapper;
mod mapping;
mod marks;
mod pinned_byte;
pub mod quota;
mod ram;
mod scattered;
pub mod shared;
mod slot;
mod unmapper;
mod view;

pub use addr::{Gpa, Iova, UserAddr};
pub use area::{Area, Span};
pub use backing::SlowFile;
pub use error::{Error, MappingRefused, Purpose, Unmapped};
pub use inflight::{Inflight, Records};
pub use iotlb::{
    Access, Iotlb, IovaRange, Miss, TABLES_MAX, Table, Tlb, TranslateError, Translated, UpdateError,
};
pub use iov::Iov;
pub use log::Log;
pub use map::Map;
pub use mapper::Mapper;
pub use mapping::{Mapping, prepare_to_explain};
pub use marks::Marks;
pub use pinned_byte::PinnedByte;
pub use quota::SLOTS_MAX;
pub use ram::Ram;
pub use scattered::Scattered;
pub use slot::Slot;
pub use unmapper::Released;
pub use view::View;
