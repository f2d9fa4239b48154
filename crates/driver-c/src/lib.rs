//! The C interface of [`driver`]: `libkickless_driver`, and `kickless_driver.h`, which is made of this crate's doc comments
//! and says what C programs may rely on.
//!
//! Here is no logic, only what C needs: handles behind pointers, negative errno values and a sentence instead of errors
//! ([`error`]), structures that can grow ([`options`]), requests that name their memory ([`queue`]). Nothing unwinds into C:
//! each function runs inside [`error::guard`].
//!
//! # Pointers
//! What the caller promises with each call, and the comments with `SAFETY` refer to: a pointer is null or points to what
//! its type says, which nobody else changes during the call; a handle came from this library and was not closed yet; with
//! an array goes its length. Null is looked for everywhere, and so are pointers that are not aligned.
#![expect(
    clippy::missing_safety_doc,
    reason = "it would be the same everywhere: see the section on pointers"
)]

pub mod buffer;
pub mod disk;
pub mod error;
pub mod options;
pub mod pointer;
pub mod queue;
pub mod request;
pub mod run;
