//! Opens files, binds and connects sockets, and makes TAPs, by their names.
//!
//! These functions are the only ones of the daemon that use a name of the host: a path, the name of a TAP, of
//! a group or of a server. All other code gets descriptors. So a sandbox can put another process behind this
//! crate, and take the right to use names from the daemon itself. Today they make the system calls in the
//! calling thread.
//!
//! | function | use |
//! | --- | --- |
//! | [`file()`], [`status`], [`text`], [`link`] | images and their chains, captures, the configuration file, /sys |
//! | [`reopen`] | another open file description of a file |
//! | [`Address::listen`], [`real_path`] | sockets of devices and of control; their names are removed with them |
//! | [`connect()`], [`resolve`], [`begin_tcp`] | servers and other back-ends |
//! | [`tap()`] | queues of TAPs |
//!
//! ```
//! use kickless_opener::{FileUse, file, status};
//!
//! assert!(status("/proc/self/exe".as_ref())?.is_file());
//! let program = file("/proc/self/exe".as_ref(), FileUse::Read)?;
//! assert!(program.metadata()?.len() > 0);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # What is passed
//! Arguments are plain data: names, numbers, and one of a few uses. There are no open flags, so a request
//! cannot ask for more than the daemon needs. Results are descriptors and the error number of the call that
//! failed. Both can pass through a socket. [`reopen`] passes a descriptor in, because only the descriptor
//! names its file for certain.
//!
//! Errors are numbers where the caller knows the option that is wrong, and makes the sentence
//! ([`std::io::Error`], [`NoTap`]). A socket's error is a sentence of this crate ([`SocketError`]), because a
//! dozen calls on one path have to be told apart.
//!
//! # Threads
//! Any thread calls these functions, and they wait as long as the file system waits: without end for a server
//! of files that has gone. So workers and the control thread never call them. Calls are independent. None
//! waits for another, and none has state, so a process behind this crate can execute each on a thread of its
//! own. Dropping a [`Listener`] removes its name, which is a call as well.
//!
//! # What holds on both sides of a process boundary
//! - The file behind a path can change between two calls. Each caller that asks for a [`status`] first, so
//!   as not to open a pipe, checks the descriptor again that it gets afterwards.
//! - The directory of a socket may belong to a user who puts symbolic links there. It is opened once, its
//!   names are looked up without following links, and what was found is changed by its descriptor.
//! - Locks of images (`F_OFD_SETLK`) and of captures (`flock`) belong to the open file description, and
//!   pass with it. No lock of the process (`F_SETLK`) is used.
//! - A relative path is relative to the working directory, which the daemon never changes.
//! - A server sees the credentials of the process that connects, and a client those of the process that
//!   listens. The control socket looks at those of its clients only.
//! - The name of a backing image comes from the image above it. It is joined to the path of that image, and
//!   is as trusted as the image. A sandbox limits it by directories (roots), not by a list of names.
//!
//! # Descriptors instead of names
//! A client of the control socket can send a descriptor instead of a name. The path `fd:NAME` stands for it
//! in the call ([`descriptor_name`], [`Descriptors`]). Nothing is opened then, and a sandbox need not know
//! the file at all. [`is_same_description`] compares two descriptors, and [`refuse_descriptors`] makes a
//! socket for clients that may send none.
//!
//! # What does not go through here
//! Descriptors without a name (pipes, eventfds, memfds, epoll and io_uring instances, pairs of sockets);
//! `/proc` files of a worker thread, which only that thread's process can name; programs that are started
//! (`passt`); what librbd opens; interfaces for AF_XDP (`net-port/src/xdp`), whose library binds its sockets
//! itself; and commands that are no daemon (`ctl`, `top`, `metrics`, `bench`).
//! `clippy.toml` has the list of functions that use names. The daemon's crates refuse them outside of this
//! one.

mod connect;
mod descriptors;
mod directory;
mod error;
mod file;
mod kernel;
mod socket;
mod tap;

pub use connect::{begin_tcp, connect, resolve};
pub use descriptors::{Descriptors, NoDescriptor, descriptor_name, is_descriptor_name};
pub use error::{SocketError, SocketProblem};
pub use file::{FileUse, file, link, reopen, status, text};
pub use kernel::{is_same_description, refuse_descriptors};
pub use socket::{Address, Listener, TURN_WAIT, real_path};
pub use tap::{NoTap, tap};
