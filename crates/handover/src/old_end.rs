//! The end of the process that gives.

use crate::arbitration::{Decision, decide};
use crate::error::Error;
use crate::message::{Head, Kind};
use crate::parcel::Parcel;
use crate::record::Record;
use crate::socket::Socket;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// The end of the process that gives. After an error, and when it is dropped before the [offer](Self::offer),
/// this process goes on, and the new one finds the end of the channel.
#[derive(Debug)]
pub struct OldEnd {
    socket: Socket,
    finals: u32,
}

impl OldEnd {
    /// Takes an end of a pair of sockets of the type SOCK_SEQPACKET.
    pub fn new(channel: OwnedFd) -> Self {
        Self { socket: Socket::new(channel), finals: 0 }
    }

    /// Sends the plan, in which `served` devices have records. Returns when the new process is ready for
    /// them.
    ///
    /// # Errors
    /// The new process refuses, or has ended, or does not answer in time.
    pub fn plan(&mut self, served: u32, plan: Record, deadline: Instant) -> Result<(), Error> {
        self.send(Kind::Plan, served, plan, deadline)?;
        self.answer(Kind::Ready, served, deadline)
    }

    /// Sends a device, or sends it again. Returns when the new process has made it.
    ///
    /// # Errors
    /// As for [`OldEnd::plan`].
    pub fn device(&mut self, number: u32, device: Record, deadline: Instant) -> Result<(), Error> {
        self.send(Kind::Device, number, device, deadline)?;
        self.answer(Kind::Made, number, deadline)
    }

    /// Says that a device has left, whether it was sent or not.
    ///
    /// # Errors
    /// As for [`OldEnd::plan`].
    pub fn gone(&mut self, number: u32, deadline: Instant) -> Result<(), Error> {
        self.socket.send(Head::new(Kind::Gone, number), &[], &[], deadline)
    }

    /// Sends the final record of a device. Does not wait for an answer.
    ///
    /// # Errors
    /// As for [`OldEnd::plan`].
    pub fn final_record(&mut self, number: u32, record: Record, deadline: Instant) -> Result<(), Error> {
        self.send(Kind::Final, number, record, deadline)?;
        self.finals += 1;
        Ok(())
    }

    /// Says that all have been sent, and waits until the new process serves. From here on, only the decision
    /// tells which process does. It comes soon after the deadline.
    pub fn offer(self, deadline: Instant) -> Decision {
        // If it is not sent, the new process cannot take over, and the decision finds that too.
        let _ = self.socket.send_only(Head::new(Kind::Last, self.finals), &[], &[], deadline);
        decide(self.socket, deadline)
    }

    /// Tells the new process why it gets nothing. This process goes on.
    pub fn refuse(mut self, why: &str) {
        self.socket.refuse(why);
    }

    fn send(&mut self, kind: Kind, number: u32, record: Record, deadline: Instant) -> Result<(), Error> {
        let parcel = Parcel::of(record)?;
        for message in parcel.messages(kind, number) {
            if message.head.kind == Kind::More {
                self.answer(Kind::Got, number, deadline)?;
            }
            self.socket.send(message.head, message.body, message.fds, deadline)?;
        }
        Ok(())
    }

    fn answer(&mut self, kind: Kind, number: u32, deadline: Instant) -> Result<(), Error> {
        let head = self.socket.receive(deadline)?.head;
        match head == Head::new(kind, number) {
            true => Ok(()),
            false => Err(head.kind.out_of_order()),
        }
    }
}

/// Becomes readable when the new process has refused or ended.
impl AsFd for OldEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.fd.as_fd()
    }
}
