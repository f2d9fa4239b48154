//! The words of `kickless ctl`: which call they make, with which parameters.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use kickless_control::{METHODS, OPENRPC};
use kickless_values::{nearest, parse_number};
use serde_json::{Map, Value};

/// Short words for calls about devices. All but the first one have the name of a device after them.
const SHORT: [(&str, &str); 8] = [
    ("list", "device.list"),
    ("show", "device.get"),
    ("add", "device.add"),
    ("set", "device.set"),
    ("remove", "device.remove"),
    ("drain", "device.drain"),
    ("resume", "device.resume"),
    ("resize", "device.resize"),
];

/// A call with its parameters.
#[derive(Debug, PartialEq)]
pub(super) struct Words {
    /// The name of the call.
    pub(super) method: String,
    /// The parameters.
    pub(super) params: Map<String, Value>,
    /// It was named by a short word, as people do.
    pub(super) is_short: bool,
}

/// Reads the words. `control` is the path of the control socket, beside which a new device has its own.
///
/// # Errors
/// The words are no call. The error is one sentence.
pub(super) fn read(word: &str, rest: &[String], control: &Path) -> Result<Words> {
    let short = SHORT.iter().find(|(short, _)| *short == word).map(|(_, method)| *method);
    let Some(method) = short else {
        ensure!(word.contains('.'), "{}", unknown(word));
        let params = match rest {
            // A key begins with a letter.
            [text] if !text.starts_with(|first: char| first.is_ascii_alphabetic()) => object(text)?,
            keys => given(word, keys)?,
        };
        return Ok(Words { method: word.to_owned(), params, is_short: false });
    };
    if method == "device.list" {
        ensure!(rest.is_empty(), "ctl list takes no other word: ctl show NAME shows one device");
        return Ok(Words { method: method.into(), params: Map::new(), is_short: true });
    }
    let (name, keys) =
        rest.split_first().with_context(|| format!("give the name of a device: kickless ctl {word} NAME"))?;
    ensure!(!name.contains(['=', '{']), "give the name of the device first: kickless ctl {word} NAME");
    let mut params = given(method, keys)?;
    params.insert("name".into(), name.as_str().into());
    if method == "device.add" && !params.contains_key("socket-path") {
        let socket = control.with_file_name(format!("{name}.sock"));
        let socket = socket.to_str().with_context(|| format!("{}: it is no UTF-8", socket.display()))?;
        params.insert("socket-path".into(), socket.into());
    }
    Ok(Words { method: method.into(), params, is_short: true })
}

/// Reads parameters as a JSON object.
fn object(text: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Object(params)) => Ok(params),
        Ok(_) => bail!("the parameters must be a JSON object, such as {{\"name\": \"web\"}}"),
        Err(error) => Err(anyhow!(
            "{text:?} is no JSON object ({error}): write KEY=VALUE, or an object such as {{\"name\": \"web\"}}"
        )),
    }
}

/// Reads parameters that are written as `KEY=VALUE`. An empty value stands for `null`.
fn given(method: &str, words: &[String]) -> Result<Map<String, Value>> {
    let mut params = Map::new();
    if words.is_empty() {
        return Ok(params);
    }
    let document = document()?;
    for word in words {
        let (key, text) = word
            .split_once('=')
            .with_context(|| format!("{word:?} is no parameter: write KEY=VALUE, such as iops=5000"))?;
        let value = match kind(&document, method, key) {
            _ if text.is_empty() => Value::Null,
            Some("integer") => {
                let number: Result<u32, _> = parse_number(text, 0, u32::MAX);
                number.map_err(|why| anyhow!("{key}={text}: {why}"))?.into()
            }
            Some("boolean") => match text.parse::<bool>() {
                Ok(flag) => flag.into(),
                Err(_) => bail!("{key}={text}: write {key}=true or {key}=false"),
            },
            Some("array") => text.split(',').collect(),
            _ => text.into(),
        };
        ensure!(params.insert(key.into(), value).is_none(), "{key} is given twice: give it once");
    }
    Ok(params)
}

/// Returns the type of a parameter. `None` for one that this program does not know: the daemon may.
fn kind<'d>(document: &'d Value, method: &str, key: &str) -> Option<&'d str> {
    let named = |all: &'d Value, name: &str| all.as_array()?.iter().find(|one| one["name"] == name);
    named(&named(&document["methods"], method)?["params"], key)?["schema"]["type"].as_str()
}

/// Returns the sentence about a word that is no call.
fn unknown(word: &str) -> String {
    let shorts = SHORT.iter().map(|(short, _)| *short);
    match nearest(word, shorts.clone().chain(METHODS.iter().map(|method| method.name))) {
        Some(nearest) => format!("there is no call {word:?}: did you mean {nearest}?"),
        None => format!(
            "there is no call {word:?}: write {}, or the name of a call (see kickless ctl help)",
            shorts.collect::<Vec<_>>().join(", ")
        ),
    }
}

fn document() -> Result<Value> {
    serde_json::from_str(OPENRPC).context("the description of the calls cannot be read")
}

/// Returns the text about all calls, or about the call or short word `about`.
///
/// # Errors
/// There is no such call.
pub(super) fn help(about: Option<&str>) -> Result<String> {
    let document = document()?;
    let methods = document["methods"].as_array().context("no calls")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if let Some(about) = about {
        let name = SHORT.iter().find(|(short, _)| *short == about).map_or(about, |(_, method)| *method);
        let method = methods.iter().find(|method| method["name"] == name).with_context(|| unknown(about))?;
        let mut said = format!("{name}\n  {}\n", text(&method["summary"]));
        if let Some(more) = method["description"].as_str() {
            said += &format!("  {more}\n");
        }
        for param in method["params"].as_array().into_iter().flatten() {
            let needed = if param["required"] == true { " (needed)" } else { "" };
            let example = match &param["schema"]["examples"][0] {
                Value::Null => String::new(),
                Value::String(example) => format!("={example}"),
                example => format!("={example}"),
            };
            said += &format!(
                "\n  {}{example}{needed}\n      {}\n",
                text(&param["name"]),
                text(&param["description"])
            );
        }
        return Ok(said);
    }
    let mut said = String::from("Words for people:\n");
    for (short, method) in SHORT {
        let name = if short == "list" { "" } else { " NAME" };
        let keys =
            if ["add", "set", "remove", "drain", "resize"].contains(&short) { " [KEY=VALUE...]" } else { "" };
        said += &format!("  {:32} {method}\n", format!("{short}{name}{keys}"));
    }
    said += "\nCalls, with KEY=VALUE... or a JSON object:\n";
    for method in methods {
        said += &format!("  {:18} {}\n", text(&method["name"]), text(&method["summary"]));
    }
    said += "\n`kickless ctl help device.add` shows the keys of a call.\n";
    Ok(said)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn words(line: &str) -> Result<(String, Value), String> {
        let mut words = line.split(' ').map(str::to_owned);
        let (word, rest) = (words.next().unwrap(), words.collect::<Vec<_>>());
        let read = read(&word, &rest, "/run/kickless/control.sock".as_ref());
        read.map(|words| (words.method, Value::Object(words.params))).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn words_are_calls() {
        let is = |line: &str, method: &str, params: Value| {
            assert_eq!(words(line), Ok((method.to_owned(), params)), "{line}");
        };
        is("list", "device.list", json!({}));
        is("show web", "device.get", json!({ "name": "web" }));
        let added = json!({ "name": "web", "blk-file": "/srv/a=b.img", "read-only": true, "num-queues": 8,
            "socket-path": "/run/kickless/web.sock" });
        is("add web blk-file=/srv/a=b.img read-only=true num-queues=8", "device.add", added);
        let added = json!({ "name": "web", "port": "null", "socket-path": "/tmp/a" });
        is("add web port=null socket-path=/tmp/a", "device.add", added);
        is("set web iops=5000 bps=100M", "device.set", json!({ "name": "web", "iops": 5000, "bps": "100M" }));
        is("set web iops=", "device.set", json!({ "name": "web", "iops": null }));
        is("remove web mode=drain", "device.remove", json!({ "name": "web", "mode": "drain" }));
        is("daemon.reload remove-used=true", "daemon.reload", json!({ "remove-used": true }));
        is("device.get {\"name\":\"web\"}", "device.get", json!({ "name": "web" }));
        // A newer daemon may have them.
        is("device.blink name=web times=3", "device.blink", json!({ "name": "web", "times": "3" }));
    }

    #[test]
    fn mistakes_are_sentences() {
        for (line, sentence) in [
            ("lst", "there is no call \"lst\": did you mean list?"),
            ("device", "there is no call \"device\": write list, show, add,"),
            ("show", "give the name of a device: kickless ctl show NAME"),
            ("set iops=5", "give the name of the device first"),
            (
                "set web iops=5k",
                "iops=5k: it must be a number from 0 to 4294967295, without a unit: write 5000",
            ),
            ("set web iops", "\"iops\" is no parameter: write KEY=VALUE"),
            ("set web iops=5 iops=6", "iops is given twice"),
            ("add web blk-file=a read-only=yes", "read-only=yes: write read-only=true or read-only=false"),
            ("list all", "takes no other word"),
            ("device.get []", "must be a JSON object"),
            ("device.get {]", "\"{]\" is no JSON object"),
        ] {
            let error = words(line).unwrap_err();
            assert!(error.contains(sentence), "{line}: {error}");
        }
    }

    #[test]
    fn help_names_each_call() {
        let all = help(None).unwrap();
        for (short, method) in SHORT {
            assert!(
                all.contains(&format!("\n  {short} ")) && all.contains(&format!("\n  {method} ")),
                "{all}"
            );
        }
        let add = help(Some("add")).unwrap();
        assert!(
            add.contains("\n  blk-file=null:1G\n")
                && add.contains("socket-path=/run/kickless/web.sock (needed)")
        );
        assert!(help(Some("nothing")).is_err());
    }
}
