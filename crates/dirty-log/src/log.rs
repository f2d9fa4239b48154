//! The log of a slot, as writers see it.

use crate::bitmap::DirtyBits;

/// The way in which writes are detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Each writer checks a bitmap after each write.
    Marks,
    /// Pages are write-protected until the first write.
    Protect,
}

/// The log of a slot, as writers see it.
pub(crate) struct Log {
    pub(crate) method: Method,
    pub(crate) bits: DirtyBits,
}

impl Log {
    #[inline]
    pub(crate) fn protects(&self) -> bool {
        self.method == Method::Protect
    }
}
