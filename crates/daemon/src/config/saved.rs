//! Writes the configuration of a daemon as people do: without what is the default anyway, and sizes with
//! units.

use indexmap::IndexMap;
use kickless_values::{format_size, parse_size};
use serde::Serialize;
use serde_json::{Result, Value};

use super::device::DeviceConfig;
use super::keys::{Key, Values, keys, read};
use super::kinds::Kinds;
use super::pool::PoolConfig;

/// The keys of a table of a file with their values, in the order in which they are written.
pub type SavedTable = IndexMap<String, Value>;

impl Kinds {
    /// Returns the table of a file that makes the same device.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub fn save(&self, device: &DeviceConfig) -> Result<SavedTable> {
        let own = self.own_keys();
        let mut table = table(device)?;
        // These make a device, so all other keys of it have their defaults.
        let is_own = |key: &str| own.contains(&key);
        let alone = table.iter().filter(|(key, _)| is_own(key));
        let alone: Values = alone.map(|(key, value)| (key.clone(), value.into())).collect();
        if let Ok(usual) = self.read(&alone) {
            let usual = self::table(&usual)?;
            table.retain(|key, value| is_own(key) || usual.get(key) != Some(value));
        }
        // People begin with them.
        let mut saved: SavedTable = own.iter().filter_map(|key| table.shift_remove_entry(*key)).collect();
        saved.extend(table);
        Ok(with_units(saved, &self.keys()))
    }
}

impl PoolConfig {
    /// Returns the table of a file with this configuration.
    ///
    /// # Errors
    /// None is known.
    pub fn save(&self) -> Result<SavedTable> {
        let mut table = table(self)?;
        if let Ok(usual) = read::<Self>(&Values::new()) {
            let usual = self::table(&usual)?;
            table.retain(|key, value| usual.get(key) != Some(value));
        }
        Ok(with_units(table, &keys::<Self>()))
    }
}

/// Returns the keys that have a value.
fn table(config: &impl Serialize) -> Result<SavedTable> {
    let mut table: SavedTable = serde_json::from_str(&serde_json::to_string(config)?)?;
    table.retain(|_, value| !value.is_null());
    Ok(table)
}

fn with_units(mut table: SavedTable, keys: &[Key]) -> SavedTable {
    for key in keys.iter().filter(|key| key.is_size()) {
        if let Some(Value::String(text)) = table.get_mut(key.name())
            && let Ok(bytes) = parse_size(text)
        {
            *text = format_size(bytes);
        }
    }
    table
}
