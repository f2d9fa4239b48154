//! Options that earlier versions had.

use super::notation::Mistake;

/// The removed options, and the ends of the sentences that refuse them.
const REMOVED: [(&str, &str); 5] = [
    ("completion", "it was removed, because it made disks slower: leave it out"),
    ("sqpoll", "it was removed, because it made disks slower: leave it out"),
    ("fixed-buffers", "it was removed, because it made no disk faster: leave it out"),
    ("merge", "it was removed, because neighbouring requests are always merged: leave it out"),
    ("call-coalesce", "it was removed, because calls are sent at once: leave it out"),
];

/// Returns the mistake of an operator who gives an option that was removed. `None` if no option of this name
/// was removed.
pub fn removed_option(option: &str) -> Option<Mistake> {
    let (name, why) = REMOVED.into_iter().find(|(name, _)| *name == option)?;
    Some(Mistake::new(name, why))
}
