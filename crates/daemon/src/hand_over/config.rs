//! Configurations and sockets as records have them.

use std::path::PathBuf;

use kickless_handover::{Given, Giving, v1};
use kickless_opener::NameOfSocket;

use crate::config::{DeviceConfig, Key, KeyError, Kinds, Notation, check, values};
use crate::sentence::sentence;
use crate::socket::{Endpoint, PassedListener};

/// Returns a configuration as a record has it: the keys of a call, without those that have no value.
pub(super) fn written(config: &DeviceConfig) -> Result<v1::Config, String> {
    let value = serde_json::to_value(config).map_err(|error| error.to_string())?;
    let mut keys = value.as_object().cloned().unwrap_or_default();
    keys.retain(|_, value| !value.is_null());
    Ok(keys)
}

/// Returns the configuration in a record. `known` are all keys of [`Kinds::keys`].
pub(super) fn read(config: &v1::Config, kinds: &Kinds, known: &[Key]) -> Result<DeviceConfig, String> {
    let values = values(config);
    check(known, &values).map_err(|error| match error {
        // A guest must not lose a limit, or a protection, because this program is older.
        KeyError::Unknown { key, .. } => {
            let name = config.get("name").and_then(|name| name.as_str()).unwrap_or_default();
            format!("the device {name} has the option {key}, which this program does not know")
        }
        KeyError::Mistake(mistake) => sentence(&mistake),
    })?;
    let read = kinds.read(&values).map_err(|mistake| sentence(&mistake))?;
    read.check(Notation::Keys).map_err(|mistake| sentence(&mistake))?;
    Ok(read)
}

/// Adds a listening socket to a record.
pub(super) fn give_listener(of: &PassedListener, to: &mut Giving) -> Result<v1::Listener, String> {
    let name = of.name.as_ref().map(|name| {
        let path = name.path.to_str().ok_or_else(|| "the path of a socket is not UTF-8".to_owned())?;
        Ok::<_, String>(v1::SocketName { path: path.to_owned(), device: name.device, inode: name.inode })
    });
    let socket = to.fd(&of.socket).map_err(|error| error.to_string())?;
    Ok(v1::Listener { socket, name: name.transpose()? })
}

/// Takes a listening socket from a record.
pub(super) fn take_listener(of: v1::Listener, given: &mut Given) -> Result<PassedListener, String> {
    let socket = given.fd(of.socket).map_err(|error| error.to_string())?;
    let Ok(Endpoint::Listening(listener)) = Endpoint::given(socket) else {
        return Err("a descriptor is no unix stream socket that listens".into());
    };
    let name = of.name.map(|name| NameOfSocket {
        path: PathBuf::from(name.path),
        device: name.device,
        inode: name.inode,
    });
    Ok(PassedListener { socket: listener.into_socket(), name, rights: None })
}
