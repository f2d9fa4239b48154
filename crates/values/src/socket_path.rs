//! Paths of unix sockets.

/// The longest path of a unix socket in bytes. `sun_path` has 108 bytes, and the last one is a 0 (unix(7)).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
