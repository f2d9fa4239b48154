//! Tests the driver's C interface: the files that `make install-driver` installs, and programs built with
//! them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use kickless_tests::daemon::{
    Daemon, DaemonConfig, Program, child_command, repository, wait_for_exit, with_own_profile,
};
use kickless_tests::hostile_backend::faults::{RingFault, Rules};
use kickless_tests::hostile_backend::{HostileBackend, returns_in_time};
use rustix::fs::{OFlags, fcntl_setfl};
use tempfile::TempDir;

/// Time limit for one of our programs, also under valgrind.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the directory with the installed driver. Installs it once for all tests.
fn installed() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver_c");
        let prefix = format!("PREFIX={}", place.display());
        let mut install = Command::new("make");
        install.args(["install-driver", &prefix]).current_dir(repository());
        succeed(with_own_profile(&mut install));
        place
    })
}

/// Runs a command, which must succeed, and returns its output.
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}{complained}", output.status);
    said
}

/// Returns the output of pkg-config for the driver.
fn pkg_config(arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(arguments).arg("kickless-driver");
    let said = succeed(command.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig")));
    said.split_ascii_whitespace().map(str::to_owned).collect()
}

/// Builds a program from a source file of the repository.
fn build(dir: &Path, source: &str, further: &[String]) -> PathBuf {
    let program = dir.join(Path::new(source).file_stem().unwrap());
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&program);
    compiler.arg(repository().join(source)).args(pkg_config(&["--cflags"])).args(further);
    succeed(&mut compiler);
    program
}

/// Runs a program with the installed library. Kills it if it does not end.
fn run<A: AsRef<OsStr>>(program: impl AsRef<OsStr>, arguments: impl IntoIterator<Item = A>) -> String {
    let dir = tempfile::tempdir().unwrap();
    let place = |name| File::create(dir.path().join(name)).unwrap();
    let mut child = child_command(program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", installed().join("lib"))
        .stdin(Stdio::null())
        .stdout(place("said"))
        .stderr(place("complained"))
        .spawn()
        .unwrap();
    let status = wait_for_exit(&mut child, LIMIT);
    let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
    let (said, complained) = (read("said"), read("complained"));
    if status.is_err() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let status = status.unwrap_or_else(|_| panic!("the program does not end: {said}{complained}"));
    assert!(status.success(), "{status}\n{said}{complained}");
    said
}

fn under_valgrind(program: &Path, socket: &Path) -> String {
    let options = ["--quiet", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite"];
    let suppressions = concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/c/valgrind.supp");
    let options = options.into_iter().chain([suppressions]).map(OsStr::new);
    run("valgrind", options.chain([program.as_os_str(), socket.as_os_str()]))
}

/// Starts a back-end with an image of zeroes.
fn serve(program: Program, dir: &TempDir) -> Daemon {
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(16 << 20).unwrap();
    Daemon::start(&DaemonConfig { program, ..DaemonConfig::new(&image) }).unwrap()
}

#[test]
fn the_example_runs() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(Program::Kickless, &dir);
    let example = build(dir.path(), "examples/read_write.c", &pkg_config(&["--libs"]));
    assert!(run(&example, [daemon.socket()]).contains("written and read back"));
    assert!(under_valgrind(&example, daemon.socket()).contains("written and read back"));
}

#[test]
fn the_example_runs_linked_statically() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(Program::Kickless, &dir);
    let mut libraries = pkg_config(&["--libs", "--static"]);
    for library in libraries.iter_mut().filter(|library| *library == "-lkickless_driver") {
        *library = "-l:libkickless_driver.a".to_owned();
    }
    let example = build(dir.path(), "examples/read_write.c", &libraries);
    assert!(run(&example, [daemon.socket()]).contains("written and read back"));
}

fn every_function(program: Program) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(program, &dir);
    let test = build(dir.path(), "tests/c/driver.c", &pkg_config(&["--libs"]));
    assert!(run(&test, [daemon.socket()]).contains("all is as it should be"));
    assert!(under_valgrind(&test, daemon.socket()).contains("all is as it should be"));
}

#[test]
fn every_function_with_kickless() {
    every_function(Program::Kickless);
}

#[test]
fn every_function_with_the_storage_daemon() {
    every_function(Program::StorageDaemon);
}

#[test]
fn requests_do_not_allocate() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(Program::Kickless, &dir);
    let test = build(dir.path(), "tests/c/allocations.c", &pkg_config(&["--libs"]));
    assert!(run(&test, [daemon.socket()]).contains("no allocations"));
}

/// A hostile back-end fills the counter of kicks and clears O_NONBLOCK. A program that submits must not
/// wait.
#[test]
fn a_full_kick_counter_does_not_block() {
    let dir = tempfile::tempdir().unwrap();
    let test = build(dir.path(), "tests/c/kicks.c", &pkg_config(&["--libs"]));
    returns_in_time(move || {
        let backend =
            HostileBackend::start(Rules { ring: Some((0, RingFault::Silence)), ..Rules::default() }).unwrap();
        let mut child = child_command(test)
            .arg(backend.socket())
            .env("LD_LIBRARY_PATH", installed().join("lib"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        while backend.requests() == 0 {
            assert!(child.try_wait().unwrap().is_none(), "the program has ended");
            thread::yield_now();
        }
        let kick = &backend.received_fds().unwrap()[3];
        rustix::io::write(kick, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        fcntl_setfl(kick, OFlags::empty()).unwrap();
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "20 submitted\n");
        assert!(output.status.success());
    });
}

/// The header compiles alone in each language that can use it.
#[test]
fn the_header_compiles_alone() {
    let header = installed().join("include/kickless_driver.h");
    for (compiler, language) in
        [("cc", ["-std=c99", "-xc"]), ("cc", ["-std=c11", "-xc"]), ("c++", ["-std=c++11", "-xc++"])]
    {
        let mut command = Command::new(compiler);
        command
            .args(language)
            .args(["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
            .arg(&header);
        succeed(&mut command);
    }
    let header = fs::read_to_string(header).unwrap();
    let library = succeed(
        Command::new("nm")
            .args(["-D", "--defined-only", "--format=posix"])
            .arg(installed().join("lib/libkickless_driver.so")),
    );
    let exported: Vec<&str> = library.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(exported.len() > 20, "{exported:?}");
    for name in exported {
        assert!(header.contains(&format!(" {name}(")) || header.contains(&format!("*{name}(")), "{name}");
    }
}
