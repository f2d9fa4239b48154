//! The guest's end of virtio-blk in user space: drives any vhost-user-blk back-end, without a virtual machine.
//!
//! A [`Disk`] is a connection to a back-end's unix socket, memory that both share, and queues. Three faces use the same
//! core, at the same time if need be:
//!
//! * blocking: [`Disk::read_at`], [`Disk::write_at`], [`Disk::flush`] and so on, or [`Disk::run`] for any [`Request`];
//! * futures: [`Disk::read`], [`Disk::write`], [`Disk::start`], under any runtime or none;
//! * batches and polling: [`Queue::submit`], [`Queue::poll`], [`Queue::wait`], with a token for each request or a handler
//!   ([`Request::on_complete`]), and a descriptor for epoll ([`Queue::events`]).
//!
//! ```no_run
//! use kickless_driver::{Disk, Options, Request};
//!
//! // Serve a disk to try this on: kickless blk --socket-path=/tmp/scratch.sock --blk-file=mem:64M
//! let disk = Disk::connect(Options::new("/tmp/scratch.sock"))?;
//! disk.write_at(&[7; 4096], 0)?;
//! disk.flush()?;
//!
//! // The same without copies, sixteen at once.
//! let queue = disk.queue_of_thread();
//! let reads = (0..16).map(|n| Ok(Request::read(n * 4096, disk.buffer(4096)?).token(n)));
//! let mut batch = reads.collect::<Result<Vec<_>, kickless_driver::Error>>()?;
//! queue.submit_or_wait(&mut batch)?;
//! let mut done = 0;
//! while done < 16 {
//!     done += queue.wait(16, None, |completion| {
//!         assert!(completion.result.is_ok());
//!         println!("{}: {:?}", completion.token, completion.data);
//!     })?;
//! }
//! # Ok::<(), kickless_driver::Error>(())
//! ```
//!
//! # Memory
//! A request owns its memory until the device is done, whoever has stopped waiting for it, and brings it back. It is a
//! [`Buffer`]: a piece of the disk's own shared memory ([`Disk::buffer`]) or of a file of the caller's
//! ([`Disk::register`]). Nothing is allocated for a request, nor copied; only [`Disk::read_at`] and [`Disk::write_at`] copy.
//!
//! # Threads and locks
//! Each queue has a lock for submission and one for completion, which nobody needs at once but to set the queue up again.
//! A kick is a system call, so it is made after the submission lock was dropped, on an eventfd that is reference counted: by
//! then the request may be done, the disk closed, or the connection another one. Whoever polls or waits hands out what is
//! done to all others. Of several threads that wait at a queue, one sleeps on its events; there is no thread but theirs, until
//! a future or a handler needs one ([`Options::reactor`]). Lock order: a queue's completion, its submission, then anything
//! small (seats, what is kept for pollers, the pool), none of which is held while another is taken.
//!
//! # The back-end
//! It is not trusted: it can give wrong data, and nothing else. A lie about a ring or in a message kills the disk, and every
//! request in flight fails ([`Disk::failure`] tells why). A connection that closes is made again for as long as
//! [`Options::reconnect_limit`] says; meanwhile requests wait, and then all that were in flight are sent again. A back-end
//! that neither answers requests nor closes its socket is waited for.

mod block;
mod buffer;
mod connection;
mod control;
mod core;
mod disk;
mod error;
mod event;
mod future;
mod handle;
mod layout;
mod limits;
mod memory;
#[cfg(all(test, loom))]
mod model;
mod options;
mod page_pool;
mod queue;
mod reactor;
mod recovery;
mod request;
mod ring;
mod short_spin;
mod sleepers;
mod slots;
mod wait;
mod wait_leader;
mod waiter;

pub use buffer::{Buffer, Data, Registered, SharedBuffer};
pub use disk::{Disk, Lifetime};
pub use error::{Error, Failure, Invalid};
pub use future::{Finished, InFlight};
pub use kickless_virtqueue::driver::Lie;
pub use options::{Choice, Options, Waiting};
pub use queue::{Events, Queue, Refused};
pub use request::{Completion, Kind, OnComplete, Request};
pub use ring::Counters;
