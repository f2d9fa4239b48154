//! Provides network namespaces, in which a test makes interfaces that nothing else sees.

use std::path::Path;
use std::process::Command;
use std::{fs, panic, thread};

use nix::sched::{CloneFlags, unshare};

/// Runs `test` on a thread with a new network namespace. Its threads and child processes have the same
/// namespace, which ends with them. Interfaces there have no IPv6, so that the kernel sends no frames by
/// itself.
///
/// Returns `false` and prints the reason if this machine gives no namespace: the test is skipped then. A
/// namespace needs CAP_SYS_ADMIN, the program `ip` and /dev/net/tun.
pub fn in_network_namespace(test: impl FnOnce() + Send) -> bool {
    let run = || {
        enter().inspect_err(|why| println!("skipped, because there is no network namespace: {why}"))?;
        test();
        Ok::<(), String>(())
    };
    match thread::scope(|scope| scope.spawn(run).join()) {
        Ok(entered) => entered.is_ok(),
        Err(failure) => panic::resume_unwind(failure),
    }
}

fn enter() -> Result<(), String> {
    Command::new("ip").arg("-V").output().map_err(|error| format!("ip: {error}"))?;
    fs::metadata("/dev/net/tun").map_err(|error| format!("/dev/net/tun: {error}"))?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(|error| format!("unshare: {error}"))?;
    // A kernel without IPv6 has no such files.
    for which in ["all", "default"] {
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
    }
    Ok(())
}

/// Runs `ip` in the namespace of this thread, with arguments that are separated by spaces.
pub fn ip(arguments: &str) {
    run("ip", arguments);
}

/// Runs `tc` in the namespace of this thread, with arguments that are separated by spaces.
pub fn tc(arguments: &str) {
    run("tc", arguments);
}

/// Returns whether passt is installed.
pub fn has_passt() -> bool {
    ["/usr/bin/passt", "/usr/local/bin/passt"].iter().any(|path| Path::new(path).exists())
}

/// Gives the namespace of this thread an interface with the address 10.78.0.2 and a default route, which
/// passt looks for.
pub fn add_uplink() {
    ip("link set dev lo up");
    ip("link add up0 type veth peer name up1");
    for command in ["link set up1 up", "link set up0 up", "addr add 10.78.0.2/24 dev up0"] {
        ip(command);
    }
    ip("route add default via 10.78.0.1");
}

fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split_whitespace()).output().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {why}");
}
