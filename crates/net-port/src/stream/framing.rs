//! The framing of `-netdev stream`: before each frame its length, four bytes, big-endian. Has no side
//! effects.

use kickless_spec::net::{FRAME_MAX, Header};

/// Bytes of a length.
pub(crate) const LEN_BYTES: usize = 4;
/// The longest frame, as for each other port.
pub(crate) const LEN_MAX: usize = FRAME_MAX - size_of::<Header>();
/// Free bytes before the first frame, so that a virtio-net header fits before each frame.
const HEADROOM: usize = size_of::<Header>() - LEN_BYTES;
/// Room for two of the longest frames: behind an incomplete frame is always room for its rest.
const CAPACITY: usize = HEADROOM + 2 * (LEN_BYTES + LEN_MAX);
/// More bytes than wait in any port for a stream to take them. A packet is added while fewer wait than the
/// longest frame has, and its segments with their lengths have less than three times as many.
const UNSENT_MAX: usize = 4 * (LEN_BYTES + LEN_MAX);

/// Finds the frames in a stream of bytes.
#[derive(Debug)]
pub struct Deframer {
    bytes: Box<[u8]>,
    /// The bytes that were received and not consumed.
    start: usize,
    end: usize,
    /// The length of the frame at `start`, if the whole frame is there.
    frame_len: Option<usize>,
}

/// The error of a stream whose next length is impossible. The stream cannot be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {0} bytes is announced, and the longest frame has {LEN_MAX}")]
pub struct InvalidLength(pub u32);

impl Default for Deframer {
    fn default() -> Self {
        Self { bytes: vec![0; CAPACITY].into_boxed_slice(), start: HEADROOM, end: HEADROOM, frame_len: None }
    }
}

impl Deframer {
    /// Goes on in the middle of a stream, of which another process has received these bytes. Returns `None`
    /// if they are more than one holds.
    pub(crate) fn with(bytes: &[u8]) -> Option<Self> {
        let mut deframer = Self::default();
        deframer.bytes[HEADROOM..].get_mut(..bytes.len())?.copy_from_slice(bytes);
        deframer.end += bytes.len();
        Some(deframer)
    }

    /// Returns the bytes of the stream that were not consumed.
    pub(crate) fn rest(&self) -> Vec<u8> {
        let mut rest = self.bytes[self.start..self.end].to_vec();
        // The caller may have written over the length of a frame that was found.
        if let Some(len) = self.frame_len {
            rest[..LEN_BYTES].copy_from_slice(&(len as u32).to_be_bytes());
        }
        rest
    }

    /// Forgets all bytes, for a new stream.
    pub fn clear(&mut self) {
        (self.start, self.end, self.frame_len) = (HEADROOM, HEADROOM, None);
    }

    /// Returns space for the next bytes of the stream, at least one. No whole frame is there: the last call
    /// of [`Deframer::find`] returned `false`.
    pub fn space(&mut self) -> &mut [u8] {
        let rest = self.end - self.start;
        if rest == 0 {
            self.clear();
        } else if CAPACITY - self.start < LEN_BYTES + LEN_MAX {
            // The rest of the frame may not fit behind its beginning.
            self.bytes.copy_within(self.start..self.end, HEADROOM);
            (self.start, self.end) = (HEADROOM, HEADROOM + rest);
        }
        &mut self.bytes[self.end..]
    }

    /// Adds the first `len` bytes of [`Deframer::space`] to the stream.
    pub fn filled(&mut self, len: usize) {
        self.end += len;
        debug_assert!(self.end <= CAPACITY);
    }

    /// Returns whether the next frame is there as a whole.
    ///
    /// # Errors
    /// The next length is impossible.
    pub fn find(&mut self) -> Result<bool, InvalidLength> {
        let stream = &self.bytes[self.start..self.end];
        if self.frame_len.is_none()
            && let Some((len, rest)) = stream.split_first_chunk::<LEN_BYTES>()
        {
            let announced = u32::from_be_bytes(*len);
            let len = usize::try_from(announced).ok().filter(|len| *len <= LEN_MAX);
            let len = len.ok_or(InvalidLength(announced))?;
            self.frame_len = (rest.len() >= len).then_some(len);
        }
        Ok(self.frame_len.is_some())
    }

    /// Returns the frame that was found, behind space for a virtio-net header. The caller may change all of
    /// this. Returns nothing if no frame was found.
    pub fn frame(&mut self) -> &mut [u8] {
        let Some(len) = self.frame_len else { return &mut [] };
        let frame = self.start + LEN_BYTES;
        &mut self.bytes[frame - size_of::<Header>()..frame + len]
    }

    /// Removes the frame that was found.
    pub fn consume(&mut self) {
        if let Some(len) = self.frame_len.take() {
            self.start += LEN_BYTES + len;
        }
    }
}

/// Frames that wait for a stream to take them.
#[derive(Debug, Default)]
pub(crate) struct Framer {
    bytes: Vec<u8>,
    /// Bytes that the stream has taken.
    start: usize,
}

impl Framer {
    /// Goes on with bytes that a stream has not taken from another process. Returns `None` if they are more
    /// than wait in any port.
    pub(crate) fn with(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= UNSENT_MAX).then(|| Self { bytes: bytes.to_vec(), start: 0 })
    }

    /// Forgets all bytes, for a new stream.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }

    /// Adds a frame. Forgets the bytes that the stream has taken when they are as many as those that wait,
    /// so each byte is moved once at most, and the memory is bounded by what waits.
    pub(crate) fn push(&mut self, frame: &[u8]) {
        debug_assert!(frame.len() <= LEN_MAX);
        if self.start > 0 && self.start >= self.rest().len() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(&(frame.len() as u32).to_be_bytes());
        self.bytes.extend_from_slice(frame);
    }

    /// Returns the bytes that the stream has not taken.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Removes the first `len` bytes of [`Framer::rest`].
    pub(crate) fn taken(&mut self, len: usize) {
        self.start += len;
        if self.start == self.bytes.len() {
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::Random;

    /// Passes `stream` on in pieces of random lengths. Returns the frames, and the error if there is one.
    fn frames(stream: &[u8], random: &mut Random) -> (Vec<Vec<u8>>, Option<InvalidLength>) {
        let (mut deframer, mut found, mut rest) = (Deframer::default(), Vec::new(), stream);
        loop {
            match deframer.find() {
                Err(error) => return (found, Some(error)),
                Ok(true) => {
                    let frame = deframer.frame();
                    found.push(frame[size_of::<Header>()..].to_vec());
                    // A header that is written before the frame.
                    frame[..size_of::<Header>()].fill(0xee);
                    deframer.consume();
                }
                Ok(false) if rest.is_empty() => return (found, None),
                Ok(false) => {
                    let space = deframer.space();
                    let len = (1 + random.below(space.len() as u64) as usize).min(rest.len());
                    let (piece, more) = rest.split_at(len);
                    space[..len].copy_from_slice(piece);
                    deframer.filled(len);
                    rest = more;
                }
            }
        }
    }

    #[test]
    fn frames_are_found_in_pieces_of_any_length() {
        let mut random = Random(7);
        for _ in 0..20 {
            let (mut framer, mut sent) = (Framer::default(), Vec::new());
            for nth in 0..20 {
                let len = [0, 1, 60, 1514, LEN_MAX as u64][random.below(5) as usize];
                sent.push(vec![nth; len as usize]);
                framer.push(&vec![nth; len as usize]);
            }
            let mut stream = Vec::new();
            while !framer.rest().is_empty() {
                let len = 1 + random.below(framer.rest().len() as u64) as usize;
                stream.extend_from_slice(&framer.rest()[..len]);
                framer.taken(len);
            }
            assert_eq!(frames(&stream, &mut random), (sent, None));
        }
    }

    /// A stream that takes as much as it gets, and never all of it.
    #[test]
    fn frames_that_wait_bound_the_memory() {
        let (mut framer, mut stream) = (Framer::default(), Vec::new());
        for number in 0..1000u32 {
            framer.push(&[number as u8; 1500]);
            // Three frames wait, or a part of one more.
            let len = framer.rest().len().saturating_sub(3 * 1504 + 700);
            stream.extend_from_slice(&framer.rest()[..len]);
            framer.taken(len);
            assert!(framer.bytes.capacity() <= 32 * 1504, "{}", framer.bytes.capacity());
        }
        let (found, _) = frames(&stream, &mut Random(1));
        assert_eq!(found.len(), 996);
        assert!(found.iter().zip(0u32..).all(|(frame, number)| frame[..] == [number as u8; 1500]));
    }

    #[test]
    fn an_impossible_length_ends_the_stream() {
        let mut framer = Framer::default();
        framer.push(&[7; 60]);
        for len in [LEN_MAX as u32 + 1, u32::MAX] {
            let stream = [framer.rest(), &len.to_be_bytes(), &[0; 100]].concat();
            let (found, error) = frames(&stream, &mut Random(1));
            assert_eq!((found.len(), error), (1, Some(InvalidLength(len))));
        }
    }

    #[test]
    fn a_stream_goes_on_in_another_process() {
        let mut framer = Framer::default();
        [60, 1514, 0, LEN_MAX].iter().for_each(|len| framer.push(&vec![*len as u8; *len]));
        let stream = framer.rest().to_vec();
        for at in [0, 3, 4, 64, 65, 70, 1500, 1600, stream.len() - 1, stream.len()] {
            for (taken, is_found) in [(0, false), (0, true), (1, true)] {
                let (before, after) = stream.split_at(at);
                let mut deframer = Deframer::with(before).unwrap();
                let mut found = Vec::new();
                for _ in 0..taken {
                    if deframer.find().unwrap() {
                        found.push(deframer.frame()[size_of::<Header>()..].to_vec());
                        deframer.consume();
                    }
                }
                if is_found && deframer.find().unwrap() {
                    // A header for the driver, which has no chains yet.
                    deframer.frame()[..size_of::<Header>()].fill(0xee);
                }
                let rest = [&deframer.rest()[..], after].concat();
                found.extend(frames(&rest, &mut Random(1)).0);
                let lens: Vec<_> = found.iter().map(Vec::len).collect();
                assert_eq!(lens, [60, 1514, 0, LEN_MAX], "{at} {taken} {is_found}");
                // The sender goes on as well.
                framer = Framer::with(after).unwrap();
                framer.push(&[7; 60]);
                let both = [before, framer.rest()].concat();
                assert_eq!(frames(&both, &mut Random(1)).0.len(), 5);
            }
        }
        assert!(Deframer::with(&vec![0; CAPACITY]).is_none() && Framer::with(&vec![0; 1 << 20]).is_none());
    }

    #[test]
    fn a_half_frame_is_no_frame() {
        let mut framer = Framer::default();
        framer.push(&[7; 60]);
        for len in 0..64 {
            assert_eq!(frames(&framer.rest()[..len], &mut Random(1)), (Vec::new(), None));
        }
    }
}
