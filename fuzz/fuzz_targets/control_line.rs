//! Parses the bytes of a client of the control socket, up to the parameters of its calls, and gives its lines
//! the descriptors that come with them.
#![no_main]

use std::cell::Cell;
use std::sync::LazyLock;

use kickless_control::{DESCRIPTORS_MAX, Effect, Inbox, LINE_BYTES_MAX, METHODS, Method, Request, answer};
use kickless_daemon::Kinds;
use libfuzzer_sys::fuzz_target;

static KINDS: LazyLock<Kinds> = LazyLock::new(kickless_kinds::kinds);

/// A descriptor, which is open until it is dropped.
struct Descriptor<'a>(&'a Cell<usize>);

impl Drop for Descriptor<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((cut, bytes)) = input.split_first() else { return };
    let open = Cell::new(0);
    let mut inbox = Inbox::default();
    for piece in bytes.chunks(usize::from(*cut).max(1)) {
        // The last byte of a read says how many descriptors come with it.
        let count = piece.last().map_or(0, |byte| usize::from(*byte) % 5);
        open.set(open.get() + count);
        let pushed = inbox.push(piece, (0..count).map(|_| Descriptor(&open)));
        assert!(open.get() <= DESCRIPTORS_MAX && (pushed.is_ok() || open.get() == 0));
        while let Ok(Some(line)) = inbox.take() {
            assert!(line.len() <= LINE_BYTES_MAX && !line.contains(&b'\n'));
            let (id, result) = match Request::parse(line) {
                Ok(request) => {
                    let before = open.get();
                    match inbox.claim(request.fds.len()) {
                        Ok(claimed) => assert_eq!(claimed.len(), request.fds.len()),
                        Err(come) => assert!(come < request.fds.len() && before == come && open.get() == 0),
                    }
                    let call = Method::find(&request.method);
                    let parsed = call.and_then(|method| method.parse(request.params.clone(), &KINDS));
                    // Each kind of parameters gets these, whatever the name of the call is.
                    METHODS.iter().for_each(|method| drop(method.parse(request.params.clone(), &KINDS)));
                    assert!(METHODS.iter().any(|method| method.effect == Effect::Changes));
                    (request.id.unwrap_or_default(), parsed.map(|call| format!("{call:?}").into()))
                }
                Err((id, error)) => (id, Err(error)),
            };
            let answer = answer(&id, &result);
            assert!(answer.ends_with('\n') && answer.matches('\n').count() == 1);
        }
    }
    drop(inbox);
    assert_eq!(open.get(), 0);
});
