//! The log of a slot, as writers see it.

use crate::bitmap::Bits;

/// How writes are found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Each write looks at a bitmap.
    Marks,
    /// Pages are protected against writing until the first write.
    Protect,
}

/// The log of a slot, as writers see it.
pub(crate) struct Log {
    pub(crate) method: Method,
    pub(crate) bits: Bits,
}

impl Log {
    #[inline]
    pub(crate) fn protects(&self) -> bool {
        self.method == Method::Protect
    }
}
