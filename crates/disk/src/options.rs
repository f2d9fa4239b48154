//! The options for opening a disk.

use std::fmt;
use std::str::FromStr;

/// The use of the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// No cache (`O_DIRECT`).
    #[default]
    None,
    /// The cache is used for reads and writes.
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

/// The error for an unknown name of a cache mode.
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

/// The options for opening a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Refuse writes. Then the file need not be writable.
    pub read_only: bool,
    /// The use of the host's page cache. It has no effect on a disk that is not a file.
    pub cache: Cache,
    /// The largest cache of the mapping of all images of a chain together, in bytes. `None`: 32 MiB for each
    /// image and at most 128 MiB. It is never larger than the whole mapping. Only for a disk with a mapping,
    /// such as a qcow2 image.
    pub cache_size: Option<u64>,
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
