//! Splits the bytes of a client into lines of bounded length.

/// The maximum length of a line, without its end. A description of a device has a few paths of 4 KiB at most.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// The bytes of a client that are not processed yet.
///
/// The caller takes all whole lines before it adds more bytes. The buffer then holds one line and the bytes
/// of one read at most.
#[derive(Debug, Default)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    /// The first byte that is not taken.
    start: usize,
    /// The first byte that was not searched for the end of a line.
    searched: usize,
}

/// The error of a line that is longer than [`LINE_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line is longer than {LINE_BYTES_MAX} bytes")]
pub struct LineTooLong;

impl LineBuffer {
    /// Adds bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next line, without its end. Returns `None` if no line is whole.
    ///
    /// # Errors
    /// The line is too long, whole or not. No later call succeeds.
    pub fn take(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        let end = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        let end = end.map(|at| self.searched + at);
        if end.unwrap_or(self.bytes.len()) - self.start > LINE_BYTES_MAX {
            return Err(LineTooLong);
        }
        let Some(end) = end else {
            self.searched = self.bytes.len();
            return Ok(None);
        };
        let line = self.start..end;
        self.start = end + 1;
        self.searched = self.start;
        Ok(Some(&self.bytes[line]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(buffer: &mut LineBuffer) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| buffer.take().unwrap().map(<[u8]>::to_vec)).collect()
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_the_reads(text in "[a-c\n]{0,60}", cuts in prop::collection::vec(1usize..9, 1..60)) {
            let (mut buffer, mut lines, mut rest) = (LineBuffer::default(), Vec::new(), text.as_bytes());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                buffer.push(now);
                lines.extend(taken(&mut buffer));
                rest = later;
            }
            let mut expected: Vec<&[u8]> = text.as_bytes().split(|byte| *byte == b'\n').collect();
            let left = expected.pop().unwrap_or_default();
            prop_assert_eq!(lines, expected);
            prop_assert_eq!(buffer.start < buffer.bytes.len(), !left.is_empty());
        }
    }

    #[test]
    fn long_lines_are_refused_whole_or_not() {
        let longest = vec![b'a'; LINE_BYTES_MAX];
        let mut buffer = LineBuffer::default();
        buffer.push(&longest);
        assert_eq!(buffer.take(), Ok(None));
        buffer.push(b"\n");
        assert_eq!(buffer.take(), Ok(Some(&longest[..])));
        buffer.push(&longest);
        buffer.push(b"b");
        assert_eq!(buffer.take(), Err(LineTooLong));
        buffer.push(b"\n");
        assert_eq!(buffer.take(), Err(LineTooLong));
    }
}
