//! The vhost-user protocol, both ends: messages and file descriptors, nothing else.
//!
//! A session has two sockets, and a conversation on each. On the main socket the front-end sends requests
//! ([`FrontendMessage`]) and the back-end replies ([`Reply`]). On the socket of SET_BACKEND_REQ_FD the
//! back-end sends requests ([`BackendMessage`]) and the front-end replies ([`FrontendReply`]). Each
//! conversation has two ends, a [`Requester`] and a [`Responder`]:
//!
//! | socket | sends requests | replies |
//! | --- | --- | --- |
//! | main | [`Frontend`] | [`Backend`] |
//! | back-end's requests | [`BackendRequester`] | [`FrontendResponder`] |
//!
//! The crate has the messages of the specification (QEMU `docs/interop/vhost-user.rst`) that a disk or a
//! network card needs, in both directions: everything about features, memory, rings, the dirty log, the
//! in-flight buffer, the IOTLB, the configuration space, MTU and RARP, and the transfer of a device's state.
//! It knows the name of each other request, and whether it has a reply, but does not decode it
//! ([`MessageError::Unsupported`]). These are the requests for legacy byte orders, crypto sessions, postcopy
//! migration, GPUs, the device status, shared objects, shared memory regions, host notifiers, and calls and
//! errors in band. Nor does it decode the fields of Xen in memory regions.
//!
//! It does not know which protocol features were negotiated. That is the business of its users, as is
//! everything about rings, memory and threads.
//!
//! The crate checks a received message as far as the message's own bytes and file descriptors allow: lengths,
//! counts, and values that the protocol forbids. Addresses, sizes and ring indices are not checked.
//!
//! **Hostile peers.** At most [`PAYLOAD_MAX`] bytes and eight file descriptors are held for a message. File
//! descriptors are close-on-exec and have one owner, so that an error closes them. A peer may stop in the
//! middle of a message, or may not read. Every call takes a [`Wait`] that limits how long it waits for the
//! peer. Errors are fatal if the stream is out of step or gone; after others the stream can be used further
//! ([`Error::is_fatal`]).
//!
//! **Threads.** An end belongs to one thread at a time and takes no locks.
//!
//! ```
//! use std::os::unix::net::UnixStream;
//!
//! use kickless_vhost_user::{Backend, Error, Expects, Frontend, FrontendMessage, AfterRefusal, Reply, Wait};
//!
//! /// Serves as a back-end that offers no features, accepts any, and does nothing else.
//! fn serve(socket: UnixStream) -> Result<(), Error> {
//!     let wait = Wait::FOREVER; // or until an eventfd says stop
//!     let mut backend = Backend::new(socket);
//!     loop {
//!         let request = match backend.recv(&wait) {
//!             Ok(Some(request)) => request,
//!             Ok(None) => return Ok(()), // the front-end has left
//!             Err(Error::Rejected { header, .. }) => match backend.refuse(&header, &wait)? {
//!                 AfterRefusal::Continue => continue,
//!                 AfterRefusal::Disconnect => return Ok(()),
//!             },
//!             Err(error) => return Err(error),
//!         };
//!         let to = &request.header;
//!         match (&request.message, request.expects()) {
//!             (FrontendMessage::GetFeatures, _) => backend.reply(to, &Reply::U64(0), &wait)?,
//!             (FrontendMessage::SetFeatures(_), _) => backend.ack(to, true, &wait)?,
//!             (_, Expects::Nothing) => {}
//!             _ if backend.refuse(to, &wait)? == AfterRefusal::Continue => {}
//!             _ => return Ok(()),
//!         }
//!     }
//! }
//!
//! let (ours, theirs) = UnixStream::pair()?;
//! let server = std::thread::spawn(move || serve(theirs));
//! let mut frontend = Frontend::new(ours);
//! let features = frontend.call(&FrontendMessage::GetFeatures, false, &Wait::FOREVER)?;
//! assert!(matches!(features, Some(Reply::U64(0))));
//! let none = kickless_spec::features::Features::empty();
//! let ack = frontend.call(&FrontendMessage::SetFeatures(none), true, &Wait::FOREVER)?;
//! assert!(matches!(ack, Some(Reply::U64(0))));
//! let refused = frontend.call(&FrontendMessage::ResetDevice, true, &Wait::FOREVER)?;
//! assert!(matches!(refused, Some(Reply::U64(1))));
//! drop(frontend);
//! server.join().expect("the server does not panic")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod assembly;
mod backend;
mod body;
mod channel;
mod endpoint;
mod error;
mod frontend;
mod header;
mod message;
mod payload;
mod reply;

pub use assembly::{Assembly, Frame, HalfMessage};
pub use backend::BackendMessage;
pub use body::Encoded;
pub use channel::{Channel, Wait};
pub use endpoint::{AfterRefusal, Requester, Responder};
pub use error::{Error, MessageError};
pub use frontend::FrontendMessage;
pub use header::{HEADER_SIZE, Header, PAYLOAD_MAX};
pub use message::{Expects, Received, Refusal, ReplyTo, RequestMessage};
pub use payload::{
    Config, DeviceState, Inflight, Iotlb, LogBase, MemoryRegion, VringAddr, VringFd, VringState,
};
pub use reply::{DeviceStateReply, FrontendReply, Reply};

/// The front-end on the main socket.
pub type Frontend = Requester<FrontendMessage>;
/// The back-end on the main socket.
pub type Backend = Responder<FrontendMessage>;
/// The back-end on the socket for its own requests.
pub type BackendRequester = Requester<BackendMessage>;
/// The front-end on the socket for the back-end's requests.
pub type FrontendResponder = Responder<BackendMessage>;
