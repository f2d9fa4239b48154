//! The files of librbd, which reads them itself, in the process that serves.

use std::path::{Path, PathBuf};

use kickless_opener::Target;
use kickless_sandbox::{Access, Error, Ruleset, place};

/// The name of the library in grants.
pub(super) const NAME: &str = "rbd";

/// The places that librbd and what it uses read by default: its configuration and its keys, that of OpenSSL,
/// and what the C library needs to find a host and the time zone.
const DEFAULT_PLACES: &[&str] = &[
    "/etc/ceph",
    "/etc/ssl",
    "/usr/lib/ssl",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/localtime",
    "/sys/devices/system/cpu/online",
];

/// Returns the files that the settings of the library name, or `None` if the service does not need it.
pub(super) fn files(named: &[Target]) -> Option<Vec<PathBuf>> {
    let of = |target: &Target| match target {
        Target::Library { name, files } if name == NAME => Some(files.clone()),
        _ => None,
    };
    named.iter().filter_map(of).reduce(|all, more| [all, more].concat())
}

/// Lets the library read its files, those beside them, and those below the directories that the operator
/// allows.
///
/// # Errors
/// The kernel refuses a rule.
pub(super) fn allow(rules: &mut Ruleset, files: &[PathBuf], allowed: &[PathBuf]) -> Result<(), Error> {
    let beside = files.iter().filter_map(|file| file.parent());
    for path in DEFAULT_PLACES.iter().map(Path::new).chain(beside).chain(allowed.iter().map(PathBuf::as_path))
    {
        // A place that is missing is that of another system.
        let Ok(place) = place(path) else { continue };
        // The second right is one of directories.
        if rules.allow(&place, Access::READ_FILE | Access::READ_DIR).is_err() {
            rules.allow(&place, Access::READ_FILE)?;
        }
    }
    Ok(())
}
