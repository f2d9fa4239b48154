//! The lines of a client, and the descriptors that came with them.
//!
//! The kernel hands out descriptors with bytes: a read ends behind the bytes of the message that had them. So
//! each descriptor is noted with the number of bytes that had come then. It belongs to a line that ends
//! there or later. A line takes as many as it names, the oldest first, and the rest of its own is closed
//! before the next line is read. So no descriptor is used for a later line than the one that it came with.
//!
//! One thing cannot be seen. If one read has the ends of several lines, its descriptors may be of any of
//! them. A client that names descriptors in a line without sending them takes those of its own next line.

use std::collections::VecDeque;

use super::lines::{LineBuffer, LineTooLong};

/// The most descriptors of a line: 127 queues of a TAP and a socket.
pub const DESCRIPTORS_MAX: usize = 128;

/// The bytes and the descriptors of a client that are not processed yet. A descriptor is a `T`, which closes
/// itself when it is dropped.
#[derive(Debug)]
pub struct Inbox<T> {
    lines: LineBuffer,
    /// Bytes that have come, and bytes of lines that were taken.
    come: u64,
    taken: u64,
    /// Each with the value of `come` of its read.
    descriptors: VecDeque<(u64, T)>,
}

/// The error of descriptors that cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostDescriptors {
    /// They are too many.
    #[error("more than {DESCRIPTORS_MAX} descriptors came with a line")]
    TooMany,
    /// All clients together have as many as they can.
    #[error(
        "the descriptors of this line find no room: all clients together can have {all} that are not in use by a \
         device: try again later"
    )]
    NoRoom {
        /// The number that all clients can have.
        all: usize,
    },
    /// This process can have no more.
    #[error(
        "the daemon has no free descriptors for this line: try again later, or raise its limit (ulimit -n)"
    )]
    NoneFree,
}

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self { lines: LineBuffer::default(), come: 0, taken: 0, descriptors: VecDeque::new() }
    }
}

impl<T> Inbox<T> {
    /// Adds the bytes and the descriptors of a read.
    ///
    /// # Errors
    /// Too many descriptors wait. All are closed.
    pub fn push(
        &mut self,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = T>,
    ) -> Result<(), LostDescriptors> {
        self.lines.push(bytes);
        self.come += bytes.len() as u64;
        self.descriptors.extend(descriptors.into_iter().map(|descriptor| (self.come, descriptor)));
        if self.descriptors.len() > DESCRIPTORS_MAX {
            self.descriptors.clear();
            return Err(LostDescriptors::TooMany);
        }
        Ok(())
    }

    /// Takes the next line, without its end. Returns `None` if no line is whole. Closes descriptors of the
    /// lines before it.
    ///
    /// # Errors
    /// The line is too long. No later call succeeds.
    pub fn take(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        self.close_unclaimed();
        let line = self.lines.take()?;
        self.taken += line.map_or(0, |line| line.len() as u64 + 1);
        Ok(line)
    }

    /// Takes `count` descriptors for the line that was taken last, and closes the others that came with it.
    ///
    /// # Errors
    /// Fewer have come, whose number is returned. They are closed.
    pub fn claim(&mut self, count: usize) -> Result<Vec<T>, usize> {
        let have = self.descriptors.len();
        let claimed = self.descriptors.drain(..count.min(have)).map(|(_, descriptor)| descriptor).collect();
        self.close_unclaimed();
        if have < count { Err(have) } else { Ok(claimed) }
    }

    /// Closes the descriptors of lines that were taken.
    fn close_unclaimed(&mut self) {
        while self.descriptors.front().is_some_and(|(at, _)| *at <= self.taken) {
            self.descriptors.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// A descriptor with the number of its line. Counts the open ones.
    struct Counted<'a>(&'a Cell<usize>, usize);

    impl<'a> Counted<'a> {
        fn new(open: &'a Cell<usize>, line: usize) -> Self {
            open.set(open.get() + 1);
            Self(open, line)
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    proptest! {
        /// Each message is a line with descriptors, or a part of one. Reads join a message with earlier ones,
        /// and never with one behind descriptors, as the kernel does.
        #[test]
        fn a_line_gets_its_own_descriptors(
            messages in prop::collection::vec((0usize..4, 0usize..4, any::<bool>(), any::<bool>()), 1..40),
        ) {
            let open = Cell::new(0);
            let mut inbox = Inbox::default();
            let (mut read, mut line) = (Vec::new(), 0);
            let mut lines: Vec<(usize, usize)> = vec![(0, 0)];
            let mut next = 0;
            for (sent, claimed, ends, joins) in messages {
                read.extend_from_slice(b"x");
                lines[line].0 += sent;
                if ends {
                    read.push(b'\n');
                    // A line that names more than it has could take those of the next one.
                    lines[line].1 = claimed.min(lines[line].0);
                }
                let of = line;
                if ends {
                    line += 1;
                    lines.push((0, 0));
                }
                if sent == 0 && joins {
                    continue;
                }
                inbox.push(&read, (0..sent).map(|_| Counted::new(&open, of))).unwrap();
                read.clear();
                while inbox.take().unwrap().is_some() {
                    let (_, claims) = lines[next];
                    let got = inbox.claim(claims).unwrap();
                    prop_assert!(got.iter().all(|counted| counted.1 == next));
                    next += 1;
                }
                // Only those of the line that is not whole are open.
                prop_assert_eq!(open.get(), lines[line].0);
            }
            drop(inbox);
            prop_assert_eq!(open.get(), 0);
        }
    }

    #[test]
    fn missing_and_superfluous_descriptors_are_closed() {
        let open = Cell::new(0);
        let some = |count: usize| (0..count).map(|_| Counted::new(&open, 0)).collect::<Vec<_>>();
        let mut inbox = Inbox::default();
        inbox.push(b"a\n", some(2)).unwrap();
        assert_eq!(inbox.take(), Ok(Some(&b"a"[..])));
        assert_eq!(inbox.claim(3).err(), Some(2));
        assert_eq!(open.get(), 0);
        // Half a line keeps as many as a line can have, and no more.
        inbox.push(b"b", some(DESCRIPTORS_MAX)).unwrap();
        assert_eq!(inbox.take(), Ok(None));
        assert_eq!(open.get(), DESCRIPTORS_MAX);
        assert_eq!(inbox.push(b"b", some(1)), Err(LostDescriptors::TooMany));
        assert_eq!(open.get(), 0);
    }
}
