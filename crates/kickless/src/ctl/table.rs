//! Results of calls as people read them.

use serde_json::Value;

/// Returns a table of the devices of `daemon.snapshot`.
pub(super) fn devices(snapshot: &Value) -> String {
    let mut rows = vec![["NAME", "STATE", "KIND", "SERVES", "SOCKET"].map(str::to_owned).to_vec()];
    let mut errors = String::new();
    for device in snapshot["devices"].as_array().into_iter().flatten() {
        let config = &device["config"];
        let serves = ["blk-file", "port"].iter().find_map(|key| config[*key].as_str()).unwrap_or_default();
        let leaving = if device["leaving"] == true { " (leaving)" } else { "" };
        rows.push(vec![
            shown(&device["name"]),
            shown(&device["state"]) + leaving,
            shown(&config["kind"]),
            plain(serves),
            shown(&config["socket-path"]),
        ]);
        if device["error"].is_string() {
            errors += &format!("{}: {}\n", shown(&device["name"]), shown(&device["error"]));
        }
    }
    if rows.len() == 1 {
        return "no devices\n".into();
    }
    aligned(&rows) + &errors
}

/// Returns the members of an object, one in each line, without those that are `null`. Members of an object
/// within it follow.
pub(super) fn members(object: &Value) -> String {
    let mut rows = Vec::new();
    collect(object, &mut rows);
    if rows.is_empty() { "done\n".into() } else { aligned(&rows) }
}

fn collect(object: &Value, rows: &mut Vec<Vec<String>>) {
    let members = || object.as_object().into_iter().flatten();
    for (key, value) in members() {
        match value {
            Value::Null | Value::Object(_) => {}
            // The name of a device is in its configuration too.
            _ if rows.iter().any(|row| row[0] == *key) => {}
            Value::Array(all) => {
                rows.push(vec![plain(key), all.iter().map(shown).collect::<Vec<_>>().join(", ")]);
            }
            value => rows.push(vec![plain(key), shown(value)]),
        }
    }
    members().filter(|(_, value)| value.is_object()).for_each(|(_, value)| collect(value, rows));
}

/// Pads each column but the last one to its longest cell.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => plain(text),
        Value::Null => String::new(),
        value => plain(&value.to_string()),
    }
}

/// Returns the text without characters that control a terminal.
fn plain(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn devices_stand_in_columns() {
        let snapshot = json!({ "devices": [
            { "name": "web", "state": "connected",
              "config": { "kind": "blk", "blk-file": "/srv/web.img", "socket-path": "/run/web.sock" } },
            { "name": "n", "state": "unavailable", "error": "no\u{1b}[2J", "leaving": true,
              "config": { "kind": "net", "port": "tap:a", "socket-path": "/run/n.sock" } },
        ]});
        assert_eq!(
            devices(&snapshot),
            "NAME  STATE                  KIND  SERVES        SOCKET\n\
             web   connected              blk   /srv/web.img  /run/web.sock\n\
             n     unavailable (leaving)  net   tap:a         /run/n.sock\n\
             n: no?[2J\n"
        );
        assert_eq!(devices(&json!({ "devices": [] })), "no devices\n");
    }

    #[test]
    fn members_stand_in_lines() {
        let device = json!({ "name": "web", "config": { "blk-file": "a", "iops": null, "read-only": false }, "all": [1, 2] });
        assert_eq!(members(&device), "all        1, 2\nname       web\nblk-file   a\nread-only  false\n");
        assert_eq!(members(&json!({})), "done\n");
    }
}
