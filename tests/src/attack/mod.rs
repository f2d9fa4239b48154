//! Runs the program with a thread that attacks its sandbox, and compares the answers with the table of
//! `docs/security-attacks.md`.

pub mod layout;
pub mod run;
pub mod table;
