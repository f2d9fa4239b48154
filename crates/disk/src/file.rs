//! A raw image or a block device.

mod open;
mod request;
mod topology;

use crate::bounce::Pool;
use crate::range::Ranges;
use crate::{Error, Limits};
use kickless_io::{Engine, FileId};
use std::fs::File;
use std::sync::Arc;

/// A disk in a file.
#[derive(Debug)]
pub struct FileDisk {
    file: Arc<File>,
    identity: String,
    limits: Limits,
    direct: Option<Direct>,
}

/// What O_DIRECT demands, and what helps to meet it.
#[derive(Debug)]
struct Direct {
    /// Offsets and lengths are multiples of this; a power of two, at least 512.
    block: u64,
    /// Addresses are multiples of this; a power of two.
    address: usize,
    pool: Arc<Pool>,
    /// Where a block is larger than a sector.
    ranges: Option<Arc<Ranges>>,
}

impl FileDisk {
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    /// What offsets and lengths of operations are multiples of.
    pub(crate) fn unit(&self) -> u64 {
        self.direct.as_ref().map_or(crate::SECTOR, |direct| direct.block)
    }

    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<FileId, Error> {
        Ok(engine.register(self.file.clone())?)
    }
}
