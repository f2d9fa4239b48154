//! Compares the OpenRPC document with the calls.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use std::collections::BTreeSet;

use kickless_control::{Effect, METHODS, Method, OPENRPC};
use kickless_daemon::{PoolConfig, keys};
use kickless_kinds::kinds;
use serde_json::{Map, Value, json};

fn document() -> Value {
    serde_json::from_str(OPENRPC).unwrap()
}

fn methods(document: &Value) -> impl Iterator<Item = (&'static Method, &Value)> {
    METHODS.iter().zip(document["methods"].as_array().unwrap())
}

/// Returns the parameters that a call takes, among all that any call or any configuration has.
fn known(method: &Method, document: &Value) -> BTreeSet<String> {
    let described = document["methods"].as_array().unwrap().iter();
    let described = described.flat_map(|method| method["params"].as_array().unwrap());
    let described = described.map(|param| param["name"].as_str().unwrap().to_owned());
    let keys = kinds().keys().into_iter().chain(keys::<PoolConfig>());
    let all: BTreeSet<_> = described.chain(keys.map(|key| key.name().to_owned())).collect();
    let is_known = |name: &String| {
        let parsed = method.parse(Map::from_iter([(name.clone(), json!(1))]), &kinds());
        let refusals = ["is no key of this call", "it cannot change while"];
        parsed.map_or_else(|error| !refusals.iter().any(|why| error.message.contains(why)), |_| true)
    };
    all.into_iter().filter(is_known).collect()
}

#[test]
fn the_document_has_all_calls_with_their_effects() {
    let document = document();
    assert_eq!(document["methods"].as_array().unwrap().len(), METHODS.len());
    for (method, described) in methods(&document) {
        assert_eq!(described["name"], method.name);
        assert_eq!(described["x-changes"], method.effect == Effect::Changes, "{}", method.name);
        assert_eq!(described.get("x-descriptors").is_some(), method.takes_descriptors(), "{}", method.name);
        assert!(described["summary"].as_str().unwrap().ends_with('.'), "{}", method.name);
    }
}

#[test]
fn the_document_has_all_parameters() {
    let document = document();
    for (method, described) in methods(&document) {
        let described = described["params"].as_array().unwrap().iter();
        let names: BTreeSet<_> = described.map(|param| param["name"].as_str().unwrap().to_owned()).collect();
        assert_eq!(names, known(method, &document), "{}", method.name);
    }
}

/// Returns whether a parameter is for network cards alone.
fn is_of_card(name: &str) -> bool {
    let of_cards = ["frames", "bps-receive", "bps-transmit"];
    of_cards.iter().any(|of_cards| name.starts_with(of_cards))
        || ["port", "mac", "mtu", "num-queue-pairs", "offload", "ring-reset", "capture", "capture-length"]
            .contains(&name)
}

#[test]
fn the_examples_are_valid_and_the_required_parameters_are_needed() {
    let document = document();
    for (method, described) in methods(&document) {
        let params = described["params"].as_array().unwrap();
        let example = |param: &Value| {
            (param["name"].as_str().unwrap().to_owned(), param["schema"]["examples"][0].clone())
        };
        let required: Map<String, Value> =
            params.iter().filter(|param| param["required"] == true).map(example).collect();
        for param in params {
            let mut given = required.clone();
            let (name, value) = example(param);
            assert!(!value.is_null(), "{}: {name} has no example", method.name);
            if method.name == "device.add" {
                let (key, of) = if is_of_card(&name) { ("port", "null") } else { ("blk-file", "null:1G") };
                given.insert(key.into(), of.into());
            }
            if name == "blk-size" {
                given.insert("blk-file".into(), "qcow2:/a".into());
            }
            // A limit of a burst needs the limit, and its length needs the limit of the burst.
            for part in ["-max-length", "-max"] {
                if let Some(base) = name.strip_suffix(part) {
                    let others = params.iter().map(example);
                    let needed = |(key, _): &(String, Value)| *key == base || *key == format!("{base}-max");
                    given.extend(others.filter(|of| method.name == "device.add" && needed(of)));
                    break;
                }
            }
            given.insert(name.clone(), value);
            let parsed = method.parse(given.clone(), &kinds());
            assert!(parsed.is_ok(), "{} {given:?}: {:?}", method.name, parsed.err());
            if param["required"] == true {
                given.remove(&name);
                assert!(method.parse(given, &kinds()).is_err(), "{} without {name}", method.name);
            }
        }
    }
}

#[test]
fn the_document_is_formatted() {
    assert_eq!(serde_json::from_str::<Value>(OPENRPC).unwrap()["openrpc"], "1.3.2");
    assert!(OPENRPC.ends_with("}\n") && !OPENRPC.contains('\t'));
}
