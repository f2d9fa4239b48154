//! What a ring of either format yields, and what it holds for later.

/// A chain that was pushed while the areas were away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// What was pushed.
    pub id: u16,
    /// Bytes written.
    pub len: u32,
    /// Descriptors that it takes in a packed ring; 0 in a split one.
    pub descriptors: u16,
}

/// What a pop found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Popped {
    /// Nothing.
    Empty,
    /// A chain.
    Chain,
    /// A chain that cannot be taken before its translations are there.
    Missing,
    /// A chain with more to translate than one pop does: pop again.
    Unfinished,
}
