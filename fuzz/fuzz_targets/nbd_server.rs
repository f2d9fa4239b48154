//! An NBD server that says anything: while an export is agreed on, and in reply to requests.
#![no_main]

use kickless_disk::nbd_fuzzing::{handshake, replies};
use libfuzzer_sys::fuzz_target;

/// What a server begins with that goes on with options.
const BEGINNING: &[u8] = b"NBDMAGICIHAVEOPT";

fuzz_target!(|input: &[u8]| {
    match input {
        [0, said @ ..] => {
            handshake(said);
            handshake(&[BEGINNING, said].concat());
        }
        [how, script @ ..] => {
            // The pieces that a stream comes in change nothing of what it says.
            let whole = replies(how & 1 != 0, usize::MAX / 2, script);
            assert_eq!(replies(how & 1 != 0, usize::from(how >> 1), script), whole);
        }
        [] => {}
    }
});
