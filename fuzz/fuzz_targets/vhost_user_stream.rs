//! Sends a stream of bytes and descriptors to each of the four ends of the vhost-user protocol.
//!
//! The input chooses the end, the pieces of the stream and its content. No input may cause a panic or a
//! wait. After an error that is not fatal, the reader must be at the start of the next message.
#![no_main]

use kickless_vhost_user::{
    Backend, BackendMessage, BackendRequester, Error, Frontend, FrontendMessage, FrontendResponder,
    RequestMessage, Wait,
};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Bytes that fit into the buffer of a socket without waiting.
const STREAM_MAX: usize = 8 << 10;

fuzz_target!(|data: &[u8]| {
    let [end, cut, fds, stream @ ..] = data else { return };
    let (theirs, ours) = UnixStream::pair().expect("a socket pair");
    let files: Vec<OwnedFd> =
        (0..fds % 10).map(|_| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")).collect();
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let stream = &stream[..stream.len().min(STREAM_MAX)];
    // One piece, which the input chooses, carries the descriptors.
    for (n, piece) in stream.chunks(usize::from(*cut).max(24)).enumerate() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if n == usize::from(fds / 16) && !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if sendmsg(&theirs, &[IoSlice::new(piece)], &mut control, flags).is_err() {
            break;
        }
    }
    drop(theirs);
    let wait = Wait::FOREVER;
    match end % 4 {
        0 => {
            let mut end = Backend::new(ours);
            while continues(end.recv(&wait).map(|received| received.is_some())) {}
        }
        1 => {
            let mut end = FrontendResponder::new(ours);
            while continues(end.recv(&wait).map(|received| received.is_some())) {}
        }
        2 => {
            let mut end = Frontend::new(ours);
            let code = FrontendMessage::code_from(u32::from(*fds) % 44 + 1).expect("a request");
            while continues(end.recv_reply(code, &wait).map(|_| true)) {}
        }
        _ => {
            let mut end = BackendRequester::new(ours);
            let code = BackendMessage::code_from(u32::from(*fds) % 10 + 1).expect("a request");
            while continues(end.recv_reply(code, &wait).map(|_| true)) {}
        }
    }
});

fn continues(received: Result<bool, Error>) -> bool {
    match received {
        Ok(more) => more,
        Err(error) => !error.is_fatal(),
    }
}
