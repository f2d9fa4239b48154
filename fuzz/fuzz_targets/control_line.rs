//! Parses the bytes of a client of the control socket, up to the parameters of its calls.
#![no_main]

use kickless_control::{Effect, LINE_BYTES_MAX, LineBuffer, METHODS, Method, Request, answer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((cut, bytes)) = input.split_first() else { return };
    let mut lines = LineBuffer::default();
    for piece in bytes.chunks(usize::from(*cut).max(1)) {
        lines.push(piece);
        while let Ok(Some(line)) = lines.take() {
            assert!(line.len() <= LINE_BYTES_MAX && !line.contains(&b'\n'));
            let (id, result) = match Request::parse(line) {
                Ok(request) => {
                    let call = Method::find(&request.method);
                    let parsed = call.and_then(|method| method.parse(request.params.clone()));
                    // Each kind of parameters gets these, whatever the name of the call is.
                    METHODS.iter().for_each(|method| drop(method.parse(request.params.clone())));
                    assert!(METHODS.iter().any(|method| method.effect == Effect::Changes));
                    (request.id.unwrap_or_default(), parsed.map(|call| format!("{call:?}").into()))
                }
                Err((id, error)) => (id, Err(error)),
            };
            let answer = answer(&id, &result);
            assert!(answer.ends_with('\n') && answer.matches('\n').count() == 1);
        }
    }
});
