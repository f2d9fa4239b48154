//! Takes the requests of a process that uses no names, and finds that it gets only the files that its devices
//! name, with the rights that they have.
#![no_main]

use std::path::Path;

use kickless_opener::Target;
use kickless_opener::fuzzing::{Devices, reply};
use libfuzzer_sys::fuzz_target;

const WRITTEN: &str = "/a";
const READ: &str = "/b";
const CHAIN: &str = "/c";
const CAPTURE: &str = "/d";
const SOCKET: &str = "/s";

fuzz_target!(|messages: Vec<&[u8]>| {
    let image = |path: &str, writes, chain| Target::Image { path: path.into(), writes, chain };
    let named = vec![
        image(WRITTEN, true, false),
        image(READ, false, false),
        image(CHAIN, true, true),
        Target::Capture { path: CAPTURE.into() },
        Target::Tcp { host: "h".into(), port: 1 },
    ];
    let mut devices = Devices::new(named, SOCKET.into());
    for message in messages {
        reply(message);
        let Some(allowed) = devices.take(message) else { continue };
        if allowed.is_backing {
            assert!(!allowed.writes);
            continue;
        }
        let may =
            |names: &[&str]| names.iter().any(|name| allowed.path.as_os_str() == Path::new(name).as_os_str());
        let written = [WRITTEN, CHAIN, CAPTURE, SOCKET];
        assert!(if allowed.writes { may(&written) } else { may(&[WRITTEN, READ, CHAIN]) }, "{allowed:?}");
    }
});
