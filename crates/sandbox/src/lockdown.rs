//! Takes rights from this process, in the order in which they can be taken.

use std::io;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, set_no_new_privs};

use crate::error::Error;
use crate::landlock::Ruleset;
use crate::{capabilities, process};

/// Takes rights that belong to threads from this process: core dumps, all capabilities but `kept`, new
/// privileges of programs, and all paths but those that `rules` allow. Threads and processes that it makes
/// afterwards have none of them either.
///
/// # Errors
/// This process has another thread, which would keep its rights, or the kernel refuses a step. Some rights
/// may be gone, so the process should end.
pub fn restrict(kept: CapabilitySet, rules: Ruleset) -> Result<(), Error> {
    let failed =
        |step| move |error: rustix::io::Errno| Error::Process { step, source: io::Error::from(error) };
    process::check_only_thread()?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
        .map_err(failed("setting the limit of core dumps"))?;
    capabilities::keep(kept).map_err(failed("dropping capabilities"))?;
    // Landlock needs it, unless the process has CAP_SYS_ADMIN.
    set_no_new_privs(true).map_err(failed("setting no_new_privs"))?;
    rules.restrict()
}
