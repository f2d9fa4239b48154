//! The end of the process that takes over.

use crate::arbitration::Taken;
use crate::error::Error;
use crate::message::{Head, Kind};
use crate::order::Order;
use crate::parcel::Arriving;
use crate::record::Record;
use crate::socket::{Message, Socket};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// The end of the process that takes over. When it is dropped before [`NewEnd::take`], the old process goes
/// on.
#[derive(Debug)]
pub struct NewEnd {
    socket: Socket,
    order: Order,
    /// The answer that the old process waits for.
    answer: Option<Head>,
}

/// A message of the old process.
#[derive(Debug)]
pub enum FromOld {
    /// A [`Plan`](crate::v1::Plan). The old process waits for [`NewEnd::confirm`].
    Plan(Record),
    /// A [`Device`](crate::v1::Device), for the first time or again. The old process waits for
    /// [`NewEnd::confirm`].
    Device {
        /// The position of the device in the plan.
        number: u32,
        /// Its record.
        record: Record,
    },
    /// A device has left, whether it was sent or not.
    Gone {
        /// The position of the device in the plan.
        number: u32,
    },
    /// A [`Final`](crate::v1::Final).
    Final {
        /// The position of the device in the plan.
        number: u32,
        /// Its record.
        record: Record,
    },
    /// All have come: each device of the plan that is served, and the final record of each that has not left.
    Last,
}

impl NewEnd {
    /// Takes an end of a pair of sockets of the type SOCK_SEQPACKET.
    pub fn new(channel: OwnedFd) -> Self {
        Self { socket: Socket::new(channel), order: Order::default(), answer: None }
    }

    /// Waits for a message. Each comes in the order that [`FromOld`] shows.
    ///
    /// # Errors
    /// The old process has refused or ended, or what it sent is not for this moment.
    pub fn receive(&mut self, deadline: Instant) -> Result<FromOld, Error> {
        let message = self.socket.receive(deadline)?;
        let Head { kind, number, .. } = message.head;
        self.order.next(message.head)?;
        let record = self.record(message, deadline)?;
        let answers = match kind {
            Kind::Plan => Some(Kind::Ready),
            Kind::Device => Some(Kind::Made),
            _ => None,
        };
        self.answer = answers.map(|answer| Head::new(answer, number));
        Ok(match kind {
            Kind::Plan => FromOld::Plan(record),
            Kind::Device => FromOld::Device { number, record },
            Kind::Final => FromOld::Final { number, record },
            Kind::Gone => FromOld::Gone { number },
            _ => FromOld::Last,
        })
    }

    /// Tells the old process that the plan can be served, or that the device is made.
    ///
    /// # Errors
    /// The old process has refused or ended.
    pub fn confirm(&mut self, deadline: Instant) -> Result<(), Error> {
        match self.answer.take() {
            Some(answer) => self.socket.send(answer, &[], &[], deadline),
            None => Ok(()),
        }
    }

    /// Tells the old process why this one does not take over.
    pub fn refuse(mut self, why: &str) {
        self.socket.refuse(why);
    }

    /// Takes over, after [`FromOld::Last`]. From a success on, the old process never serves again.
    ///
    /// # Errors
    /// The old process goes on, or has ended. This process must not serve.
    pub fn take(self, deadline: Instant) -> Result<Taken, Error> {
        match self.order.is_complete() {
            true => Taken::send(self.socket, deadline),
            false => Err(Kind::Taken.out_of_order()),
        }
    }

    /// Returns the record of a message. Receives its other descriptors.
    fn record(&mut self, message: Message, deadline: Instant) -> Result<Record, Error> {
        let number = message.head.number;
        let mut arriving = Arriving::new(message)?;
        while !arriving.is_complete() {
            self.socket.send(Head::new(Kind::Got, number), &[], &[], deadline)?;
            arriving.add(self.socket.receive(deadline)?)?;
        }
        arriving.record()
    }
}
