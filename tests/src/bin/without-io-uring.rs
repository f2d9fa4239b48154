//! Runs a program under a seccomp filter that forbids io_uring, as container runtimes do:
//! `without-io-uring PROGRAM ARGUMENT...`. The three system calls fail with EPERM.

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// io_uring_setup, io_uring_enter and io_uring_register: the same numbers on every architecture.
const FORBIDDEN: [i64; 3] = [425, 426, 427];
const EPERM: u32 = 1;

fn main() -> Result<()> {
    let mut arguments = env::args_os().skip(1);
    let program = arguments.next().context("usage: without-io-uring PROGRAM ARGUMENT...")?;
    let filter = SeccompFilter::new(
        FORBIDDEN.map(|number| (number, Vec::new())).into_iter().collect::<BTreeMap<_, _>>(),
        SeccompAction::Allow,
        SeccompAction::Errno(EPERM),
        env::consts::ARCH.try_into()?,
    )?;
    let filter: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&filter)?;
    Err(Command::new(&program).args(arguments).exec())
        .with_context(|| format!("cannot run {}", program.display()))
}
