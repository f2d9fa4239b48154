//! Descriptors that came with a call, by their names.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// The longest name of a descriptor.
const NAME_BYTES_MAX: usize = 32;
/// The beginning of a path that stands for a descriptor.
const PREFIX: &str = "fd:";

/// Returns the name of the descriptor for which the path `fd:NAME` stands. A file of this name is written
/// `./fd:NAME`.
pub fn descriptor_name(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(PREFIX).filter(|name| is_descriptor_name(name))
}

/// Returns whether a descriptor can have this name: a letter, and then letters, digits, `_` and `-`. So no
/// number is a name.
pub fn is_descriptor_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    let begins = name.as_bytes().first().is_some_and(u8::is_ascii_alphabetic);
    begins && name.len() <= NAME_BYTES_MAX && name.bytes().all(is_allowed)
}

/// Descriptors by their names. Dropping them closes what was not duplicated.
#[derive(Debug, Default)]
pub struct Descriptors(BTreeMap<String, OwnedFd>);

/// The error of a descriptor that is not there.
#[derive(Debug, thiserror::Error)]
pub enum NoDescriptor {
    /// No descriptor of this name came.
    #[error("no descriptor {name} came with the call: fd:{name} stands for one, and ./fd:{name} for a file")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The process has no free descriptor.
    #[error("the descriptor {name} cannot be duplicated")]
    Host {
        /// The name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Descriptors {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns another descriptor of the same open file description.
    ///
    /// # Errors
    /// There is no such name, or the process has no free descriptor.
    pub fn duplicate(&self, name: &str) -> Result<OwnedFd, NoDescriptor> {
        let found = self.0.get(name).ok_or_else(|| NoDescriptor::Unknown { name: name.into() })?;
        found.try_clone().map_err(|source| NoDescriptor::Host { name: name.into(), source })
    }
}

impl FromIterator<(String, OwnedFd)> for Descriptors {
    fn from_iter<I: IntoIterator<Item = (String, OwnedFd)>>(named: I) -> Self {
        Self(named.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |text: &'static str| descriptor_name(Path::new(text));
        assert_eq!(name("fd:image"), Some("image"));
        assert_eq!(name("fd:q-1_b"), Some("q-1_b"));
        for text in ["fd:", "fd:3", "fd:a/b", "fd:../a", "./fd:a", "/fd:a", "fd:\u{e9}", "fdimage", "FD:a"] {
            assert_eq!(name(text), None, "{text}");
        }
        let long = format!("a{}", "b".repeat(NAME_BYTES_MAX));
        assert!(!is_descriptor_name(&long) && is_descriptor_name(&long[1..]));
    }
}
