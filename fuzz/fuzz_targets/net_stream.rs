//! Finds the frames of a stream that comes in any pieces, and compares them with those of the whole stream.
#![no_main]

use kickless_net_port::{Deframer, InvalidLength};
use kickless_spec::net::{FRAME_MAX, Header};
use libfuzzer_sys::fuzz_target;

const HEADER: usize = size_of::<Header>();

/// Returns the frames of a stream that is there as a whole, and the error that ends it.
fn frames(mut stream: &[u8]) -> (Vec<&[u8]>, Option<InvalidLength>) {
    let mut frames = Vec::new();
    while let Some((len, rest)) = stream.split_first_chunk() {
        let len = u32::from_be_bytes(*len);
        if len as usize > FRAME_MAX - HEADER {
            return (frames, Some(InvalidLength(len)));
        }
        let Some((frame, rest)) = rest.split_at_checked(len as usize) else { break };
        frames.push(frame);
        stream = rest;
    }
    (frames, None)
}

fuzz_target!(|input: (&[u8], &[u8])| {
    let (pieces, stream) = input;
    let (expected, error) = frames(stream);
    let mut expected = expected.into_iter();
    let (mut deframer, mut rest) = (Deframer::default(), stream);
    let mut pieces = pieces.iter().cycle();
    loop {
        match deframer.find() {
            Ok(true) => {
                let found = deframer.frame();
                assert_eq!(Some(&found[HEADER..]), expected.next());
                found.fill(0xee);
                deframer.consume();
            }
            Ok(false) if rest.is_empty() => break assert_eq!(error, None),
            Ok(false) => {
                let space = deframer.space();
                assert!(!space.is_empty());
                let len = pieces.next().map_or(usize::MAX, |piece| 1 + usize::from(*piece));
                let (here, more) = rest.split_at(len.min(space.len()).min(rest.len()));
                space[..here.len()].copy_from_slice(here);
                deframer.filled(here.len());
                rest = more;
            }
            Err(found) => break assert_eq!(error, Some(found)),
        }
    }
    assert_eq!(expected.next(), None);
});
