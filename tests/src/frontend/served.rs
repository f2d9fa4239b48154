//! Runs a daemon with a scratch image, and checks its state after each test.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::daemon::{Daemon, DaemonConfig};
use crate::driver::Queue;
use crate::frontend::LIMIT;
use crate::frontend::machine::{Machine, Shape};
use crate::guest::image_dir;
use kickless_testing::pattern;

/// Bytes of the image.
pub const IMAGE_SIZE: u64 = 64 << 20;

/// Defines tests of each function, one for each engine. The function takes the name of the engine.
#[macro_export]
macro_rules! with_each_engine {
    ($($name:ident)*) => {
        mod io_uring {
            $(#[test] fn $name() { super::$name("io_uring"); })*
        }
        mod aio {
            $(#[test] fn $name() { super::$name("aio"); })*
        }
        mod threads {
            $(#[test] fn $name() { super::$name("threads"); })*
        }
    };
}

/// A running daemon with a scratch image.
pub struct Served {
    /// The daemon.
    pub daemon: Daemon,
    image: PathBuf,
    holdings: (usize, usize),
    _dir: TempDir,
}

impl Served {
    /// Starts a daemon with an image of zeroes.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(engine: &str, arguments: &[&str]) -> Result<Served> {
        let dir = image_dir()?;
        let image = dir.path().join("disk.img");
        File::create_new(&image)?.set_len(IMAGE_SIZE)?;
        let daemon = Daemon::start(&DaemonConfig {
            engine: Some(engine.to_owned()),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            ..DaemonConfig::new(&image)
        })?;
        let holdings = daemon.holdings()?;
        Ok(Served { daemon, image, holdings, _dir: dir })
    }

    /// Starts another daemon on the same image.
    ///
    /// # Errors
    /// It does not start.
    pub fn beside(&self, engine: &str, arguments: &[&str]) -> Result<Daemon> {
        Daemon::start(&DaemonConfig {
            engine: Some(engine.to_owned()),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            ..DaemonConfig::new(&self.image)
        })
    }

    /// Returns the path of the image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Returns the socket that front-ends connect to.
    pub fn socket(&self) -> &Path {
        self.daemon.socket()
    }

    /// Reads bytes of the image from the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn on_disk(&self, sector: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        File::open(&self.image)?.read_exact_at(&mut bytes, sector * 512)?;
        Ok(bytes)
    }

    /// Checks that the daemon serves the next front-end and keeps nothing of the earlier ones.
    ///
    /// # Errors
    /// One of the two does not hold.
    pub fn check_next_frontend(&self) -> Result<()> {
        let mut machine =
            Machine::start(self.socket(), &Shape::default()).context("the next front-end cannot connect")?;
        let data = pattern(self.daemon.log().len() as u64, 4096);
        machine.write(0, 64, &data)?;
        ensure!(
            machine.read(0, 64, data.len())? == data,
            "the next front-end read other bytes than it wrote"
        );
        machine.stop()?;
        drop(machine);
        self.daemon.returns_to(self.holdings)
    }

    /// Checks the daemon after a guest has broken queue 0 of two. `seen` is the number of log lines before.
    /// The daemon signals the front-end's error eventfd once and logs `words`. The broken queue does not
    /// move, the other queue works, and a new set-up repairs the broken one.
    ///
    /// # Errors
    /// One of these does not hold.
    pub fn check_broken_queue(&self, machine: &mut Machine, seen: usize, words: &[&str]) -> Result<()> {
        let err = machine.queues[0].err();
        ensure!(err.wait(Instant::now() + LIMIT)?, "{words:?}: the daemon signalled no error");
        ensure!(err.take() == 1, "{words:?}: the daemon signalled the error more than once");
        let said = |line: &str| {
            (line.contains(" ERROR ") && line.contains("queue=0") && words.iter().all(|w| line.contains(w)))
                .then_some(())
        };
        self.daemon.log().wait_from(seen, &format!("saying {words:?}"), LIMIT, said)?;

        machine.write(1, 5, &[5; 512])?;
        let used = machine.queues[0].used_ready();
        machine.queues[0].kick();
        ensure!(
            machine.read(1, 5, 512)? == [5; 512],
            "{words:?}: the other queue read other bytes than it wrote"
        );
        ensure!(machine.queues[0].used_ready() == used, "{words:?}: the broken queue moved");

        machine.frontend.stop(&mut machine.queues[0])?;
        let size = machine.shape().size;
        machine.queues[0] = Queue::new(&mut machine.ram, 0, size, machine.frontend.features())?;
        machine.frontend.start(&machine.queues[0])?;
        ensure!(
            machine.read(0, 5, 512)? == [5; 512],
            "{words:?}: the new queue read other bytes than it wrote"
        );
        Ok(())
    }

    /// Ends the daemon with SIGTERM and returns its log. The daemon must have run until now and end with
    /// status 0.
    ///
    /// # Errors
    /// The daemon ended before or with another status.
    pub fn end(self) -> Result<Vec<String>> {
        let (status, log) = self.daemon.stop()?;
        ensure!(status.code() == Some(0), "after SIGTERM: {status}");
        let panics: Vec<&String> = log.iter().filter(|line| line.contains("panicked")).collect();
        ensure!(panics.is_empty(), "{panics:#?}");
        Ok(log)
    }

    /// Ends the daemon as [`Served::end`] does, and checks that its log has no warning.
    ///
    /// # Errors
    /// [`Served::end`] fails, or the log has a warning.
    pub fn end_without_warnings(self) -> Result<()> {
        self.end_with_warnings_of(&[])
    }

    /// Ends the daemon as [`Served::end`] does, and checks that each warning of its log contains one of these
    /// texts.
    ///
    /// # Errors
    /// [`Served::end`] fails, or the log has an error or another warning.
    pub fn end_with_warnings_of(self, texts: &[&str]) -> Result<()> {
        let log = self.end()?;
        // A busy machine can delay a step by more than a second; these warnings do not count.
        let expected = texts.iter().chain(&["still waiting"]);
        let is_expected = |line: &str| expected.clone().any(|text| line.contains(text));
        let is_trouble =
            |line: &&String| (line.contains(" WARN ") && !is_expected(line)) || line.contains(" ERROR ");
        let trouble: Vec<&String> = log.iter().filter(is_trouble).collect();
        ensure!(trouble.is_empty(), "{trouble:#?}");
        Ok(())
    }
}
