//! Sends any messages to a new process, in which an old one lies about lengths, descriptors and their order.
//! All descriptors that come are closed.
#![no_main]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use kickless_handover::v1::{Device, Final, Plan};
use kickless_handover::{FromOld, NewEnd};
use libfuzzer_sys::fuzz_target;
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};

/// The most descriptors of a message that is sent, above those that the reader takes.
const FDS_MAX: usize = 130;
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// A message: its shape, kind, number, descriptors, and bytes.
type Sent<'a> = (u8, u8, u8, u8, &'a [u8]);

/// Returns a message that is whole.
fn framed(kind: u8, number: u8, fds: usize, len: u32, body: &[u8]) -> Vec<u8> {
    let (kind, fds) = (u16::from(kind % 12).to_le_bytes(), (fds as u16).to_le_bytes());
    [&kind[..], &fds, &u32::from(number).to_le_bytes(), &len.to_le_bytes(), body].concat()
}

fuzz_target!(|messages: Vec<Sent<'_>>| {
    let (old, new) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    let mut new = NewEnd::new(new);
    let mut has_failed = false;
    for (shape, kind, number, fds, bytes) in messages {
        let mut fds = usize::from(fds) % FDS_MAX;
        let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let (message, first) = match shape % 3 {
            0 => (bytes.to_vec(), writer.as_fd()),
            1 => (framed(kind, number, fds, bytes.len() as u32, bytes), writer.as_fd()),
            _ => {
                rustix::io::write(&memory, bytes).unwrap();
                fcntl_add_seals(&memory, SEALS).unwrap();
                fds = fds.max(1);
                (framed(kind, number, fds, u32::MAX, &[]), memory.as_fd())
            }
        };
        let mut given: Vec<BorrowedFd<'_>> = vec![writer.as_fd(); fds];
        if let Some(given) = given.first_mut() {
            *given = first;
        }
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !given.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&given)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(&old, &[IoSlice::new(&message)], &mut control, flags);
        match new.receive(Instant::now()) {
            Ok(FromOld::Plan(record)) => drop(record.read::<Plan>()),
            Ok(FromOld::Device { record, .. }) => drop(record.read::<Device>()),
            Ok(FromOld::Final { record, .. }) => drop(record.read::<Final>()),
            Ok(FromOld::Gone { .. }) => {}
            Ok(FromOld::Last) => break,
            Err(_) => {
                has_failed = true;
                break;
            }
        }
        let _ = new.confirm(Instant::now());
    }
    if has_failed {
        new.refuse("it lies");
    } else if let Ok(taken) = new.take(Instant::now()) {
        assert!(!taken.wait_for_end(Instant::now()));
    }
    drop((old, writer));
    // No process holds the writing end any more.
    assert_eq!(rustix::io::read(&reader, &mut [0; 1][..]), Ok(0));
});
