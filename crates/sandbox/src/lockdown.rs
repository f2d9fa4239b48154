//! Takes rights from this process, in the order in which they can be taken.

use std::io;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, set_no_new_privs};

use crate::error::Error;
use crate::landlock::Ruleset;
use crate::profile::{Profile, Stray};
use crate::trap::Refusals;
use crate::{capabilities, filter, process, trap};

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
    // Landlock and filters need it, unless the process has CAP_SYS_ADMIN.
    set_no_new_privs(true).map_err(failed("setting no_new_privs"))?;
    rules.restrict()
}

/// Takes all system calls from all threads of this process that `profile` does not allow. Returns the calls
/// that will be refused, if they are not to end the process.
///
/// A process calls this once: no profile allows the call that installs a filter.
///
/// # Errors
/// The kernel refuses the filter, or a thread has a filter of its own.
pub fn lock(profile: &Profile) -> Result<Option<&'static Refusals>, Error> {
    let programs = filter::compile(profile)?;
    let refusals = match profile.stray {
        Stray::Trap => Some(trap::catch().map_err(Error::Trap)?),
        Stray::Refuse | Stray::Kill => None,
    };
    programs.iter().try_for_each(filter::install)?;
    Ok(refusals)
}
