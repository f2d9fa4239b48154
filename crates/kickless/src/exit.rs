//! Ends the process without waiting for its threads.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic;
use std::thread;

use tracing::error;

use crate::log;

/// The exit status of all errors but a wrong command line.
const EXIT_FAILURE: i32 = 1;

/// Ends the process. Waits only for the log, and for a bounded time.
pub(crate) fn exit_now(status: i32) -> ! {
    log::end();
    // Skip the exit handlers of the C library, because those of librbd fail while its threads still run.
    signal_hook::low_level::exit(status)
}

/// Makes a panic of any thread end the process from now on, unless `is_caught` returns that the panic will be
/// caught.
///
/// Without its thread, guests get no answers, front-ends find no listener, or requests stay in flight for
/// ever. A supervisor can repair this only if the process ends. The process ends within the panic hook,
/// before the stack is unwound. No destructor of the thread can then wait for something that is broken.
pub(crate) fn exit_on_panic(is_caught: fn() -> bool) {
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let at = panic.location().map_or_else(|| "an unknown place".into(), ToString::to_string);
        if is_caught() {
            return error!(panic = message, at, "a library panicked: its request fails");
        }
        let thread = thread::current();
        let name = thread.name().unwrap_or("without a name");
        let message = message.replace('\n', " ");
        log::print_sentence(&format!("thread {name:?} panicked at {at}, and the program ends: {message}"));
        // Captured only with RUST_BACKTRACE=1.
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            log::print_text(&trace.to_string());
        }
        exit_now(EXIT_FAILURE)
    }));
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    /// Runs the test of this name in a new process.
    fn run(test: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("exit::tests::{test}");
        command.args(["--exact", &name, "--ignored", "--nocapture"]).env_remove("RUST_BACKTRACE");
        command.output().unwrap()
    }

    fn panic_on_a_thread(is_caught: fn() -> bool) {
        exit_on_panic(is_caught);
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
