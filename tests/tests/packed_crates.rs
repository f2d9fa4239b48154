//! Packs the crates that others can use, as for a registry, and builds programs outside of the workspace with
//! them: the examples of the driver and of the dirty log, and `tests/fixtures/outside`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use kickless_tests::daemon::{Daemon, DaemonConfig, repository};
use serde_json::Value;
use tempfile::TempDir;

/// The crates that keep their promises by `docs/stability.md`.
const PROMISED: [&str; 9] = [
    "kickless-spec",
    "kickless-sync",
    "kickless-values",
    "kickless-memory",
    "kickless-dirty-log",
    "kickless-virtqueue",
    "kickless-vhost-user",
    "kickless-driver",
    "kickless-qcow2",
];
/// Runs cargo without the network.
fn cargo(dir: &Path, arguments: &[&str]) -> Output {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(arguments).current_dir(dir).env("CARGO_NET_OFFLINE", "true").env("CARGO_INCREMENTAL", "0");
    cargo
        .env("CARGO_PROFILE_DEV_DEBUG", "none")
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("CARGO_BUILD_TARGET");
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Returns the packages of the workspace that may be published, with their versions.
fn published() -> Vec<(String, String)> {
    let described = cargo(&repository(), &["metadata", "--locked", "--no-deps", "--format-version=1"]).stdout;
    let described: Value = serde_json::from_slice(&described).unwrap();
    let packages = described["packages"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    packages
        .iter()
        .filter(|package| package["publish"].is_null())
        .inspect(|package| {
            assert!(package["description"].is_string() && package["readme"].is_string(), "{package}");
        })
        .map(|package| (text(&package["name"]), text(&package["version"])))
        .collect()
}

#[test]
fn programs_outside_of_the_workspace_build_with_the_packed_crates() {
    let published = published();
    let dir = TempDir::new().unwrap();
    let packed = dir.path().join("packed");
    let target = format!("--target-dir={}", packed.display());
    let mut words = vec!["package", "--no-verify", "--allow-dirty", "--exclude-lockfile", "--quiet", &target];
    words.extend(published.iter().flat_map(|(name, _)| ["-p", name]));
    cargo(&repository(), &words);
    for name in PROMISED {
        assert!(published.iter().any(|(other, _)| other == name), "{name} is not published");
    }

    // The registry has none of them yet, so the program takes them from the unpacked files.
    let mut patches = String::from("[patch.crates-io]\n");
    for (name, version) in &published {
        let archive = packed.join("package").join(format!("{name}-{version}.crate"));
        let unpacked =
            Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(dir.path()).status().unwrap();
        assert!(unpacked.success(), "{}", archive.display());
        let path = dir.path().join(format!("{name}-{version}"));
        for licence in ["LICENSE-APACHE", "LICENSE-BSD-3-Clause"] {
            assert!(path.join(licence).is_file(), "{name} lacks {licence}");
        }
        patches += &format!("{name} = {{ path = '{}' }}\n", path.display());
    }

    let program = dir.path().join("program");
    fs::create_dir_all(program.join("src/bin")).unwrap();
    let copy =
        |from: &str, to: &str| fs::copy(repository().join(from), program.join("src").join(to)).unwrap();
    copy("tests/fixtures/outside/main.rs", "main.rs");
    for example in ["read_write.rs", "card.rs", "precopy.rs"] {
        copy(&format!("examples/{example}"), &format!("bin/{example}"));
    }
    fs::write(program.join("Cargo.toml"), manifest(&patches)).unwrap();
    // Versions that this machine has.
    fs::copy(repository().join("Cargo.lock"), program.join("Cargo.lock")).unwrap();
    cargo(&program, &["build", "--quiet"]);
    let run = |name: &str, arguments: &[&str]| {
        let output = Command::new(program.join("target/debug").join(name)).args(arguments).output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(run("outside", &[]), "a disk of 32768 bytes\n");
    let daemon = Daemon::start(&DaemonConfig::new("mem:1M")).unwrap();
    let said = run("read_write", &[daemon.socket().to_str().unwrap()]);
    assert!(said.ends_with("written and read back\n"), "{said}");
    daemon.stop().unwrap();
    run("precopy", &["--mib=4"]);
}

/// Returns the manifest of the program, with the lines of docs/driver.md for the driver.
fn manifest(patches: &str) -> String {
    let page = fs::read_to_string(repository().join("docs/driver.md")).unwrap();
    let (_, after) = page.split_once("```toml\n").unwrap();
    let (driver, _) = after.split_once("```").unwrap();
    let others = ["kickless-dirty-log", "kickless-memory", "kickless-qcow2", "kickless-values"];
    let version = driver.rsplit('"').nth(1).unwrap();
    let others: String = others.iter().map(|name| format!("{name} = \"{version}\"\n")).collect();
    let package = "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n";
    format!(
        "{package}{driver}{others}rustix = {{ version = \"1\", features = [\"fs\", \"process\"] }}\n{patches}"
    )
}
