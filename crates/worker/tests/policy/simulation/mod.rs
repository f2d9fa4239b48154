//! A simulated worker with one queue: loads, a machine, and the policy or a fixed rule in between.
//! Deterministic.

pub(crate) mod chooser;
pub(crate) mod crowd;
pub(crate) mod load;
pub(crate) mod machine;
pub(crate) mod noisy;
pub(crate) mod patterns;
pub(crate) mod stuck;
pub(crate) mod table;
