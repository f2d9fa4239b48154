//! Adds a kind of device and a port of cards to a copy of the tree, with the lines that CONTRIBUTING.md lists
//! ("Add a kind", "Add a port"), and serves a device of each. Leaves out each of the lines in turn: then the
//! tree does not build.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;
use std::{env, fs};

use kickless_spec::features::Features;
use kickless_testing::eventually;
use kickless_tests::daemon::{check_sandbox, child_command, repository};
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::{Buffer, Queue};
use kickless_tests::frontend::{Frontend, LIMIT};
use kickless_tests::transcript::Transcript;
use serde_json::{Value, json};

/// The file that a build without `--locked` changes.
const LOCK: &str = "Cargo.lock";

/// Files that are new, and text to insert into existing ones.
struct Patch {
    /// The directory of `tests/fixtures` with the new files.
    fixture: &'static str,
    new: &'static [&'static str],
    insertions: &'static [Insertion],
    changes_lock: bool,
    /// The most existing files that may change.
    files_max: usize,
}

/// Text to insert into an existing file.
struct Insertion {
    file: &'static str,
    /// The text before it, which the file has once.
    after: &'static str,
    text: &'static str,
    /// The package that does not build without it.
    package: &'static str,
}

const KIND: Patch = Patch {
    fixture: "toy_kind",
    new: &["crates/toy/Cargo.toml", "crates/toy/src/lib.rs", "crates/kinds/src/toy.rs"],
    insertions: &[
        Insertion {
            file: "Cargo.toml",
            after: "kickless-net = { path = \"crates/net\" }\n",
            text: "kickless-toy = { path = \"crates/toy\" }\n",
            package: "kickless-kinds",
        },
        Insertion {
            file: "crates/kinds/Cargo.toml",
            after: "kickless-spec.workspace = true\n",
            text: "kickless-toy.workspace = true\n",
            package: "kickless-kinds",
        },
        Insertion {
            file: "crates/kinds/src/lib.rs",
            after: "mod net;\n",
            text: "mod toy;\n",
            package: "kickless-kinds",
        },
        Insertion {
            file: "crates/kinds/src/lib.rs",
            after: ".with(NetKind)",
            text: ".with(toy::ToyKind)",
            package: "kickless-kinds",
        },
    ],
    changes_lock: true,
    files_max: 4,
};

const PORT: Patch = Patch {
    fixture: "toy_port",
    new: &["crates/net/src/ports/toy/mod.rs"],
    insertions: &[
        Insertion {
            file: "crates/net/src/ports/mod.rs",
            after: "pub(crate) mod switch;\n",
            text: "mod toy;\n",
            package: "kickless-net",
        },
        Insertion {
            file: "crates/net/src/ports/mod.rs",
            after: "    &null::NULL,\n",
            text: "    &toy::TOY,\n",
            package: "kickless-net",
        },
    ],
    changes_lock: false,
    files_max: 2,
};

const PATCHES: [&Patch; 2] = [&KIND, &PORT];

impl Patch {
    /// Returns the existing files that change.
    fn changed(&self) -> BTreeSet<&'static str> {
        let lock = self.changes_lock.then_some(LOCK);
        self.insertions.iter().map(|insertion| insertion.file).chain(lock).collect()
    }
}

/// A copy of the tree. Its files are links to those of the tree, but for the changed ones. It stays where it
/// is, with what was built, so that the next run of the test builds only what has changed.
struct Tree(PathBuf);

impl Tree {
    fn copy() -> Self {
        let tree = Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join("toys"));
        let new = PATCHES.iter().flat_map(|patch| patch.new.iter().copied());
        let changed = PATCHES.iter().flat_map(|patch| patch.changed());
        let real: BTreeSet<&Path> =
            new.chain(changed).flat_map(|file| Path::new(file).ancestors().skip(1)).collect();
        for entry in fs::read_dir(&tree.0).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.is_symlink() || path.is_file() {
                true => fs::remove_file(path).unwrap(),
                false if path.ends_with("target") => {}
                false => fs::remove_dir_all(path).unwrap(),
            }
        }
        tree.link(&real, Path::new(""));
        for patch in PATCHES {
            for file in patch.new {
                let to = tree.0.join(file);
                fs::create_dir_all(to.parent().unwrap()).unwrap();
                symlink(repository().join("tests/fixtures").join(patch.fixture).join(file), to).unwrap();
            }
        }
        tree
    }

    /// Makes a directory with links to its files and directories, except for these directories.
    fn link(&self, real: &BTreeSet<&Path>, dir: &Path) {
        fs::create_dir_all(self.0.join(dir)).unwrap();
        for entry in fs::read_dir(repository().join(dir)).unwrap() {
            let name = entry.unwrap().file_name();
            let path = dir.join(&name);
            if real.contains(&*path) {
                self.link(real, &path);
            } else if !name.as_encoded_bytes().starts_with(b".") && name != "target" {
                symlink(repository().join(&path), self.0.join(&path)).unwrap();
            }
        }
    }

    /// Inserts all texts of a patch but one.
    fn insert_without(&self, patch: &Patch, left_out: Option<usize>) {
        for file in patch.changed().into_iter().filter(|file| *file != LOCK) {
            let mut text = fs::read_to_string(repository().join(file)).unwrap();
            for (number, Insertion { after, text: inserted, .. }) in patch.insertions.iter().enumerate() {
                if patch.insertions[number].file == file && left_out != Some(number) {
                    assert_eq!(text.matches(after).count(), 1, "{file}: {after}");
                    text = text.replace(after, &format!("{after}{inserted}"));
                }
            }
            self.write(file, &text);
        }
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        // The link, and not the file of the tree.
        let _ = fs::remove_file(&path);
        fs::write(path, text).unwrap();
    }

    fn cargo(&self, arguments: &[&str]) -> Output {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(arguments).current_dir(&self.0).env("CARGO_TARGET_DIR", self.0.join("target"));
        cargo.env("CARGO_NET_OFFLINE", "true");
        // `make test` has a runner that leaves out what is not a test of its part, so it would not run xtask.
        let runners = env::vars_os().map(|(name, _)| name).filter(|name| {
            name.to_str().is_some_and(|name| name.starts_with("CARGO_TARGET_") && name.ends_with("_RUNNER"))
        });
        for runner in runners {
            cargo.env_remove(runner);
        }
        cargo.env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_DEV_DEBUG", "none");
        cargo.output().unwrap()
    }

    fn build(&self, package: &str) -> Output {
        self.cargo(&["build", "--locked", "-p", package])
    }
}

fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_few_lines_add_a_kind_and_a_port_and_each_is_needed() {
    let tree = Tree::copy();
    for patch in PATCHES {
        assert!(patch.changed().len() <= patch.files_max, "{:?}", patch.changed());
        tree.insert_without(patch, None);
    }
    tree.write(LOCK, &fs::read_to_string(repository().join(LOCK)).unwrap());
    succeeds(&tree.cargo(&["update", "--workspace"]));
    succeeds(&tree.build("kickless"));
    serves(&tree.0.join("target/debug/kickless"));
    succeeds(&tree.cargo(&["run", "--locked", "-q", "-p", "xtask", "check", "dependencies"]));
    for patch in PATCHES {
        for (number, Insertion { file, text, package, .. }) in patch.insertions.iter().enumerate() {
            tree.insert_without(patch, Some(number));
            let output = tree.build(package);
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && message.contains("toy"), "{file}, {text}: {message}");
        }
        tree.insert_without(patch, None);
    }
}

/// Checks that the program serves a device of the kind, and a card with the port.
fn serves(program: &Path) {
    let run = |arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        succeeds(&output);
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(run(&["--help"]).contains("toy"));
    assert!(run(&["toy", "--help"]).contains("--fillings-read"));
    assert!(run(&["net", "--help"]).split_whitespace().any(|word| word == "toy"));
    let capabilities: Value = serde_json::from_str(&run(&["toy", "--print-capabilities"])).unwrap();
    assert_eq!(capabilities, json!({ "type": "toy" }));
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let start = |arguments: &[&str], socket: &Path| {
        let mut command = child_command(program);
        let mut child = command.args(arguments).arg(socket).stderr(Stdio::piped()).spawn().unwrap();
        let log = Transcript::of("toy", child.stderr.take().unwrap());
        (child, log)
    };
    let end = |(mut daemon, log): (Child, Transcript)| {
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        check_sandbox(log.wait_for_end(LIMIT).unwrap()).unwrap();
    };
    let daemon = start(&["toy", "--toy-byte=7", "--fillings=1000", "--socket-path"], &socket);
    eventually("it does not listen", || socket.exists());
    let mut frontend = Frontend::connect(&socket).unwrap();
    frontend.negotiate(Features::VERSION_1).unwrap();
    let mut ram = Ram::new(0, 1 << 20).unwrap();
    frontend.share(&[&ram]).unwrap();
    for index in [0, 1] {
        let mut queue = Queue::new(&mut ram, index, 64, frontend.features()).unwrap();
        frontend.start(&queue).unwrap();
        let addr = ram.take(512, 512).unwrap();
        let buffer = Buffer { addr, len: 512, writable: index == 0 };
        queue.submit(&ram, &[buffer], None).unwrap();
        queue.flush();
        let used = queue.wait_used(Instant::now() + LIMIT).unwrap();
        assert_eq!(used.len, if index == 0 { 512 } else { 0 });
        let mut bytes = [0; 512];
        ram.map().read(addr, &mut bytes).unwrap();
        assert_eq!(bytes, [if index == 0 { 7 } else { 0 }; 512]);
    }
    drop(frontend);
    end(daemon);
    let socket = dir.path().join("card");
    let daemon = start(&["net", "--port=toy", "--socket-path"], &socket);
    eventually("a card with a toy does not listen", || socket.exists());
    end(daemon);
}
