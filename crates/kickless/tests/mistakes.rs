//! Makes the mistakes of `mistakes.txt` with the real program, and compares statuses and whole sentences.
//!
//! `MISTAKES=write` writes the sentences that the program has now into the file, for a look at what changed.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Daemon, PROGRAM};
use kickless_disk::lock::ImageLock;
use rustix::process::{geteuid, getpid};

/// The file with the mistakes. Its first lines explain it.
const MISTAKES: &str = include_str!("mistakes.txt");
/// The number of mistakes that the table has at least.
const MISTAKES_MIN: usize = 120;
/// The configuration file that the commands name.
const CONFIG: &str = "devices.toml";

/// A directory with the files that the commands name.
struct Scene {
    /// A daemon with a disk and a card, and its directory.
    daemon: Daemon,
    _lock: ImageLock,
    _listener: UnixListener,
}

impl Scene {
    fn new() -> Self {
        let config = "[[device]]\nsocket-path = 'DIR/web.sock'\nblk-file = 'null:1G'\n\
                      [[device]]\nsocket-path = 'DIR/card.sock'\nport = 'null'\n";
        let daemon = Daemon::serve(config, &["--control-read-only=DIR/show.sock"]);
        // All sockets are there when the first device is served.
        daemon.wait_for("serving");
        let at = |name: &str| daemon.dir.path().join(name);
        for name in ["raw.img", "locked.img", "secret.img", "protected.img"] {
            File::create(at(name)).unwrap().set_len(1 << 20).unwrap();
        }
        File::create(at("empty.img")).unwrap();
        fs::write(at("vmdk.img"), "KDMV".to_owned() + &"\0".repeat(1 << 20)).unwrap();
        for name in ["closed", "closed/in", "read-only"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("closed/disk.img"), [0; 512]).unwrap();
        drop(UnixListener::bind(at("dead.sock")).unwrap());
        let listener = UnixListener::bind(at("taken.sock")).unwrap();
        let mode = |name: &str, mode| fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
        mode("secret.img", 0o000);
        mode("protected.img", 0o444);
        mode("closed", 0o000);
        mode("read-only", 0o555);
        let locked = File::options().read(true).write(true).open(at("locked.img")).unwrap();
        let lock = ImageLock::acquire(&locked, false).unwrap();
        Self { daemon, _lock: lock, _listener: listener }
    }

    fn path(&self) -> &Path {
        self.daemon.dir.path()
    }

    /// Returns the command of a line. `%` takes the privileges of root away.
    fn command(&self, line: &str) -> Command {
        let (prompt, line) = line.split_at(2);
        let mut words = words(line);
        assert_eq!(words.next().as_deref(), Some("kickless"), "{line}");
        let mut command = match prompt {
            "% " if geteuid().is_root() => {
                let mut command = Command::new("setpriv");
                command.args(["--bounding-set=-all", "--inh-caps=-all", "--", PROGRAM]);
                command
            }
            _ => Command::new(PROGRAM),
        };
        let words: Vec<_> = words.collect();
        // A client looks for the control socket there.
        match words.first().is_some_and(|word| word == "ctl") {
            true => command.env("RUNTIME_DIRECTORY", "/nonexistent"),
            false => command.env_remove("RUNTIME_DIRECTORY"),
        };
        // Only the sentence, without the lines of a start.
        command.args(words).current_dir(self.path()).stdin(Stdio::null()).env("KICKLESS_LOG", "error");
        command
    }

    /// Returns a sentence with names in place of what differs from machine to machine.
    fn without_names(&self, said: &str) -> String {
        let cpus = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        let comm = fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let uid = geteuid().as_raw();
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let user = users.lines().find(|line| line.split(':').nth(2) == Some(&uid.to_string()));
        let user = user.and_then(|line| line.split(':').next()).unwrap_or_default();
        said.replace(&format!("{}/", self.path().display()), "DIR/")
            .replace(&format!("this machine has {}", cpus.trim()), "this machine has CPUS")
            .replace(
                &format!("process {} ({})", getpid().as_raw_nonzero(), comm.trim()),
                "process PID (NAME)",
            )
            .replace(&format!("user {user} (uid {uid})"), "user USER (uid UID)")
            .replace(&format!("user with the uid {uid}"), "user USER (uid UID)")
            .replace(&format!("-m u:{uid}:x"), "-m u:UID:x")
            .replace(&format!("owner {uid}:"), "owner UID:")
            .replace(&format!(":{})", fs::metadata(self.path()).unwrap().gid()), ":GID)")
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Otherwise the directory could not be removed.
        let _ = fs::set_permissions(self.path().join("closed"), Permissions::from_mode(0o700));
    }
}

/// Splits a line into words. Those with spaces are in single quotes.
fn words(line: &str) -> impl Iterator<Item = String> {
    let mut all = vec![String::new()];
    let mut is_quoted = false;
    for c in line.chars() {
        match c {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => all.push(String::new()),
            c => all.last_mut().unwrap().push(c),
        }
    }
    all.into_iter()
}

#[test]
fn each_mistake_has_its_sentence() {
    let scene = Scene::new();
    let (mut made, mut count, mut config) = (String::new(), 0, String::new());
    let mut lines = MISTAKES.lines().peekable();
    while let Some(line) = lines.next() {
        writeln!(made, "{line}").unwrap();
        if let Some(text) = line.strip_prefix('>') {
            writeln!(config, "{}", text.strip_prefix(' ').unwrap_or(text)).unwrap();
            if lines.peek().is_none_or(|next| !next.starts_with('>')) {
                fs::write(scene.path().join(CONFIG), std::mem::take(&mut config)).unwrap();
            }
        }
        if !line.starts_with(['$', '%']) {
            continue;
        }
        let output = scene.command(line).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let sentence = said.strip_prefix("kickless: ").and_then(|said| said.strip_suffix('\n'));
        let sentence = sentence.filter(|said| !said.contains('\n'));
        let sentence = sentence.unwrap_or_else(|| panic!("{line}: not one sentence: {said:?}"));
        let status = output.status.code().unwrap();
        writeln!(made, "{status} {}", scene.without_names(sentence)).unwrap();
        count += 1;
        // The sentence of the file, which the line above replaces.
        lines.next_if(|next| next.starts_with(|first: char| first.is_ascii_digit()));
    }
    if std::env::var("MISTAKES").as_deref() == Ok("write") {
        fs::write(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/mistakes.txt"), &made).unwrap();
    }
    for (wanted, made) in MISTAKES.lines().zip(made.lines()) {
        assert_eq!(wanted, made, "MISTAKES=write shows all that differ");
    }
    assert_eq!(MISTAKES, made);
    assert!(count >= MISTAKES_MIN, "{count}");
}
