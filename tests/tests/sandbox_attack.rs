//! Attacks the sandbox from within the process that serves, and compares what comes back with
//! `docs/security-attacks.md`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;

use kickless_tests::attack::run::VARIABLE;
use kickless_tests::daemon::kickless_binary;

/// A release build has no thread that attacks. It would not compile with one.
#[test]
#[cfg(not(debug_assertions))]
fn release_builds_have_no_attack() {
    assert!(!has_variable());
}

fn has_variable() -> bool {
    let program = fs::read(kickless_binary().unwrap()).unwrap();
    program.windows(VARIABLE.len()).any(|bytes| bytes == VARIABLE.as_bytes())
}

#[cfg(debug_assertions)]
mod attacks {
    use std::collections::BTreeSet;
    use std::os::unix::process::ExitStatusExt;
    use std::sync::Mutex;
    use std::thread;

    use kickless_tests::attack::run::{Outcome, run};
    use kickless_tests::attack::table::{ENDS, KILLED, PAGE, Setting, Table};
    use rustix::process::{Signal, geteuid};

    /// Processes that run at the same time: each waits for others most of the time.
    const AT_A_TIME: usize = 6;
    /// Tries that the kernel answers in the same way without a sandbox.
    const SAME: [&str; 3] = ["ring:", "x32", "number-599"];
    /// The beginning of the sentence with which a daemon ends when its opener has.
    const SENTENCE: &str = "kickless: the process that opens files has ended (";

    /// Makes the tries after which the process goes on. Returns the answers that are not those of the table.
    fn differences(table: &Table, mode: &str, setting: Setting) -> Vec<String> {
        let names = table.names_that(false);
        let outcome = run(mode, setting, &names).unwrap();
        assert_eq!(outcome.status.code(), Some(0), "{:#?}", outcome.log);
        assert!(outcome.is_untouched);
        let answered: Vec<_> = outcome.answers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(answered, names);
        let differs = |(name, answer): &(String, String)| {
            let expected = table.answer(name, setting)?;
            (expected != answer).then(|| format!("{name}: {answer}, not {expected}"))
        };
        outcome.answers.iter().filter_map(differs).collect()
    }

    #[test]
    fn the_page_has_all_tries() {
        assert!(super::has_variable());
        let known = run("off", Setting::Alone, &[]).unwrap();
        let known: BTreeSet<_> = known.answers.into_iter().map(|(name, _)| name).collect();
        let table = Table::read().unwrap();
        let named: BTreeSet<_> = table.names().map(str::to_owned).collect();
        assert!(known.is_subset(&named), "not in {PAGE}: {:?}", known.difference(&named));
        // Other processors lack some calls.
        if cfg!(target_arch = "x86_64") {
            assert_eq!(named, known, "in {PAGE} only");
        }
    }

    #[test]
    fn nothing_comes_back_but_refusals() {
        let table = Table::read().unwrap();
        for (mode, setting) in [
            ("on", Setting::Alone),
            ("strict", Setting::Alone),
            ("on", Setting::Calls),
            ("strict", Setting::StrictCalls),
        ] {
            assert_eq!(differences(&table, mode, setting), [""; 0], "{mode} {setting:?}");
        }
    }

    #[test]
    fn without_a_sandbox_the_kernel_answers() {
        let table = Table::read().unwrap();
        let is_same = |name: &str| SAME.iter().any(|same| name.starts_with(same));
        let names: Vec<_> = table.names_that(false).into_iter().chain(fatal(&table)).collect();
        let outcome = run("off", Setting::Calls, &names).unwrap();
        assert_eq!(
            (outcome.status.code(), outcome.answers.len()),
            (Some(0), names.len()),
            "{:#?}",
            outcome.log
        );
        for (name, answer) in outcome.answers {
            let refused = table.answer(&name, Setting::Alone).unwrap();
            // A user without rights gets some of these errors from the kernel.
            let is_right = is_same(&name) || answer != refused || answer == "EPERM" && !geteuid().is_root();
            assert!(is_right, "{name}: {answer} without a sandbox too");
        }
    }

    /// Returns the calls that end the process.
    fn fatal(table: &Table) -> Vec<&str> {
        table.names_that(true).into_iter().filter(|name| !name.starts_with("message:")).collect()
    }

    #[test]
    fn fatal_tries_end_the_process() {
        let table = Table::read().unwrap();
        let starts = ["on", "strict"]
            .into_iter()
            .flat_map(|mode| table.names_that(true).into_iter().map(move |name| (mode, name)));
        let starts = Mutex::new(starts);
        thread::scope(|scope| {
            for _ in 0..AT_A_TIME {
                scope.spawn(|| {
                    // The lock is held for a moment only.
                    let next = || starts.lock().unwrap().next();
                    while let Some((mode, name)) = next() {
                        let outcome = run(mode, Setting::Alone, &[name]).unwrap();
                        check_end(table.answer(name, Setting::Alone).unwrap(), name, &outcome);
                    }
                });
            }
        });
    }

    fn check_end(expected: &str, name: &str, outcome: &Outcome) {
        let Outcome { answers, log, status, is_untouched } = outcome;
        assert!(answers.is_empty() && *is_untouched, "{name}: {answers:?}");
        match expected {
            KILLED => assert_eq!(status.signal(), Some(Signal::SYS.as_raw()), "{name}: {status} {log:#?}"),
            ENDS => {
                assert_eq!(status.code(), Some(1), "{name}: {log:#?}");
                assert!(log.iter().any(|line| line.starts_with(SENTENCE)), "{name}: {log:#?}");
            }
            _ => panic!("{name}: {expected}"),
        }
    }
}
