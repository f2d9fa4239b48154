//! Results of a pop, and chains that are held back.

/// A chain that was pushed while the areas were away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The head, or the id in a packed ring.
    pub id: u16,
    /// Bytes written.
    pub len: u32,
    /// Descriptors of the chain in a packed ring; 0 in a split one.
    pub descriptors: u16,
}

/// The result of a pop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Popped {
    /// There is nothing to pop.
    Empty,
    /// A chain.
    Chain,
    /// A chain that cannot be popped before its translations are known.
    Missing,
    /// A chain with more to translate than one pop does. Pop again.
    Unfinished,
}
