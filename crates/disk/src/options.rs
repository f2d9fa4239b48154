//! How a disk is opened.

use std::fmt;
use std::str::FromStr;

/// Whether the host's page cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Not (`O_DIRECT`).
    #[default]
    None,
    /// For reads and writes.
    Writeback,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Writeback => "writeback",
        })
    }
}

/// A name that is no cache mode's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cache mode is one of none, writeback")]
pub struct UnknownCache;

impl FromStr for Cache {
    type Err = UnknownCache;

    fn from_str(name: &str) -> Result<Self, UnknownCache> {
        match name {
            "none" => Ok(Self::None),
            "writeback" => Ok(Self::Writeback),
            _ => Err(UnknownCache),
        }
    }
}

/// How to open a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Refuse writes. The file need not be writable then.
    pub read_only: bool,
    /// Whether the host's page cache is used; means nothing for a disk that is no file.
    pub cache: Cache,
    /// Whether neighbouring requests are one for the kernel: see [`kickless_io::Engine::merge`].
    pub merge: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_names_go_both_ways() {
        for cache in [Cache::None, Cache::Writeback] {
            assert_eq!(cache.to_string().parse(), Ok(cache));
        }
        assert_eq!("unsafe".parse::<Cache>(), Err(UnknownCache));
    }
}
