//! A strict reader of OpenMetrics 1.0 text. It refuses what Prometheus refuses, and more.

use std::collections::{BTreeMap, HashSet};

/// A sample: its name, its labels and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name.
    pub name: String,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The value.
    pub value: f64,
}

/// The family that samples belong to.
#[derive(Default)]
struct Family {
    name: String,
    kind: String,
    unit: String,
    has_help: bool,
    samples: Vec<Sample>,
}

/// Reads a text. Returns all samples.
///
/// # Errors
/// The text is not OpenMetrics. The error names the line.
pub fn parse_openmetrics(text: &str) -> Result<Vec<Sample>, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("the text does not end with EOF")?;
    let (mut all, mut family, mut names, mut series) =
        (Vec::new(), Family::default(), HashSet::new(), HashSet::new());
    for (number, line) in body.split_terminator('\n').enumerate() {
        let wrong = |why: &str| format!("line {}: {why}: {line}", number + 1);
        if let Some(meta) = line.strip_prefix("# ") {
            let mut words = meta.splitn(3, ' ');
            let (Some(word), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else {
                return Err(wrong("metadata without a value"));
            };
            if word == "TYPE" {
                family.check().map_err(|why| wrong(&why))?;
                all.append(&mut family.samples);
                if !names.insert(name.to_owned()) {
                    return Err(wrong("a second family of this name"));
                }
                family = Family { name: name.into(), kind: rest.into(), ..Family::default() };
            } else if name != family.name || !family.samples.is_empty() {
                return Err(wrong("metadata away from its family"));
            } else if word == "UNIT" && family.unit.is_empty() && name.ends_with(&format!("_{rest}")) {
                family.unit = rest.into();
            } else if word == "HELP" && !std::mem::replace(&mut family.has_help, true) {
                unescape(rest).ok_or_else(|| wrong("a wrong escape"))?;
            } else {
                return Err(wrong("unknown or repeated metadata"));
            }
            continue;
        }
        let sample = sample(line).ok_or_else(|| wrong("not a sample"))?;
        let suffixes: &[&str] = match family.kind.as_str() {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_count", "_sum"],
            "info" => &["_info"],
            "gauge" | "stateset" => &[""],
            _ => return Err(wrong("unknown type")),
        };
        if !suffixes.iter().any(|suffix| sample.name == format!("{}{suffix}", family.name)) {
            return Err(wrong("a name that its type does not have"));
        }
        if !series.insert(format!("{} {:?}", sample.name, sample.labels)) {
            return Err(wrong("a second sample of this series"));
        }
        if family.kind != "gauge" && !(sample.value >= 0.0 && sample.value.is_finite()) {
            return Err(wrong("a negative or infinite count"));
        }
        family.samples.push(sample);
    }
    family.check()?;
    all.append(&mut family.samples);
    Ok(all)
}

impl Family {
    /// Checks the samples together.
    fn check(&self) -> Result<(), String> {
        if !self.name.is_empty() && !self.has_help {
            return Err(format!("{} has no help", self.name));
        }
        if self.kind == "stateset" {
            let wrong =
                |of: &&Sample| !(of.labels.contains_key(&self.name) && [0.0, 1.0].contains(&of.value));
            return self.samples.iter().find(wrong).map_or(Ok(()), |of| Err(format!("no state: {of:?}")));
        }
        if self.kind != "histogram" {
            return Ok(());
        }
        // All buckets of a histogram come together, and its count and sum after them.
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for of in &self.samples {
            if of.name.ends_with("_bucket") {
                let le = of.labels.get("le").ok_or("a bucket without its end")?;
                let le = if le == "+Inf" { f64::INFINITY } else { le.parse().map_err(|_| "a wrong end")? };
                if buckets.last().is_some_and(|(end, count)| *end >= le || *count > of.value) {
                    return Err(format!("buckets that do not grow: {of:?}"));
                }
                buckets.push((le, of.value));
            } else if of.name.ends_with("_count") {
                if buckets.last() != Some(&(f64::INFINITY, of.value)) {
                    return Err(format!("not the count of its buckets: {of:?}"));
                }
            } else {
                buckets.clear();
            }
        }
        Ok(())
    }
}

/// Reads `NAME{LABELS} VALUE`.
fn sample(line: &str) -> Option<Sample> {
    let at = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(at);
    let is_name = |name: &str| {
        name.starts_with(|char: char| char.is_ascii_alphabetic() || char == '_')
            && name.chars().all(|char| char.is_ascii_alphanumeric() || char == '_')
    };
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (key, value) = rest.split_once("=\"")?;
            let mut escaped = false;
            let end = value.find(|char| {
                let ends = char == '"' && !escaped;
                escaped = char == '\\' && !escaped;
                ends
            })?;
            if !is_name(key) || labels.insert(key.to_owned(), unescape(&value[..end])?).is_some() {
                return None;
            }
            rest = &value[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) if !more.starts_with('}') => rest = more,
                Some(_) => return None,
                None if rest.starts_with('}') => {}
                None => return None,
            }
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ')?;
    if !is_name(name) || value.contains(' ') {
        return None;
    }
    Some(Sample { name: name.to_owned(), labels, value: value.parse().ok()? })
}

fn unescape(text: &str) -> Option<String> {
    let (mut plain, mut chars) = (String::new(), text.chars());
    while let Some(char) = chars.next() {
        plain.push(match char {
            '\\' => match chars.next()? {
                'n' => '\n',
                char @ ('\\' | '"') => char,
                _ => return None,
            },
            char => char,
        });
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_refused() {
        let good = "# TYPE a histogram\n# HELP a A.\na_bucket{le=\"1.0\"} 1\na_bucket{le=\"+Inf\"} 2\na_count 2\na_sum 0.5\n# EOF\n";
        assert_eq!(parse_openmetrics(good).unwrap().len(), 4);
        for (from, to) in [
            ("# EOF\n", ""),
            ("a_count 2", "a_count 3"),
            ("} 2", "} 0"),
            ("le=\"1.0\"", "le=\"x\""),
            ("a_sum 0.5", "a_sum -1"),
            ("a_sum 0.5", "a 0.5"),
            ("a_sum 0.5", "a_sum  0.5"),
            ("a_sum 0.5", "a_count 2"),
            ("# HELP a A.\n", ""),
            ("# HELP a A.", "# HELP b A."),
            ("le=\"1.0\"", "le=\"1.0\\\""),
        ] {
            assert!(parse_openmetrics(&good.replace(from, to)).is_err(), "{from} -> {to}");
        }
    }
}
