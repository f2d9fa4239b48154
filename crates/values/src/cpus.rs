//! CPU lists in the form that the kernel and `taskset` use: `0-3,8`.

use std::fmt;
use std::str::FromStr;

use rustix::thread::CpuSet;

/// CPU numbers, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, cpu) in self.0.iter().enumerate() {
            write!(f, "{}{cpu}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for CpuList {
    type Err = String;

    /// Parses a list of CPUs and ranges of CPUs.
    ///
    /// # Errors
    /// The reason why `text` is not a list, as the end of a sentence.
    fn from_str(text: &str) -> Result<Self, String> {
        parse_cpus(text).map(Self)
    }
}

fn parse_cpus(text: &str) -> Result<Vec<usize>, String> {
    let mut cpus = Vec::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last) = (cpu(first)?, cpu(last)?);
        if first > last {
            return Err(format!("the range {item} is empty: write the smaller number first"));
        }
        for cpu in first..=last {
            if cpus.contains(&cpu) {
                return Err(format!("CPU {cpu} is named twice"));
            }
            cpus.push(cpu);
        }
    }
    Ok(cpus)
}

fn cpu(text: &str) -> Result<usize, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse() {
        Ok(cpu) if digits && cpu < CpuSet::MAX_CPU => Ok(cpu),
        Ok(_) | Err(_) if digits => Err(format!("there is no CPU {text}")),
        _ => Err(format!("{text:?} is not the number of a CPU (write a list like 0-3,8)")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parses_numbers_and_ranges() {
        assert_eq!(parse_cpus("0"), Ok(vec![0]));
        assert_eq!(parse_cpus("0-3,8"), Ok(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_cpus("8,0-1"), Ok(vec![8, 0, 1]));
        assert_eq!(parse_cpus("5-5"), Ok(vec![5]));
    }

    #[test]
    fn refuses_other_text() {
        for text in [
            "",
            ",",
            "0,",
            "-",
            "1-",
            "-1",
            "3-1",
            "0-2,1",
            "a",
            "+1",
            "0 - 1",
            "1024",
            "99999999999999999999",
        ] {
            assert!(parse_cpus(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn single_cpus_and_ranges_agree(first in 0..900usize, length in 1..100usize) {
            let singles: Vec<String> = (first..first + length).map(|cpu| cpu.to_string()).collect();
            let range = format!("{}-{}", first, first + length - 1);
            prop_assert_eq!(parse_cpus(&singles.join(",")), parse_cpus(&range));
        }

        #[test]
        fn never_panics(text in "\\PC{0,40}", list in "[0-9,-]{0,40}") {
            let _ = parse_cpus(&text);
            let _ = parse_cpus(&list);
        }
    }
}
