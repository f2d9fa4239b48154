//! The lines that a program writes to its standard error.

use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::{io, mem, thread};
use tracing::{Span, info};

/// The longest line. The rest of a longer one is another line.
const LINE_BYTES_MAX: usize = 1024;

/// Logs the lines that come from a pipe, on a thread of its own, until its other end closes.
///
/// The lines may be those of a peer of the program, so each is the value of a field.
///
/// # Errors
/// The process cannot start a thread.
pub(crate) fn log_errors(program: &'static str, from: Arc<OwnedFd>, span: Span) -> io::Result<()> {
    let log = move || {
        let (mut lines, mut part) = (Lines::default(), [0; LINE_BYTES_MAX]);
        let say = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            // The program does not say which of its lines are errors. Most of passt's are not.
            info!(parent: &span, program, line = &*line, "a line of another program");
        };
        loop {
            match read(&*from, &mut part) {
                Ok(0) => break,
                Ok(len) => lines.add(&part[..len], say),
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        lines.end(say);
    };
    thread::Builder::new().name("errors".into()).spawn(log).map(drop)
}

/// Returns whether this is a pipe.
pub(crate) fn is_pipe(fd: &OwnedFd) -> bool {
    fstat(fd).is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::Fifo)
}

/// A line that has not ended yet.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    /// Adds bytes. Calls `say` for each line that has ended, and for parts of a line that is too long.
    fn add(&mut self, bytes: &[u8], say: impl Fn(&[u8])) {
        for byte in bytes {
            let is_end = *byte == b'\n';
            if !is_end {
                self.0.push(*byte);
            }
            if is_end || self.0.len() == LINE_BYTES_MAX {
                say_line(&mem::take(&mut self.0), &say);
            }
        }
    }

    /// Calls `say` for a last line without an end.
    fn end(self, say: impl Fn(&[u8])) {
        say_line(&self.0, &say);
    }
}

fn say_line(line: &[u8], say: &impl Fn(&[u8])) {
    if !line.is_empty() {
        say(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn lines_are_put_together_and_long_ones_are_cut() {
        let said = RefCell::new(Vec::new());
        let say = |line: &[u8]| said.borrow_mut().push(String::from_utf8(line.to_vec()).unwrap());
        let mut lines = Lines::default();
        for part in ["one\ntw", "o", "\n\n", &"x".repeat(LINE_BYTES_MAX + 1), "\n", "last"] {
            lines.add(part.as_bytes(), say);
        }
        lines.end(say);
        let long = "x".repeat(LINE_BYTES_MAX);
        assert_eq!(said.into_inner(), ["one", "two", long.as_str(), "x", "last"]);
    }
}
