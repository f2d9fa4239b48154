//! The C interface of [`driver`]: `libkickless_driver` and `kickless_driver.h`.
//!
//! The header is generated from the doc comments of this crate. They say what C programs may rely on.
//!
//! This crate has no logic of its own, only what C needs:
//!
//! - handles behind pointers;
//! - negative errno values and a sentence instead of errors ([`error`]);
//! - structures that can grow ([`options`]);
//! - requests that name their memory ([`queue`]).
//!
//! Nothing unwinds into C: each function runs inside [`error::guard`].
//!
//! # Pointers
//! The caller promises the following with each call; the comments with `SAFETY` refer to it:
//!
//! - A pointer is null, or points to an object of its type. No other thread changes the object during the
//!   call.
//! - A handle came from this library and is not closed yet.
//! - An array has the length that goes with it.
//!
//! Every function checks for null and for unaligned pointers.
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
