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
    /// Returns the tables of a file that make the same devices.
    ///
    /// # Errors
    /// A path is not UTF-8.
    pub fn save<'d>(&self, devices: impl IntoIterator<Item = &'d DeviceConfig>) -> Result<Vec<SavedTable>> {
        let (own, sizes) = (self.own_keys(), sizes(&self.keys()));
        devices.into_iter().map(|device| self.save_one(device, &own, &sizes)).collect()
    }

    fn save_one(&self, device: &DeviceConfig, own: &[&str], sizes: &[String]) -> Result<SavedTable> {
        let mut table = table(device)?;
        // People begin with these.
        let mut saved: SavedTable = own.iter().filter_map(|key| table.shift_remove_entry(*key)).collect();
        // They make a device, so all other keys of it have their defaults.
        let alone: Values = saved.iter().map(|(key, value)| (key.clone(), value.into())).collect();
        if let Ok(usual) = self.read(&alone) {
            leave_out(&mut table, &usual)?;
        }
        saved.extend(table);
        Ok(with_units(saved, sizes))
    }
}

impl PoolConfig {
    /// Returns the table of a file with this configuration.
    ///
    /// # Errors
    /// A value has no JSON.
    pub fn save(&self) -> Result<SavedTable> {
        let mut table = table(self)?;
        if let Ok(usual) = read::<Self>(&Values::new()) {
            leave_out(&mut table, &usual)?;
        }
        Ok(with_units(table, &sizes(&keys::<Self>())))
    }
}

/// Leaves out the keys whose values are the usual ones.
fn leave_out(table: &mut SavedTable, usual: &impl Serialize) -> Result<()> {
    let usual = self::table(usual)?;
    table.retain(|key, value| usual.get(key) != Some(value));
    Ok(())
}

/// Returns the names of the keys whose values are numbers of bytes.
fn sizes(keys: &[Key]) -> Vec<String> {
    keys.iter().filter(|key| key.is_size()).map(|key| key.name().to_owned()).collect()
}

/// Returns the keys that have a value.
fn table(config: &impl Serialize) -> Result<SavedTable> {
    let mut table: SavedTable = serde_json::from_str(&serde_json::to_string(config)?)?;
    table.retain(|_, value| !value.is_null());
    Ok(table)
}

fn with_units(mut table: SavedTable, sizes: &[String]) -> SavedTable {
    for key in sizes {
        if let Some(Value::String(text)) = table.get_mut(key)
            && let Ok(bytes) = parse_size(text)
        {
            *text = format_size(bytes);
        }
    }
    table
}
