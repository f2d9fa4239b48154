//! Making a ring with what the kernel has.

use crate::Error;
use io_uring::{Builder, IoUring};

/// Submissions go in batches; a longer one takes more than one call.
const SUBMISSIONS_MAX: u32 = 256;

/// Asks for features of a ring.
type Setup = fn(&mut Builder);

/// A ring for `depth` operations in flight, and whether it is enabled already.
///
/// Each attempt does without what the kernel before it lacked: 6.0 has rings of a single thread, 5.19
/// cooperative task work, which keeps completions from interrupting the worker. Deferred task work (6.1)
/// would go one step further, but a completion that is deferred wakes nobody who waits for the ring with
/// epoll (seen in 6.18).
pub(super) fn make(depth: u32) -> Result<(IoUring, bool), Error> {
    let attempts: [(Setup, bool); 3] = [
        (
            |builder| {
                builder
                    .setup_single_issuer()
                    .setup_coop_taskrun()
                    .setup_taskrun_flag()
                    .setup_submit_all()
                    // The ring belongs to the thread that enables it, not to the one that makes it.
                    .setup_r_disabled();
            },
            false,
        ),
        (
            |builder| {
                builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
            },
            true,
        ),
        (|_| {}, true),
    ];
    let mut refused = None;
    for (setup, enabled) in attempts {
        let mut builder = IoUring::builder();
        // Room for each completion, so that none overflows. A child process has no use for the rings.
        builder.setup_clamp().setup_cqsize(depth.next_power_of_two().max(2)).dontfork();
        setup(&mut builder);
        match builder.build(depth.next_power_of_two().min(SUBMISSIONS_MAX)) {
            Ok(ring) => return Ok((ring, enabled)),
            Err(e) => refused = Some(e),
        }
    }
    Err(Error::Uring {
        step: "io_uring_setup",
        source: refused.unwrap_or_else(|| std::io::ErrorKind::Unsupported.into()),
    })
}
