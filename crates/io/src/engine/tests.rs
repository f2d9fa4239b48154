//! The cooperation of one engine's back-ends.

mod aio;
mod cancel;
mod uring;

use super::*;

fn ring(engine: &mut Engine) -> (&mut Uring, &mut Operations) {
    let Engine { ops, backends, .. } = engine;
    let Backend::Uring(uring) = &mut backends[0] else { panic!("no ring") };
    (uring, ops)
}

fn kernel_aio(engine: &Engine) -> Option<&Aio> {
    engine.backends.iter().find_map(|backend| match backend {
        Backend::Aio(aio) => Some(&**aio),
        Backend::Uring(_) | Backend::Threads(_) => None,
    })
}

fn pool(engine: &Engine) -> &Threads {
    match engine.backends.last() {
        Some(Backend::Threads(threads)) => threads,
        _ => panic!("no threads"),
    }
}
