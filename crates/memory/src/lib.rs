//! Guest memory: addresses, slots, the map of all, and the only way to touch guest bytes.
//!
//! The guest and the front-end can write this memory at any time, so nothing here hands out a Rust reference to it:
//! bytes are read once into a copy, and written by copy. Addresses of different spaces ([`Gpa`], [`Iova`],
//! [`UserAddr`]) are different types and never convert into one another but through a [`Map`] or a
//! [`View`].
//!
//! # Ownership
//! A [`Mapping`] is one `mmap` of a file that the front-end shares; a [`Slot`] says which guest-physical range it
//! stands for; a [`Map`] is the immutable set of all slots, and a [`View`] is what a device sees of it. Memory changes by
//! making a *new* view and swapping it whole: a session makes it, each worker takes it when it next looks, and no lock is
//! taken for any of it on the data path. Whoever still uses an old view, a request in flight ([`Iov`]) or a ring ([`Area`]),
//! holds a reference to it, made once when the view was installed and not for each request; a mapping goes away with the
//! last one. [`Released`] lets the session wait for that.
//!
//! # What else must hold
//! * What a device writes is marked in the log of its queue's *current* view, after the data and before the driver hears of
//!   it. Whatever writes takes the queue's [`Marks`] along, so that none can forget ([`log`] has the argument).
//! * Behind a vIOMMU a translation is used only as long as the front-end has not been told that it is gone ([`Iotlb`]).
//! * A file that the front-end cuts short breaks the rings of its own device, and nothing else ([`fault`]; installing the
//!   handler is the program's business).
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
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod addr;
mod area;
mod backing;
mod error;
pub mod fault;
mod hosts;
mod inflight;
mod iotlb;
mod iov;
pub mod log;
mod map;
mod mapper;
mod mapping;
mod marks;
pub mod quota;
mod ram;
mod scattered;
pub mod shared;
mod slot;
mod view;

pub use addr::{Gpa, Iova, UserAddr};
pub use area::{Area, Span};
pub use backing::Slow;
pub use error::{Error, InflightError, LogError, Refused, Unmapped};
pub use inflight::{Inflight, Records};
pub use iotlb::{Access, Iotlb, IovaRange, Lack, Miss, TABLES_MAX, Table, Tlb, Translated, UpdateError};
pub use iov::Iov;
pub use log::Log;
pub use map::Map;
pub use mapper::Mapper;
pub use mapping::{Mapping, Released};
pub use marks::Marks;
pub use quota::SLOTS_MAX;
pub use ram::Ram;
pub use scattered::Scattered;
pub use slot::Slot;
pub use view::View;
