//! Tests virtual machines that do not share their memory with the daemon. The log gives advice.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::process::{Child, Stdio};

use kickless_tests::daemon::{Daemon, DaemonConfig, Program, child_command};
use kickless_tests::guest::qemu::LIMIT;

/// Texts that the log must contain.
const ADVICE: [&str; 3] = ["share=on", "<access mode='shared'/>", "shared=on"];

fn serve() -> Daemon {
    Daemon::start(&DaemonConfig { program: Program::Kickless, ..DaemonConfig::new("mem:16M") }).unwrap()
}

/// Starts a machine with this memory. Its firmware reads the disk; it has no kernel.
fn start(daemon: &Daemon, memory: &[&str]) -> Child {
    child_command("qemu-system-x86_64")
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-m", "256M"])
        .args(memory)
        .args(["-chardev", &format!("socket,id=disk,path={}", daemon.socket().display())])
        .args(["-device", "vhost-user-blk-pci,chardev=disk,bootindex=0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn end(mut machine: Child) {
    machine.kill().unwrap();
    machine.wait().unwrap();
}

/// Waits for the line with the advice.
fn advice(daemon: &Daemon) -> String {
    let telling = |line: &str| ADVICE.iter().all(|word| line.contains(word)).then(|| line.to_owned());
    daemon.log().wait_for("advice about shared memory", LIMIT, telling).unwrap()
}

#[test]
fn memory_without_a_file() {
    let daemon = serve();
    let machine = start(&daemon, &["-machine", "q35"]);
    let line = advice(&daemon);
    assert!(line.contains("SET_VRING_ENABLE: ring 0 is at "), "{line}");
    end(machine);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// QEMU sends the file of such memory, but the guest writes to private pages.
#[test]
fn memory_whose_file_is_mapped_privately() {
    let daemon = serve();
    let memory = "memory-backend-memfd,id=mem,size=256M,share=off";
    let machine = start(&daemon, &["-machine", "q35,memory-backend=mem", "-object", memory]);
    daemon
        .log()
        .wait_for("a front-end", LIMIT, |line| line.contains("front-end connected").then_some(()))
        .unwrap();
    // The firmware has kicked, and waits.
    let kicked = |line: &str| line.contains("kicks=") && !line.contains(" kicks=0 ");
    let deadline = std::time::Instant::now() + LIMIT;
    while !daemon.log().lines().iter().any(|line| kicked(line)) {
        assert!(std::time::Instant::now() < deadline, "the firmware does not kick");
        daemon.signal(rustix::process::Signal::USR1).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    end(machine);
    let line = advice(&daemon);
    assert!(line.contains("no request was in its rings"), "{line}");
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}
