//! The header extensions.
