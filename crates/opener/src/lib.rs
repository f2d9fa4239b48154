//! Opens files, binds and connects sockets, makes TAPs and starts passt, by their names.
//!
//! These functions are the only ones of the daemon that use a name of the host: a path, the name of a TAP, of
//! a group, of a server or of a program. All other code gets descriptors. They make the system calls in the
//! calling thread, or they ask another process to make them ([`use_opener`]). Then a sandbox can take the
//! right to use names from the daemon itself.
//!
//! | function | use |
//! | --- | --- |
//! | [`status`], [`image()`], [`reopen`], [`capture`] | images and their chains, captures |
//! | [`block_facts`], [`char_subsystem`], [`cpus_online`] | properties of devices and of the host, from /sys |
//! | [`Address::listen`], [`real_path`] | sockets of devices and of control; their names are removed with them |
//! | [`connect()`], [`resolve`], [`begin_tcp`] | servers and other back-ends |
//! | [`tap()`], [`start_passt`] | queues of TAPs, processes of passt |
//! | [`enter`] | the things that one device may use |
//! | [`explained`] | why a path is refused: the directory, the user |
//!
//! ```
//! use kickless_opener::{image, status};
//!
//! let status = status("/proc/self/exe".as_ref())?;
//! let program = image("/proc/self/exe".as_ref(), false, false)?;
//! assert_eq!(program.file.metadata()?.len(), status.size);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # Processes
//!
//! ```text
//! data process            opener                     launcher
//! calls of this crate --> serve: opens, binds,   --> launch: starts passt, and a process
//! (use_opener)            connects                   for each name that is looked up
//! ```
//!
//! Requests and replies are messages over a pair of sockets (SOCK_SEQPACKET), each with at most one
//! descriptor. The program makes the processes, with a [`socket_pair`] each, and takes their rights. This
//! crate has the functions that run in them: [`serve`], [`launch`] and [`LookUp::run`].
//!
//! The opener does not believe the data process, which parses everything that guests and servers send. It
//! carries a request out only if the request's thing is in an *entry*. [`enter`] makes an entry for each
//! device, and the opener admits what the operator named: at the start, in the configuration file, or with a
//! directory below which calls may name files ([`Authority`]). Three properties hold whatever the data
//! process sends:
//! - A file is opened by a path that an entry has, byte for byte, with the rights of the entry. Its canonical
//!   path, after all symbolic links, is below a root. Only backing images are found by other paths. They are
//!   read, below a root for calls or beside their image.
//! - An entry has a share of the requests that are carried out at a time, so a file system that never answers
//!   holds the share of one device.
//! - A message that is no request ends the opener, and with it the daemon.
//!
//! # What is passed
//! Arguments are plain data: names, numbers, and one of a few uses. There are no open flags, so a request
//! cannot ask for more than the daemon needs. Results are descriptors and the error number of the call that
//! failed. Both can pass through a socket. [`reopen`] passes a descriptor in, because only the descriptor
//! names its file for certain.
//!
//! Errors are numbers where the caller knows the option that is wrong, and makes the sentence
//! ([`std::io::Error`], [`NoTap`]). If a path is missing or closed, the process that used it adds which
//! directory is, and to which user ([`explained`]): no other process can look. A socket's error is a sentence
//! of this crate ([`SocketError`]), because a dozen calls on one path have to be told apart. So is that of a
//! file outside of the roots ([`Outside`]).
//!
//! # Threads
//! Any thread calls these functions, and they wait as long as the file system waits: without end for a server
//! of files that has gone. So workers and the control thread never call them. Calls are independent. None
//! waits for another, and the opener carries each out on a thread of its own. Dropping a [`Listener`] removes
//! its name, which is a call as well, and so are the drops of an [`Entry`] and of a [`PasstProcess`].
//!
//! # What holds on both sides of a process boundary
//! - The file behind a path can change between two calls. Each caller that asks for a [`status`] first, so
//!   as not to open a pipe, checks the descriptor again that it gets afterwards.
//! - The directory of a socket may belong to a user who puts symbolic links there. It is opened once, its
//!   names are looked up without following links, and what was found is changed by its descriptor.
//! - Locks of images (`F_OFD_SETLK`) and of captures (`flock`) belong to the open file description, and
//!   pass with it. No lock of the process (`F_SETLK`) is used.
//! - A relative path is relative to the working directory, which the daemon and the opener never change.
//! - A server sees the credentials of the process that connects, and a client those of the process that
//!   listens. The control socket looks at those of its clients only.
//! - The name of a backing image comes from the image above it. It is joined to the path of that image, and
//!   is as trusted as the image. A sandbox limits it by directories (roots), not by a list of names.
//!
//! # Descriptors instead of names
//! A client of the control socket can send a descriptor instead of a name. The path `fd:NAME` stands for it
//! in the call ([`descriptor_name`], [`Descriptors`]). Nothing is opened then, and a sandbox need not know
//! the file at all. [`is_same_description`] compares two descriptors, [`refuse_descriptors`] makes a socket
//! for clients that may send none, and [`peer`] tells which process has connected.
//!
//! # What does not go through here
//! Descriptors without a name (pipes, eventfds, memfds, epoll and io_uring instances, pairs of sockets);
//! `/proc` files of a worker thread, which only that thread's process can name; what librbd opens; interfaces
//! for AF_XDP (`net-port/src/xdp`), whose library binds its sockets itself; and commands that are no daemon
//! (`ctl`, `top`, `metrics`, `bench`). [`file()`] and [`cpus_online`] are always calls in this process.
//!
//! `clippy.toml` has the list of functions that use names. The daemon's crates refuse them outside of this
//! one.

mod answers;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod attack;
mod authority;
mod client;
mod connect;
mod descriptors;
mod directory;
mod entry;
mod error;
mod file;
#[cfg(fuzzing)]
pub mod fuzzing;
mod grant;
mod holder;
mod kernel;
mod launcher;
mod listener;
mod message;
mod name;
mod passt;
mod perform;
mod reason;
mod server;
mod socket;
mod sysfs;
mod tap;
mod wire;

pub use answers::{Alignment, BlockFacts, FileStatus};
pub use client::{leave_opener, use_opener};
pub use connect::{begin_tcp, connect, resolve};
pub use descriptors::{Descriptors, NoDescriptor, descriptor_name, is_descriptor_name};
pub use directory::SocketRights;
pub use entry::{Entry, enter};
pub use error::{SocketError, SocketProblem};
pub use file::{Opened, capture, config_file, file, image, reopen, status};
pub use grant::{Authority, Calls, Grant, Outside, PathUse, Reason, Refused, Root, Target, is_narrow};
pub use holder::{Holder, forget_holders, holder, note_holders};
pub use kernel::{Peer, is_same_description, peer, refuse_descriptors};
pub use launcher::{LookUp, StartLookUp, launch};
pub use listener::{Address, Listener, NameOfSocket, TURN_WAIT, real_path};
pub use message::socket_pair;
pub use passt::{PasstProcess, StartedPasst, has_passt, start_passt};
pub use perform::{Config, ConfigFile};
pub use reason::{Want, errno_of, explained, user_id};
pub use server::{End, serve};
pub use sysfs::{block_facts, char_subsystem, cpus_online, io_uring_disabled, note_host};
pub use tap::{NoTap, tap};
