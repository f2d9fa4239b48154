//! A dirty log as a library: reports the pages of guest memory that were written since the last harvest.
//!
//! It is for programs that harvest through it: a VMM in Rust, a migration tool, a snapshot tool.
//!
//! [`Harvester::enable`] turns the log of a slot on. [`Harvester::harvest`] returns the pages that were
//! written since the previous harvest. [`Harvester::disable`] turns the log off. Each thread that writes has
//! a [`Writer`].
//!
//! The guarantee: *each byte that is written after the log was turned on is in a harvest that is handed out
//! after the write*. A write before [`Harvester::harvest_last`] begins is in that harvest or an earlier one.
//! Harvests do not stop the writers, and take no lock that writers need. [`crate::order`] has the argument.
//!
//! # Two methods
//! * [`Method::Marks`] is the usual choice. After each write, the writer checks the page's bit and sets it if
//!   it is clear. A harvest takes the bits. The method needs no memory but the bitmap, and large leaves stay
//!   whole.
//! * [`Method::Protect`] write-protects the pages. The first write to a page after a harvest makes it
//!   writable again and logs it. Further writes cost nothing, not even a check. But each page costs more at
//!   its first write and at the harvest, and large leaves are split where something is written. This method
//!   is better if pages are written many times between two harvests.
//!
//! `docs/measurements/memory.md` has measurements of both.
//!
//! # Guests that map
//! A guest with a vIOMMU asks for mappings in a [`Space`], and the caller limits them. Linux gives a
//! container of VFIO 65 535. The crate has no limit of its own. A mapping takes up to two tables of 4 KiB. To
//! unmap one of K mappings of the same page takes a walk over all K, some 20 microseconds for 65 535 of them,
//! under a lock for which all other changes and harvests wait. Writers do not wait for it.
//!
//! This crate is not for vhost-user front-ends. They do not harvest through us but read a bitmap that they
//! share with us, at any time. So nothing could wait for the writers there.
//!
//! ```
//! use kickless_dirty_log::{Harvester, Method, Mmu, Pages, Writer};
//! use kickless_memory::{Gpa, Iova, Slot, UserAddr};
//!
//! let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
//! rustix::fs::ftruncate(&file, 4 << 20)?;
//! let mmu = Mmu::new();
//! mmu.add(Slot::map(&file, 0, Gpa(0), UserAddr(0), 4 << 20)?)?;
//!
//! let mut log = Harvester::enable(&mmu, Gpa(0), Method::Marks)?;
//! let (stop, stopped) = std::sync::mpsc::channel::<()>();
//! let mut writer = Writer::direct(&mmu);
//! let device = std::thread::spawn(move || {
//!     let mut sequence = 0_u64;
//!     while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
//!         sequence += 1;
//!         writer.write_obj(Iova(0x3000), &sequence).unwrap();
//!         writer.quiesce();
//!     }
//! });
//!
//! // Harvest while the thread writes. The reported pages were written, and can be copied now.
//! let mut pages = Pages::default();
//! while !pages.contains(Gpa(0x3000)) {
//!     log.harvest(.., &mut pages);
//! }
//! drop(stop);
//! device.join().unwrap();
//! log.harvest_last(.., &mut pages);
//! assert!(pages.ranges().all(|(gpa, len)| (gpa, len) == (Gpa(0x3000), 0x1000)));
//! log.disable();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod bitmap;
mod bounds;
mod control;
mod entry;
mod epoch;
mod error;
mod fault;
mod harvest;
mod level;
mod log;
mod node;
mod node_pool;
pub mod order;
mod pages;
mod protect;
mod rmap;
mod slot_rmap;
mod space;
mod tlb;
mod tree;
mod writer;

pub use control::Mmu;
pub use error::Error;
pub use harvest::{HarvestTime, Harvester};
pub use log::Method;
pub use pages::Pages;
pub use space::Space;
pub use writer::{Offline, Writer};
