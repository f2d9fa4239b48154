//! Ends of the process that do not wait for its threads.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic;
use std::thread;

use tracing::error;

use crate::log;

/// Everything that goes wrong but the command line.
const EXIT_FAILURE: i32 = 1;

/// Ends the process. What is left of the log is written, for a bounded time; nothing else is waited for.
pub(crate) fn at_once(status: i32) -> ! {
    log::end();
    // Without the C library's exit handlers: those of librbd do not expect that its threads still run.
    signal_hook::low_level::exit(status)
}

/// From now on a thread that panics takes the process with it, unless `is_caught` says that the panic is caught.
///
/// A thread that is missing leaves guests without answers, front-ends without a listener, or requests for ever in flight.
/// A supervisor can mend that only if the process ends. It ends within the hook: nothing is unwound, so no destructor of
/// the thread waits for what is broken.
pub(crate) fn when_a_thread_panics(is_caught: fn() -> bool) {
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let at = panic.location().map_or_else(|| "an unknown place".into(), ToString::to_string);
        if is_caught() {
            return error!(panic = message, at, "a library panicked: its request fails");
        }
        let thread = thread::current();
        let name = thread.name().unwrap_or("without a name");
        let message = message.replace('\n', " ");
        log::say(&format!("thread {name:?} panicked at {at}, and the program ends: {message}"));
        // With RUST_BACKTRACE=1 only.
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            log::say(&trace.to_string());
        }
        at_once(EXIT_FAILURE)
    }));
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    /// Runs the test of this name in a process of its own.
    fn run(test: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("exit::tests::{test}");
        command.args(["--exact", &name, "--ignored", "--nocapture"]).env_remove("RUST_BACKTRACE");
        command.output().unwrap()
    }

    fn panic_on_a_thread(is_caught: fn() -> bool) {
        when_a_thread_panics(is_caught);
        let thread = thread::Builder::new().name("worker 7".into());
        let _ = thread.spawn(|| panic!("at the wrong\nmoment")).unwrap().join();
    }

    #[test]
    #[ignore = "a panicking process that the test below starts"]
    fn ends() {
        panic_on_a_thread(|| false);
    }

    #[test]
    #[ignore = "a panicking process that the test below starts"]
    fn goes_on() {
        panic_on_a_thread(|| true);
    }

    #[test]
    fn a_thread_that_panics_takes_the_process_with_it() {
        let output = run("ends");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.starts_with("kickless: thread \"worker 7\" panicked at crates/kickless/src/exit.rs"),
            "{said}"
        );
        assert!(said.ends_with("the program ends: at the wrong moment\n"), "{said}");
        assert!(run("goes_on").status.success());
    }
}
