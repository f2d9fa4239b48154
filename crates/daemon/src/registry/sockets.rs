//! Sockets that the service manager has passed.

use std::collections::BTreeMap;
use std::io;

use kickless_sync::lock;

use super::Registry;
use crate::config::DeviceConfig;
use crate::socket::PassedListener;

impl Registry {
    /// Keeps a listening socket that the service manager has passed. A device of this name without a path, or
    /// with that of the socket, serves its front-ends. The first socket of a name stays.
    pub fn pass_socket(&self, name: String, socket: PassedListener) {
        lock(&self.state.passed).entry(name).or_insert(socket);
    }

    /// Returns duplicates of all sockets that the service manager has passed, with the names of their
    /// devices.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn passed_sockets(&self) -> io::Result<BTreeMap<String, PassedListener>> {
        let passed = lock(&self.state.passed);
        passed.iter().map(|(name, socket)| Ok((name.clone(), socket.try_clone()?))).collect()
    }

    /// Returns a duplicate of the socket that the service manager has passed for a device.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn passed_socket(&self, config: &DeviceConfig) -> io::Result<Option<PassedListener>> {
        let passed = lock(&self.state.passed);
        let socket = config.name().and_then(|name| passed.get(name)).map(PassedListener::try_clone);
        drop(passed);
        let path = config.serve.socket_path.as_deref();
        Ok(socket.transpose()?.filter(|socket| path.is_none_or(|path| socket.has_path(path))))
    }
}
