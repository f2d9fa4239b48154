//! Addresses, one type for each space.

use std::fmt;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// Returns the address `bytes` higher, or `None` if it wraps.
            #[inline]
            pub fn checked_add(self, bytes: u64) -> Option<Self> {
                self.0.checked_add(bytes).map(Self)
            }

            /// Returns the bytes from `base` to this address, or `None` if `base` is higher.
            #[inline]
            pub fn offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// A guest-physical address.
    Gpa
}
address! {
    /// An address that a device behind a vIOMMU uses.
    Iova
}
address! {
    /// An address in the front-end's own address space. It names ring areas in SET_VRING_ADDR. We never
    /// dereference it.
    UserAddr
}
