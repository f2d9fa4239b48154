//! Runs each command of docs/tutorial.md, in its order, in terminals as the page names them.
//!
//! With `TUTORIAL=bare` it does so in the source tree, with the commands that build and install.
//! CONTRIBUTING.md has the command for a bare machine. Otherwise these are left out, the program is the one
//! that is built, and the directory is a temporary one.
//!
//! The words behind ```` ```sh ```` of a block are for this test:
//!
//! | word | the commands |
//! | --- | --- |
//! | `terminal=N,...` | belong to the shell of these terminals |
//! | `guest`, `monitor` | are typed into the guest or into the monitor of the QEMU that runs in the terminal |
//! | `until=TEXT`, `file=NAME` | end with a program that stays, which is ready when it prints TEXT or makes the file |
//! | `last` | end the program that stays, and the terminal with it |
//! | `needs=PROGRAM` | are left out where the program is not installed |
//! | `bare` | change the machine |

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use kickless_testing::{add_uplink, has_passt, in_network_namespace};
use kickless_tests::daemon::{kickless_binary, repository};
use kickless_tests::guest::qemu::LIMIT;
use kickless_tests::guest::{Accel, Assets, image_dir};
use kickless_tests::transcript::Transcript;
use rustix::process::{Pid, Signal, kill_process_group};

/// Time limit for a block on a bare machine, where one builds the program.
const BARE_LIMIT: Duration = Duration::from_secs(3600);

/// A block of commands.
#[derive(Default)]
struct Block {
    /// The line of the page, for messages.
    line: usize,
    words: Vec<String>,
    commands: Vec<String>,
}

impl Block {
    /// Returns the blocks of a page.
    fn all(page: &str) -> Vec<Block> {
        let (mut blocks, mut open) = (Vec::new(), None::<Block>);
        for (line, text) in (1..).zip(page.lines()) {
            match (text.strip_prefix("```"), &mut open) {
                (Some(info), None) => {
                    let words = info.split_whitespace().map(str::to_owned).collect();
                    open = Some(Block { line, words, ..Block::default() });
                }
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (None, Some(block)) => block.commands.push(text.to_owned()),
                (None, None) => {}
            }
        }
        blocks
    }

    fn is(&self, word: &str) -> bool {
        self.words.iter().any(|other| other == word)
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
}

/// A terminal: a shell, whose programs read what is typed when it is their turn.
struct Terminal {
    shell: Child,
    /// `None` in a terminal that is closed.
    keys: Option<ChildStdin>,
    screen: Transcript,
    /// The number of commands whose end was waited for.
    ends: usize,
    limit: Duration,
}

impl Terminal {
    fn open(name: &str, dir: &Path, limit: Duration) -> Terminal {
        let mut command = Command::new("bash");
        // One stream has the order of a screen.
        command.args(["-c", "exec bash -e 2>&1"]).current_dir(dir).env_remove("RUNTIME_DIRECTORY");
        let mut shell =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        let keys = shell.stdin.take();
        let screen = Transcript::of(name, shell.stdout.take().unwrap());
        Terminal { shell, keys, screen, ends: 0, limit }
    }

    fn type_line(&mut self, line: &str) {
        let keys = self.keys.as_mut().unwrap();
        writeln!(keys, "{line}").unwrap_or_else(|error| self.fail(line, &error.to_string()));
    }

    /// Types a command that prints the status of the last one, and waits for 0. The screen also shows the
    /// command, but not with this text.
    fn end(&mut self, what: &str) {
        self.ends += 1;
        let (start, mark) = (self.screen.len(), format!("END-{} ", self.ends));
        self.type_line(&format!("echo END''-{} $?", self.ends));
        let status = self
            .screen
            .wait_from(start, what, self.limit, |line| Some(line.split_once(&mark)?.1.trim().to_owned()));
        match status {
            Ok(status) if status == "0" => {}
            Ok(status) => self.fail(what, &format!("status {status}")),
            Err(error) => self.fail(what, &format!("{error:#}")),
        }
    }

    fn fail(&self, what: &str, why: &str) -> ! {
        self.screen.dump();
        panic!("{what}: {why}");
    }

    /// Runs the commands of a block in the shell.
    fn run(&mut self, block: &Block, dir: &Path) {
        let what = format!("docs/tutorial.md:{}: {}", block.line, block.commands.join("\n"));
        let start = self.screen.len();
        if block.is("monitor") {
            // Ctrl-A and C.
            write!(self.keys.as_mut().unwrap(), "\x01c").unwrap();
        }
        if block.is("guest") {
            // One by one, to see the status of each.
            let (last, others) = block.commands.split_last().unwrap();
            for command in others {
                self.type_line(command);
                self.end(&what);
            }
            self.type_line(last);
        } else {
            self.type_line(&block.commands.join("\n"));
        }
        if let Some(text) = block.value("until") {
            let shown =
                self.screen.wait_from(start, &what, self.limit, |line| line.contains(text).then_some(()));
            shown.unwrap_or_else(|error| self.fail(&what, &format!("{error:#}")));
        }
        if let Some(file) = block.value("file") {
            // The program makes it, or ends.
            while !dir.join(file).exists() {
                if let Some(status) = self.shell.try_wait().unwrap() {
                    self.fail(&what, &status.to_string());
                }
                thread::sleep(Duration::from_millis(50));
            }
        }
        if block.is("last") {
            // A command for the shell could be read by the program that ends.
            self.keys = None;
            if let Err(error) = self.screen.wait_for_end(self.limit) {
                self.fail(&what, &format!("{error:#}"));
            }
            let status = self.shell.wait().unwrap();
            assert!(status.success(), "{what}: {status}");
        } else if block.value("until").is_none() && block.value("file").is_none() {
            self.end(&what);
        }
    }
}

/// Ends all programs of the terminal.
impl Drop for Terminal {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.shell);
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.shell.wait();
    }
}

#[test]
fn each_command_of_the_tutorial() {
    let page = fs::read_to_string(repository().join("docs/tutorial.md")).unwrap();
    let mut blocks = Block::all(&page);
    assert!(blocks.len() > 15, "{}", blocks.len());
    // KVM can be there and not work.
    let mut use_tcg = || {
        for command in blocks.iter_mut().flat_map(|block| &mut block.commands) {
            *command = command.replace("accel=kvm:tcg", "accel=tcg");
        }
    };
    if env::var("TUTORIAL").is_ok_and(|way| way == "bare") {
        // There is no guest yet that could find out.
        if env::var("KICKLESS_ACCEL").is_ok_and(|accel| accel == "tcg") {
            use_tcg();
        }
        return run(blocks, &repository(), true);
    }
    if !has_passt() {
        return println!("skipped: there is no passt");
    }
    let accel = Assets::get().unwrap().accel();
    let dir = image_dir().unwrap();
    let target = dir.path().join("target");
    fs::create_dir_all(target.join("release")).unwrap();
    symlink(repository().join("target/guest"), target.join("guest")).unwrap();
    symlink(kickless_binary().unwrap(), target.join("release/kickless")).unwrap();
    if accel == Accel::Tcg {
        use_tcg();
    }
    in_network_namespace(|| {
        add_uplink();
        run(blocks, dir.path(), false);
    });
}

/// Runs the blocks in the source tree `dir`.
fn run(blocks: Vec<Block>, dir: &Path, is_bare: bool) {
    let limit = if is_bare { BARE_LIMIT } else { LIMIT };
    let mut terminals = BTreeMap::new();
    for block in &blocks {
        if let Some(program) = block.value("needs")
            && !env::var("PATH").unwrap().split(':').any(|path| Path::new(path).join(program).exists())
        {
            println!("skipped, because {program} is not installed: {}", block.commands.join("\n"));
            continue;
        }
        if block.is("bare") {
            if is_bare {
                let mut terminal = Terminal::open("a machine", dir, limit);
                terminal.run(block, dir);
                terminal.screen.dump();
            }
            continue;
        }
        let names = block.value("terminal").unwrap_or_else(|| panic!("line {}: which terminal?", block.line));
        for name in names.split(',') {
            let terminal =
                terminals.entry(name.to_owned()).or_insert_with(|| Terminal::open(name, dir, limit));
            terminal.run(block, &dir.join("target/hour"));
        }
    }
    for terminal in terminals.values() {
        terminal.screen.dump();
    }
}
