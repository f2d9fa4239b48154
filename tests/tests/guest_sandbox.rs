//! Runs the sandbox on another kernel: that of Debian 12, in a guest, with landlock and without.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use kickless_tests::attack::layout;
use kickless_tests::attack::table::{ENDS, KILLED, Setting, Table};
use kickless_tests::daemon::{Daemon, DaemonConfig, kickless_binary, repository};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::guest::{Assets, image_dir};

/// The status of a shell for a process that SIGSYS ended.
const SIGSYS_STATUS: &str = "159";
/// The answer that differs without landlock.
const WITHOUT_LANDLOCK: (&str, &str) = ("reopen:outside", "done");

/// Makes an initramfs with the program and an attack in it. After the tries `fatal`, the program ends.
fn initramfs(dir: &Path, table: &Table, fatal: &[&str]) -> PathBuf {
    let tree = dir.join("tree");
    for name in ["layouts/alone", "layouts/calls"] {
        fs::create_dir_all(tree.join(name)).unwrap();
        layout::make(&tree.join(name), Path::new("/attack"), name.ends_with("calls")).unwrap();
    }
    fs::create_dir(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n").unwrap();
    fs::write(tree.join("names"), table.names_that(false).join("\n")).unwrap();
    fs::write(tree.join("fatal"), fatal.join("\n")).unwrap();
    fs::copy(repository().join("guest/sandbox-tasks"), tree.join("tasks")).unwrap();
    let program = kickless_binary().unwrap();
    shell(
        &tree,
        "strip -o kickless \"$0\"; cp --parents -L -n $(ldd \"$0\" | grep -oE '/[^ ]+') .",
        &program,
    );
    let archive = "find . -mindepth 1 -print0 | cpio --null -o -H newc --quiet -R 0:0 >../more";
    shell(&tree, archive, &program);
    let path = dir.join("initramfs");
    let mut all = File::create(&path).unwrap();
    for part in [Assets::get().unwrap().tools(), dir.join("more")] {
        io::copy(&mut File::open(part).unwrap(), &mut all).unwrap();
    }
    path
}

fn shell(directory: &Path, script: &str, argument: &Path) {
    let status =
        Command::new("sh").args(["-ec", script]).arg(argument).current_dir(directory).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Boots a guest with these parameters of the kernel. Returns its results.
fn boot(table: &Table, fatal: &[&str], parameters: &str) -> Results {
    let dir = image_dir().unwrap();
    let served = Daemon::start(&DaemonConfig::new("mem:16M")).unwrap();
    let disks = vec![DiskConfig::new(served.socket(), "")];
    let initramfs = Some(initramfs(dir.path(), table, fatal));
    let config = GuestConfig { initramfs, ..GuestConfig::new(parameters, disks).cpus(2) };
    Guest::start(&config).unwrap().finish().unwrap()
}

/// Compares the answers of a guest with the table.
fn compare(results: &Results, table: &Table, mode: &str, setting: &str, exception: Option<(&str, &str)>) {
    let of = |name: &str| results.get(&format!("{mode}.{setting}.{name}")).map(String::as_str);
    let asked = if setting == "calls" { Setting::Calls } else { Setting::Alone };
    for name in table.names_that(false) {
        let expected = exception.filter(|(other, _)| *other == name).map(|(_, answer)| answer);
        let expected = expected.or_else(|| table.answer(name, asked));
        assert_eq!(of(name), expected, "{mode} {setting} {name}");
    }
}

/// Compares the ends of the process with the table.
fn compare_ends(results: &Results, table: &Table, fatal: &[&str]) {
    for &name in fatal {
        let status = match table.answer(name, Setting::Alone) {
            Some(KILLED) => SIGSYS_STATUS,
            Some(ENDS) => "1",
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(
            results.get(&format!("on.alone.status.{name}")).map(String::as_str),
            Some(status),
            "{name}"
        );
    }
}

fn compare_engines(results: &Results, engines: &[&str]) {
    for engine in engines {
        let of = |name: &str| results[&format!("{engine}.{name}")].as_str();
        let all = ["engine", "devices", "status", "refused"].map(of);
        let used = if *engine == "auto" { "io_uring" } else { engine };
        assert_eq!(all, [used, "2", "0", "0"], "{engine}: {results:#?}");
    }
}

#[test]
fn a_kernel_with_the_second_version_of_landlock() {
    let table = Table::read().unwrap();
    // Each takes a second. tests/tests/sandbox_attack.rs tries all on this kernel.
    let fatal = ["execve", "ptrace", "process_madvise", "mount", "message:no-code", "message:two-fds"];
    let results = boot(
        &table,
        &fatal,
        "kl.task=engines,attack kl.modes=on,strict kl.engines=io_uring,aio lsm=landlock,yama",
    );
    compare_engines(&results, &["io_uring", "aio"]);
    compare(&results, &table, "on", "alone", None);
    compare(&results, &table, "strict", "alone", None);
    compare(&results, &table, "on", "calls", None);
    compare_ends(&results, &table, &fatal);
    assert_eq!((results["landlock"].as_str(), results.get("warning")), ("2", None));
}

#[test]
fn a_kernel_without_landlock() {
    let table = Table::read().unwrap();
    // Landlock has no part in the ends of a process.
    let fatal = ["execve", "message:short"];
    let results = boot(
        &table,
        &fatal,
        "kl.task=engines,attack,strict kl.modes=on kl.engines=auto,threads lsm=lockdown,yama",
    );
    compare_engines(&results, &["auto", "threads"]);
    compare(&results, &table, "on", "alone", Some(WITHOUT_LANDLOCK));
    compare(&results, &table, "on", "calls", Some(WITHOUT_LANDLOCK));
    compare_ends(&results, &table, &fatal);
    let warning = &results["warning"];
    assert!(warning.contains("landlock"), "{warning}");
    assert_eq!((results["landlock"].as_str(), results["strict.status"].as_str()), ("0", "1"));
    let sentence = &results["strict.sentence"];
    assert!(sentence.starts_with("kickless: ") && sentence.contains("landlock"), "{sentence}");
}
