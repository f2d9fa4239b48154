//! Durations with a unit: `500us`, `1.5ms`, `3s`.

use std::time::Duration;

/// Parses a duration: digits, an optional fraction, and a unit.
///
/// The units are `ns`, `us`, `ms`, `s`, `m` (or `min`) and `h`. A plain `0` needs no unit. The largest
/// duration is about 580 years.
///
/// # Errors
/// The reason why `text` is not a duration, as the end of a sentence.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(format!("{text:?} is not a duration (write it like 500us or 3s)"));
    }
    let unit: u64 = match unit {
        "" if number == "0" => 1,
        "" => return Err(format!("{text:?} has no unit (write it like 500us or 3s)")),
        "ns" => 1,
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(format!("{unit:?} is not a unit of time (use us, ms, s, m or h)")),
    };
    let too_long = || format!("{text:?} is too long");
    let whole: u64 = whole.parse().map_err(|_| too_long())?;
    let fraction = fraction.trim_end_matches('0');
    // A whole number of nanoseconds has at most 13 digits after the point: 0.0000000000025h is 9 ns. The
    // limit is a little higher, and small enough for `parts` to fit into 64 bits.
    let scale = 10u64.checked_pow(fraction.len() as u32).filter(|_| fraction.len() <= 15);
    let parts = if fraction.is_empty() { Some(0) } else { fraction.parse::<u64>().ok() };
    let (Some(scale), Some(parts)) = (scale.map(u128::from), parts.map(u128::from)) else {
        return Err(format!("{text:?} has too many digits after the point"));
    };
    let parts = parts * u128::from(unit);
    if !parts.is_multiple_of(scale) {
        return Err(format!("{text:?} is not a whole number of nanoseconds"));
    }
    let nanos = u128::from(whole) * u128::from(unit) + parts / scale;
    u64::try_from(nanos).map(Duration::from_nanos).map_err(|_| too_long())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNITS: [(&str, u64); 5] =
        [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000), ("h", 3_600_000_000_000)];

    #[test]
    fn parses_every_unit() {
        for (text, nanos) in [
            ("0", 0),
            ("0s", 0),
            ("500us", 500_000),
            ("500\u{b5}s", 500_000),
            ("1.5ms", 1_500_000),
            ("1.50ms", 1_500_000),
            ("3s", 3_000_000_000),
            ("0.000000001s", 1),
            ("2m", 120_000_000_000),
            ("2min", 120_000_000_000),
            ("1h", 3_600_000_000_000),
            ("7ns", 7),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
    }

    #[test]
    fn refuses_other_text() {
        for (text, why) in [
            ("", "not a duration"),
            ("s", "not a duration"),
            (".5s", "not a duration"),
            ("5.s", "not a duration"),
            ("1.2.3s", "not a duration"),
            ("-1s", "not a duration"),
            ("+1s", "not a duration"),
            ("00", "no unit"),
            ("5", "no unit"),
            ("1 s", "unit of time"),
            ("1S", "unit of time"),
            ("1s30ms", "unit of time"),
            ("0.5ns", "whole number"),
            ("1.0000000001s", "whole number"),
            ("99999999999h", "too long"),
        ] {
            let said = parse_duration(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
        assert!(parse_duration(&format!("{}s", "9".repeat(100))).is_err());
        assert!(parse_duration(&format!("0.{}s", "1".repeat(100))).is_err());
    }

    proptest! {
        #[test]
        fn every_whole_number_of_units(n in any::<u64>(), unit in 0..UNITS.len()) {
            let (unit, nanos) = UNITS[unit];
            let n = n / nanos;
            prop_assert_eq!(parse_duration(&format!("{n}{unit}")), Ok(Duration::from_nanos(n * nanos)));
        }

        #[test]
        fn every_number_of_nanoseconds_in_seconds(nanos in any::<u64>()) {
            let text = format!("{}.{:09}s", nanos / 1_000_000_000, nanos % 1_000_000_000);
            prop_assert_eq!(parse_duration(&text), Ok(Duration::from_nanos(nanos)));
        }

        #[test]
        fn never_panics(text in "\\PC{0,40}", digits in "[0-9.]{0,50}[numsh]{0,3}") {
            let _ = parse_duration(&text);
            let _ = parse_duration(&digits);
        }
    }
}
