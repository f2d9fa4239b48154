//! Parses names of Ceph images as an operator or a program may write them.
#![no_main]

use kickless_disk::RbdName;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    for text in [input.to_owned(), format!("rbd:{input}"), format!("rbd:p/i?{input}")] {
        match text.parse::<RbdName>() {
            // The name is displayed as it was written.
            Ok(name) => assert_eq!(name.to_string(), text),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
