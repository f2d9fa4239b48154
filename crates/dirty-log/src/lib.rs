//! Which pages of guest memory were written since the last look, for whoever harvests through us: a VMM in Rust, a migration
//! tool, a snapshotter.
//!
//! [`Harvester::enable`] turns the log of a slot on; [`Harvester::harvest`] says what was written since the harvest before, and
//! begins anew; [`Harvester::disable`] turns it off. The writers are [`Writer`]s, one for each thread. What
//! holds: *each byte that was written after the log was turned on is in a harvest that is handed out after the write*, and in the
//! last one that begins ([`Harvester::harvest_last`]) if the write came before. Harvests do not stop the writers, and take no lock
//! that writers want. [`crate::order`] has the argument.
//!
//! # Two methods
//! * [`Method::Marks`] is what to take, unless there is a reason not to: after each write, the writer looks at the page's bit and
//!   sets it if it is clear. A harvest takes the bits. It takes no memory but the bitmap, and large leaves stay as they are.
//! * [`Method::Protect`] protects the pages; the first write to each since the last harvest makes it writable again and
//!   logs it. All further writes cost nothing at all, not even a look. But each page costs more at its first write and at the harvest,
//!   and where something was written, large leaves are split. It pays where pages are written many times between two
//!   harvests.
//!
//! `docs/memory.md` has figures of both.
//!
//! A vhost-user front-end does not harvest through us: it reads a bitmap that it shares with us, when it likes, and so nobody can
//! wait for the writers there. That is not this.
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
//! // While it writes: what is in `pages` was written, and can be copied now.
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
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod bitmap;
mod bounds;
mod control;
mod entry;
mod epoch;
mod error;
mod fault;
mod granules;
mod harvest;
mod level;
mod log;
mod node;
mod node_pool;
pub mod order;
mod pages;
mod protect;
mod rmap;
mod space;
mod tlb;
mod tree;
mod writer;

pub use control::Mmu;
pub use error::Error;
pub use harvest::{Harvester, Took};
pub use log::Method;
pub use pages::Pages;
pub use space::Space;
pub use writer::{Offline, Writer};
