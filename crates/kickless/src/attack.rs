//! Tries everything that the sandbox forbids, in a thread of the process that serves, for tests. Release
//! builds do not have this module.
//!
//! The variable of the environment has a directory and the names of tries. The thread waits until standard
//! input ends, so a test can wait until devices are served, and change files. Then it makes the tries in
//! their order and prints a line for each:
//!
//! ```text
//! attack: openat EPERM
//! attack: execve            the process ends before it prints an answer
//! ```
//!
//! At the end it asks the process to end, as an operator does. Without names of tries, it prints those that
//! there are.

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, mpsc};
use std::thread;

use anyhow::{Context, Result};
use kickless_io::attack::Ring;
use kickless_opener::attack::Refusal;

#[cfg(not(debug_assertions))]
compile_error!("only tests attack");

/// The variable that starts the attack.
const VARIABLE: &str = "KICKLESS_ATTACK";
/// The names of error numbers that tests name. They are the same on all processors that this program is
/// built for.
const ERRORS: &[(i32, &str)] = &[
    (1, "EPERM"),
    (2, "ENOENT"),
    (3, "ESRCH"),
    (7, "E2BIG"),
    (8, "ENOEXEC"),
    (9, "EBADF"),
    (10, "ECHILD"),
    (11, "EAGAIN"),
    (13, "EACCES"),
    (14, "EFAULT"),
    (17, "EEXIST"),
    (19, "ENODEV"),
    (22, "EINVAL"),
    (38, "ENOSYS"),
    (40, "ELOOP"),
    (75, "EOVERFLOW"),
    (77, "EBADFD"),
    (95, "EOPNOTSUPP"),
    (97, "EAFNOSUPPORT"),
    (111, "ECONNREFUSED"),
];

/// The attack that is to be made.
struct Attack {
    directory: PathBuf,
    names: Vec<String>,
}

static ATTACK: OnceLock<Attack> = OnceLock::new();

/// Reads the variable, and looks at what tries need. Must be called before the process loses its rights.
///
/// # Errors
/// The directory lacks a file.
pub(crate) fn prepare() -> Result<()> {
    let Some(value) = env::var_os(VARIABLE) else { return Ok(()) };
    let mut words = value.as_bytes().split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    let directory = PathBuf::from(OsString::from_vec(words.next().unwrap_or_default().to_vec()));
    kickless_opener::attack::prepare(&directory).with_context(|| format!("{VARIABLE}={value:?}"))?;
    kickless_sandbox::attack::prepare();
    let names = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    ATTACK.get_or_init(|| Attack { directory, names });
    Ok(())
}

/// Starts the thread, if there is an attack. Must be called before the process loses system calls, because
/// the thread has a ring as each worker has.
///
/// # Errors
/// There is no thread to be had.
pub(crate) fn start() -> Result<()> {
    let Some(Attack { directory, names }) = ATTACK.get() else { return Ok(()) };
    let (has_ring, made) = mpsc::channel();
    thread::Builder::new().name("attack".into()).spawn(move || {
        let mut ring = Ring::new().ok();
        drop(has_ring);
        while rustix::io::read(rustix::stdio::stdin(), &mut [0; 64]).is_ok_and(|len| len > 0) {}
        if names.is_empty() {
            let of_ring = kickless_io::attack::names();
            let names = kickless_sandbox::attack::names().chain(of_ring).map(str::to_owned);
            let lies = kickless_opener::attack::names().into_iter().map(str::to_owned);
            names.chain(lies).for_each(|name| print(&name, "known"));
        }
        for name in names {
            print(name, &attempt(name, directory, ring.as_mut()));
        }
        kickless_sandbox::attack::ask_to_end();
    })?;
    // Nothing is sent: this is the end of the channel.
    let _: Result<(), _> = made.recv();
    Ok(())
}

/// Makes a try. Returns a word for what came back.
fn attempt(name: &str, directory: &Path, ring: Option<&mut Ring>) -> String {
    let of_kernel = |result: Result<i64, i32>| match result {
        Ok(_) => "done".into(),
        Err(errno) => error_name(errno),
    };
    if let Some(result) = kickless_sandbox::attack::attempt(name) {
        return of_kernel(result);
    }
    match kickless_opener::attack::attempt(name, directory) {
        Some(Ok(())) => return "done".into(),
        Some(Err(Refusal::Errno(errno))) => return error_name(errno),
        Some(Err(Refusal::Word(word))) => return word,
        None => {}
    }
    match ring.map(|ring| ring.attempt(name)) {
        Some(Some(result)) => of_kernel(result),
        Some(None) => "unknown".into(),
        None => "no-ring".into(),
    }
}

fn error_name(errno: i32) -> String {
    let known = ERRORS.iter().find(|(number, _)| *number == errno);
    known.map_or_else(|| format!("errno-{errno}"), |(_, name)| (*name).into())
}

fn print(name: &str, answer: &str) {
    // A line is written at once, so those of the log do not stand in it.
    let _ = rustix::io::write(rustix::stdio::stderr(), format!("attack: {name} {answer}\n").as_bytes());
}
