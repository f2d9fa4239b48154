//! The guest's end of virtio-blk and virtio-net in user space: drives vhost-user back-ends, without a virtual
//! machine.
//!
//! A [`Disk`] drives a vhost-user-blk back-end, and a [`Card`] a vhost-user-net back-end. The sections below
//! are about disks, and the last one about network cards.
//!
//! A [`Disk`] is a connection to the unix socket of a back-end, with shared memory and queues. Three
//! interfaces use the same core, and can be used at the same time:
//!
//! * blocking: [`Disk::read_at`], [`Disk::write_at`], [`Disk::flush`] and so on, or [`Disk::run`] for any
//!   [`Request`];
//! * futures: [`Disk::read`], [`Disk::write`], [`Disk::start`], under any runtime or none;
//! * batches and polling: [`Queue::submit`], [`Queue::poll`], [`Queue::wait`], with a token for each
//!   request, and a descriptor for epoll ([`Queue::events`]).
//!
//! ```no_run
//! use kickless_driver::{Disk, Options, Request};
//!
//! // Serve a disk for this example: kickless blk --socket-path=/tmp/scratch.sock --blk-file=mem:64M
//! let disk = Disk::connect(Options::new("/tmp/scratch.sock"))?;
//! disk.write_at(&[7; 4096], 0)?;
//! disk.flush()?;
//!
//! // The same without copies, sixteen requests at once.
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
//! A request owns its memory until the device is done, even if its caller stops waiting. The completion
//! returns the memory. It consists of [`Buffer`]s: pieces of the disk's own shared memory ([`Disk::buffer`])
//! or of a file of the caller ([`Disk::register`]). A request needs no allocation and no copy; only
//! [`Disk::read_at`] and [`Disk::write_at`] copy.
//!
//! # Threads and locks
//! Each queue has a lock for submission and one for completion. Only two kinds of code hold both: the restart
//! of a queue, and a callback that submits a request (the function given to [`Queue::poll`], or a waker).
//!
//! A kick is a system call, so it happens after the submission lock is dropped. By then the request may be
//! done, the disk may be closed, or the connection may be replaced. So the kick uses a reference-counted
//! eventfd.
//!
//! A thread that polls or waits delivers all completions that it finds, also those of other threads. Of
//! several threads that wait at a queue, one sleeps on its events. The driver starts a thread of its own only
//! when a future needs one ([`Options::reactor`]).
//!
//! Lock order: the lock of the session with the back-end, the completion lock of a queue, its submission
//! lock, then any of the small ones (waiters, completions kept for pollers, the page pool). No two small
//! locks are held together.
//!
//! # The back-end
//! The back-end is not trusted. It can return wrong data, but nothing worse. If it breaks the rules of a ring
//! or of the protocol, the disk dies and every request in flight fails ([`Disk::failure`] has the reason).
//!
//! If the connection closes, the driver reconnects for up to [`Options::reconnect_limit`]. Requests wait
//! meanwhile. Then the driver sends all requests in flight again. The driver waits without limit for a
//! back-end that neither answers requests nor closes its socket.
//!
//! # Network cards
//! A [`Card`] has pairs of queues. Each [`QueuePair`] has one owner, and no call of it takes a lock or
//! allocates memory. Frames are in shared memory of the pair; [`QueuePair::send`] and
//! [`QueuePair::receive`] copy them, and [`QueuePair::forward`] sends received frames back without a copy.
//!
//! ```no_run
//! use kickless_driver::{Card, CardOptions, Interest, Outgoing};
//!
//! // Serve a card for this example: kickless net --socket-path=/tmp/card.sock --port=null,rate=500
//! let card = Card::connect(CardOptions::new("/tmp/card.sock"))?;
//! let mut pair = card.pair(0).expect("no other code has taken it");
//! let frame = [0xff; 60];
//! pair.send(&[Outgoing::from(&frame[..]); 32])?;
//! pair.wait(Interest::Receive, None)?;
//! pair.receive(32, |frame| println!("{} bytes", frame.len()))?;
//! # Ok::<(), kickless_driver::Error>(())
//! ```
//!
//! The command of the control queue ([`Card::set_pairs`]) has its own lock, which is taken before that of
//! the session. After a reconnection, rings begin anew, and frames in flight are lost.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod block;
mod buffer;
mod card;
mod choice;
mod connection;
mod control;
mod core;
mod device_kind;
mod disk;
mod error;
mod event;
mod future;
mod handle;
mod layout;
mod limits;
mod link;
mod memory;
#[cfg(all(test, loom))]
mod model;
mod offload;
mod options;
mod page_pool;
mod poll;
mod queue;
mod reactor;
mod reconnect;
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
#[cfg(fuzzing)]
pub use card::fuzzing;
pub use card::{Card, CardCounters, CardOptions, Frame, Interest, Outgoing, QueuePair};
pub use choice::Choice;
pub use disk::Disk;
pub use error::{Error, Failure, Invalid};
pub use future::{Finished, InFlight};
pub use kickless_virtqueue::driver::UsedError;
pub use offload::{Checksum, InvalidOffload, Offload, Protocol, Segmentation};
pub use options::{Options, Waiting};
pub use queue::{Events, Queue, SubmitError};
pub use request::{Completion, Kind, Request};
pub use ring::Counters;
