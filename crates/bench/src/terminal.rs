//! The width of the terminal.

use std::env;
use std::os::fd::AsFd;

use rustix::termios::tcgetwinsize;

/// The columns of a text that goes elsewhere than to a terminal.
const DEFAULT: usize = 80;

/// Returns the number of columns of a terminal. If `to` is none, this is `COLUMNS` of the environment, or 80.
pub(crate) fn width(to: impl AsFd) -> usize {
    let size = tcgetwinsize(to).ok().map(|size| usize::from(size.ws_col));
    let wanted = || env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    size.filter(|columns| *columns > 0).or_else(wanted).unwrap_or(DEFAULT)
}
