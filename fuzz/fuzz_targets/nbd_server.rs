//! Talks to an NBD server that sends any bytes, in the handshake and in replies.
#![no_main]

use kickless_disk::nbd_fuzzing::{handshake, handshake_with_infos, replies};
use libfuzzer_sys::fuzz_target;

/// The greeting of a server that supports options.
const BEGINNING: &[u8] = b"NBDMAGICIHAVEOPT";

fuzz_target!(|input: &[u8]| {
    match input {
        [0, said @ ..] => {
            handshake(said);
            handshake(&[BEGINNING, said].concat());
            handshake_with_infos(said);
        }
        [how, script @ ..] => {
            // The result must not depend on the division of the stream into pieces.
            let whole = replies(how & 1 != 0, usize::MAX / 2, script);
            assert_eq!(replies(how & 1 != 0, usize::from(how >> 1), script), whole);
        }
        [] => {}
    }
});
