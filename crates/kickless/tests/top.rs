//! Runs `kickless top` in a terminal, and draws its picture.
//!
//! `KICKLESS_WRITE_PICTURE=1 cargo test -p kickless --test top` writes the picture of the README.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use common::{Checked, PROGRAM, checked};
use kickless_driver::{Disk, Options};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;
use tempfile::TempDir;

const ROWS: u16 = 24;
const COLUMNS: u16 = 130;
/// After this time, a test has failed.
const LIMIT: Duration = Duration::from_secs(60);

/// A process that is killed with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon with two disks, of which the first has a limit.
struct Daemon {
    dir: TempDir,
    _process: Killed,
    _log: Checked,
}

impl Daemon {
    fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let device = |name: &str, disk: &str, more: &str| {
            let socket = dir.path().join(format!("{name}.sock"));
            format!("[[device]]\nsocket-path = '{}'\nblk-file = '{disk}'\n{more}", socket.display())
        };
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let config = [
            device("database", image.to_str().unwrap(), "num-queues = 1\n"),
            device("web", "mem:16M", "num-queues = 1\niops = 2000\n"),
        ];
        let file = dir.path().join("kickless.toml");
        fs::write(&file, config.concat()).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg("--config").arg(file).env("RUNTIME_DIRECTORY", dir.path());
        let mut process = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = checked(process.stderr.take().unwrap(), drop);
        Self { dir, _process: Killed(process), _log: log }
    }

    /// Connects a driver, as soon as the daemon serves the disk.
    fn disk(&self, name: &str) -> Disk {
        let path = self.dir.path().join(format!("{name}.sock"));
        let since = Instant::now();
        loop {
            match Disk::connect(Options::new(&path)) {
                Ok(disk) => return disk,
                Err(error) => assert!(since.elapsed() < LIMIT, "{error}"),
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn top(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["top", "--interval=300ms"]).env("RUNTIME_DIRECTORY", self.dir.path());
        command
    }
}

/// `top` in a terminal.
struct Terminal {
    keys: File,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    process: Killed,
}

impl Terminal {
    fn start(mut command: Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let path = Path::new(name.to_str().unwrap()).to_owned();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let slave = open();
        let size = Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).unwrap();
        command.stdin(open()).stdout(open()).stderr(open()).env("TERM", "xterm-256color");
        let process = Killed(command.spawn().unwrap());
        drop((slave, command));
        let keys = File::from(master);
        let mut reader = keys.try_clone().unwrap();
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The read fails when the program has closed the terminal.
            while let Ok(len @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..len].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { keys, output, screen: vt100::Parser::new(ROWS, COLUMNS, 0), process }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen fulfils a condition.
    fn wait_until(&mut self, what: &str, is_there: impl Fn(&str) -> bool) {
        let since = Instant::now();
        loop {
            let shown = self.screen.screen().contents();
            if is_there(&shown) {
                return;
            }
            assert!(since.elapsed() < LIMIT, "{what}:\n{shown}");
            if let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(100)) {
                self.screen.process(&bytes);
            }
        }
    }
}

/// Draws the screen of a terminal as SVG: one text for each run of characters of the same look.
fn svg(screen: &vt100::Screen) -> String {
    let (rows, columns) = screen.size();
    let (width, height) = (f64::from(columns) * 7.8 + 16.0, f64::from(rows) * 17.0 + 16.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"monospace\" \
         font-size=\"13\"><rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#1d1f21\"/>\n"
    );
    for row in 0..rows {
        let look =
            |column: u16| screen.cell(row, column).map(|cell| (cell.fgcolor(), cell.bold(), cell.inverse()));
        let mut column = 0;
        while column < columns {
            let start = column;
            let mut text = String::new();
            while column < columns && look(column) == look(start) {
                let cell = screen.cell(row, column).map(vt100::Cell::contents).unwrap_or_default();
                text.push_str(if cell.is_empty() { " " } else { cell });
                column += 1;
            }
            let Some((color, is_bold, is_inverse)) = look(start) else { continue };
            if text.trim().is_empty() && !is_inverse {
                continue;
            }
            let color = match color {
                vt100::Color::Idx(1) => "#cc6666",
                vt100::Color::Idx(2) => "#b5bd68",
                vt100::Color::Idx(3) => "#f0c674",
                vt100::Color::Idx(6) => "#8abeb7",
                vt100::Color::Idx(8) => "#969896",
                _ => "#e0e0e0",
            };
            let (x, y) = (8.0 + f64::from(start) * 7.8, 8.0 + f64::from(row) * 17.0);
            let (fill, length) =
                (if is_inverse { "#1d1f21" } else { color }, f64::from(column - start) * 7.8);
            if is_inverse {
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{length:.1}\" height=\"17\" fill=\"{color}\"/>"
                );
            }
            let weight = if is_bold { " font-weight=\"bold\"" } else { "" };
            let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{:.1}\" fill=\"{fill}\"{weight} textLength=\"{length:.1}\" xml:space=\"preserve\">{text}</text>",
                y + 13.0
            );
        }
    }
    svg + "</svg>\n"
}

/// Ends the load when it is dropped, also when the test fails.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn it_shows_sorts_limits_and_drains() {
    let daemon = Daemon::start();
    let disks = [daemon.disk("database"), daemon.disk("web")];
    let is_ending = AtomicBool::new(false);
    let load = |disk: &Disk, write: bool| {
        let (mut bytes, mut block) = ([7; 4096], 0);
        while !is_ending.load(Ordering::Relaxed) {
            // A drained disk answers after it is resumed.
            let at = block % 1024 * 4096;
            let _ = if write { disk.write_at(&bytes, at) } else { disk.read_at(&mut bytes, at) };
            block += 1;
            thread::sleep(Duration::from_micros(200));
        }
    };
    thread::scope(|scope| {
        let _ending = Ending(&is_ending);
        scope.spawn(|| load(&disks[0], false));
        scope.spawn(|| load(&disks[1], true));
        let mut terminal = Terminal::start(daemon.top());
        let parts =
            ["worker 0", "work", "looking", "asleep", "p99", "iops=2000", "devices by requests", "q quit"];
        // A screen comes in several pieces.
        terminal.wait_until("both devices work", |shown| {
            let works = |name: &str| {
                let line = shown.lines().find(|line| line.contains(name) && line.contains("connected"));
                // All columns up to the limits, and the frame.
                let is_whole = |line: &str| line.split_whitespace().count() >= 13;
                line.is_some_and(|line| is_whole(line) && (line.contains("us") || line.contains("ms")))
            };
            works("database") && works("web") && parts.iter().all(|part| shown.contains(part))
        });
        let picture = svg(terminal.screen.screen());
        assert!(picture.contains("database") && picture.contains("iops=2000"), "{picture}");
        if std::env::var_os("KICKLESS_WRITE_PICTURE").is_some() {
            fs::write("../../docs/top.svg", &picture).unwrap();
        }
        terminal.press("ssss");
        terminal.wait_until("another order", |shown| shown.contains("devices by name"));
        terminal.press("kkdy");
        terminal.wait_until("a drained device", |shown| {
            shown.lines().any(|line| line.contains("database") && line.contains("drained"))
        });
        terminal.press("d");
        terminal.wait_until("a resumed device", |shown| {
            shown.lines().any(|line| line.contains("database") && line.contains("connected"))
        });
        terminal.press("l777\r");
        terminal.wait_until("a limit", |shown| shown.contains("iops=777"));
        terminal.press("py");
        terminal.wait_until("another rule", |shown| shown.contains("polling always"));
        terminal.press("\r");
        terminal.wait_until("the queues of a device", |shown| shown.contains("requests by latency"));
        terminal.press("\u{3}");
        let since = Instant::now();
        while terminal.process.0.try_wait().unwrap().is_none() {
            assert!(since.elapsed() < LIMIT);
            let _ = terminal.output.recv_timeout(Duration::from_millis(20));
        }
        assert!(terminal.process.0.wait().unwrap().success());

        let once = daemon.top().args(["--once", "--json"]).output().unwrap();
        let view: Value = serde_json::from_slice(&once.stdout).unwrap();
        assert_eq!((&view["devices"][1]["name"], &view["workers"][0]["worker"]), (&"web".into(), &0.into()));
        assert!(view["devices"][1]["writes"].as_f64() > Some(0.0), "{view}");
    });
    // Without a terminal it says what to do.
    let refused = daemon.top().stdin(Stdio::null()).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--once --json"));
}
