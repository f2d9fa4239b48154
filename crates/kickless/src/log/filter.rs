//! Parses `--log-level`: a level, or a list of levels for single parts.
//!
//! `EnvFilter` treats each word that is not a level as the name of a module. A misspelt level would then
//! silence all other modules. This module therefore checks the levels and the names first.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// The parts of the program that write log lines, by the names of their crates.
const PARTS: [&str; 14] = [
    "kickless",
    "kickless_blk",
    "kickless_control",
    "kickless_daemon",
    "kickless_device",
    "kickless_disk",
    "kickless_driver",
    "kickless_io",
    "kickless_kinds",
    "kickless_net",
    "kickless_net_port",
    "kickless_opener",
    "kickless_vhost",
    "kickless_worker",
];

/// Parses `text`. The directives `base` apply where `text` is not more specific.
///
/// # Errors
/// `text` is not a valid filter. The error is the end of a sentence that begins with the option and `text`.
pub(super) fn parse(base: &str, text: &str) -> Result<EnvFilter, String> {
    let mut directives = Vec::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        directives.push(directive(word)?);
    }
    if directives.is_empty() {
        return Err("it is empty: give a level, such as info, or leave it out".into());
    }
    let checked = directives.join(",");
    EnvFilter::builder().parse(format!("{base}{checked}")).map_err(|error| error.to_string())
}

/// Checks a filter.
///
/// # Errors
/// It is not valid. The error is the end of a sentence, as that of [`parse`].
pub(crate) fn check(text: &str) -> Result<(), String> {
    parse("", text).map(drop)
}

/// Checks one directive and returns it in the syntax of `EnvFilter`.
fn directive(word: &str) -> Result<String, String> {
    if let Some(level) = level(word) {
        return Ok(level.to_string());
    }
    let after_span = word.rfind(']').unwrap_or(0);
    let equals = word[after_span..].find('=').map(|at| after_span + at);
    let (place, of) = equals.map_or((word, None), |at| (&word[..at], Some(&word[at + 1..])));
    let module = place.split('[').next().unwrap_or_default();
    let part = module.split("::").next().unwrap_or_default();
    let only_span = part.is_empty() && !place.is_empty();
    if !only_span && !PARTS.contains(&part) {
        return Err(match of {
            None => format!(
                "{word:?} is not a level: write error, warn, info, debug, trace or off, \
                 or PART=LEVEL, such as kickless_vhost=debug"
            ),
            Some(_) => format!("there is no part {part:?}: the parts are {}", PARTS.join(", ")),
        });
    }
    match of {
        None => Ok(place.into()),
        Some(of) => {
            let level = level(of).ok_or_else(|| {
                format!("{of:?} is not a level: write error, warn, info, debug, trace or off")
            })?;
            Ok(format!("{place}={level}"))
        }
    }
}

fn level(word: &str) -> Option<LevelFilter> {
    if word.eq_ignore_ascii_case("warning") {
        return Some(LevelFilter::WARN);
    }
    // `LevelFilter` would parse empty text as `error`.
    if word.is_empty() { None } else { word.parse().ok() }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn written(text: &str) -> String {
        parse("", text).unwrap().to_string()
    }

    #[test]
    fn levels() {
        for (text, level) in [
            ("warning", "warn"),
            ("WARNING", "warn"),
            ("Info", "info"),
            ("off", "off"),
            (" debug ", "debug"),
            ("3", "info"),
        ] {
            assert_eq!(written(text), level, "{text}");
        }
    }

    #[test]
    fn parts() {
        assert_eq!(written("kickless_vhost=debug"), "kickless_vhost=debug");
        assert_eq!(written("kickless_blk::queue=warning"), "kickless_blk::queue=warn");
        for text in [
            "info,kickless_vhost=debug",
            "warning, kickless_disk=trace",
            "kickless_io",
            "kickless_net",
            "[device{name=web}]=debug",
            "kickless_blk[device{name=web}]=debug,info",
        ] {
            assert!(parse("", text).is_ok(), "{text}");
        }
    }

    #[test]
    fn neither() {
        for text in ["ifno", "bogus", "info,wran", "kickles", "0x3", "=", "=info"] {
            let refused = parse("", text).unwrap_err();
            assert!(refused.contains("error, warn, info") || refused.contains("the parts are"), "{refused}");
        }
        let refused = parse("", "info,kickless_vhots=debug").unwrap_err();
        assert!(refused.contains("\"kickless_vhots\"") && refused.contains("kickless_vhost,"), "{refused}");
        for text in ["kickless=loud", "kickless_blk=", "kickless_blk=debug=info"] {
            assert!(parse("", text).unwrap_err().contains("is not a level"), "{text}");
        }
        for text in ["", " ", ",,"] {
            assert!(parse("", text).unwrap_err().contains("empty"), "{text:?}");
        }
    }

    #[test]
    fn each_part_that_logs_is_known() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for each in fs::read_dir(crates).unwrap() {
            // As for cargo, a directory without one is no crate: an older commit may have left it.
            let Ok(manifest) = fs::read_to_string(each.unwrap().path().join("Cargo.toml")) else { continue };
            let name = manifest.lines().find_map(|line| line.strip_prefix("name = ")).unwrap();
            let name = name.trim_matches('"').replace('-', "_");
            // Only tests use the testing crate, which catches what the others log.
            let logs =
                name != "kickless_testing" && manifest.lines().any(|line| line.starts_with("tracing."));
            assert!(!logs || PARTS.contains(&name.as_str()), "{name} is missing");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,40}", likely in "[a-z_,=:\\[\\]{} ]{0,40}") {
            let _ = parse("", &text);
            let _ = parse("", &likely);
        }
    }
}
