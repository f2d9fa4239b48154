//! Virtqueues: the device's end and the driver's.
//!
//! The device's end returns the chains that the driver made available ([`device::Queue::pop`]), takes back
//! the chains that the device has used ([`device::Queue::push`], [`device::Queue::publish`]), and decides
//! about notifications. It does no I/O and owns no thread. One thread at a time uses it.
//!
//! The driver's end is in [`driver`]. The rest of this page is about the device's end.
//!
//! The ring areas are translated once ([`device::Metadata`]), and then read and written directly. The buffers
//! of a chain are *not* translated here. A buffer outside of guest memory is an error of one request, which
//! the device answers with the request's status. A malformed chain breaks the ring: the queue returns a
//! [`RingError`] and pops no more.
//!
//! All contents of the rings are hostile. Each field is read once and checked, and the copy is used. No
//! content makes this crate panic, allocate more than one chain needs, or run longer than one chain takes.
//!
//! ```
//! use kickless_memory::{Gpa, Map, Slot, UserAddr, View};
//! use kickless_virtqueue::{Chain, device};
//! use std::sync::Arc;
//!
//! let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
//! rustix::fs::ftruncate(&file, 1 << 20)?;
//! let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0x10_0000), 1 << 20)?;
//! let view = Arc::new(View::new(Map::new(vec![slot])?));
//!
//! // Acts as the driver: descriptor 3 is one 512-byte buffer, and it is the first entry of the avail ring.
//! view.map().write_obj(Gpa(48), &0x8000u64)?;
//! view.map().write_obj(Gpa(56), &512u32)?;
//! view.map().write_obj(Gpa(0x1004), &3u16)?;
//! view.map().write_obj(Gpa(0x1002), &1u16)?;
//!
//! let options = device::Options::new(8, false, false)?;
//! let addresses = device::Addresses {
//!     desc: UserAddr(0x10_0000),
//!     avail: UserAddr(0x10_1000),
//!     used: UserAddr(0x10_2000),
//!     log: None,
//! };
//! let metadata = device::Metadata::map(&view, &addresses, &options)?;
//! let mut queue = device::Queue::new(options, metadata, 0);
//! let mut chain = Chain::default();
//! while queue.pop(&view, &mut chain)? {
//!     let buffer = chain.readable()[0];
//!     assert_eq!((chain.id.head(), buffer.addr, buffer.len), (3, Gpa(0x8000), 512));
//!     queue.push(chain.id, 0);
//! }
//! assert!(queue.publish(), "the driver wants to be called");
//! assert_eq!(view.read_obj::<u16>(Gpa(0x2002))?, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod access;
mod address_space;
mod chain;
mod descriptor;
pub mod device;
pub mod driver;
mod error;
pub mod packed;
mod progress;

pub use chain::{Buffer, Chain, ChainId, INDIRECT_CHAIN_MAX};
pub use error::RingError;
