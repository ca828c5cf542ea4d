//! Sizes and spans of time, as people write them.
//!
//! ```text
//! size = number unit | number            1GiB   1.5GB   4096   0
//! span = (number unit)+ | "0"            7d   1h30m   1h 30m   1.5s   0
//! ```
//!
//! Spaces may stand around a unit. A number may have a fraction, as long as the result is a whole
//! number of bytes or nanoseconds. Units differ by case, since `MB` and `mb` would be a guess.

use std::time::Duration;

/// Units of sizes in bytes, the one to show first.
const SIZES: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];

/// Number of the entries of [`SIZES`] that sizes are shown in.
const SHOWN_SIZES: usize = 5;

/// Units of spans in nanoseconds, the longest first.
const SPANS: [(&str, u64); 8] = [
    ("w", 7 * 24 * 3_600_000_000_000),
    ("d", 24 * 3_600_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// Position in [`SPANS`] of the longest unit that spans are shown in.
const LONGEST_SHOWN_SPAN: usize = 2;

/// Reads a size in bytes. A number without a unit counts bytes.
///
/// # Errors
/// Says in one line which part is wrong, and gives examples.
pub fn size(text: &str) -> Result<u64, String> {
    const EXAMPLES: &str = "expected a size such as 4096, 64KiB, 1GiB or 1GB";
    let (number, rest) = number(text.trim()).ok_or(EXAMPLES)?;
    let unit = rest.trim();
    let factor = match SIZES.iter().find(|(name, _)| *name == unit) {
        Some((_, factor)) => *factor,
        None if unit.is_empty() => 1,
        None => return Err(unknown_size_unit(unit, EXAMPLES)),
    };
    number.times(factor).ok_or_else(|| {
        format!(
            "expected a whole number of bytes, at most {}",
            shown_size(u64::MAX)
        )
    })
}

/// Reads a span of time: one or more numbers, each with a unit; `0` needs none.
///
/// # Errors
/// Says in one line which part is wrong, and gives examples.
pub fn span(text: &str) -> Result<Duration, String> {
    const EXAMPLES: &str = "expected a span such as 500us, 5ms, 30s, 1h30m or 7d";
    let mut rest = text.trim();
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    let mut nanos = 0u64;
    let mut longest = usize::MAX;
    while longest == usize::MAX || !rest.is_empty() {
        let (number, after) = number(rest).ok_or(EXAMPLES)?;
        let after = after.trim_start();
        let end = after
            .find(|c: char| !c.is_alphabetic())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let place = SPANS
            .iter()
            .position(|(name, _)| *name == unit || (unit == "µs" && *name == "us"))
            .ok_or_else(|| unknown_span_unit(unit, EXAMPLES))?;
        // 30m1h may be a slip as well as intended.
        if longest != usize::MAX && place <= longest {
            return Err(format!("units must go from long to short; {EXAMPLES}"));
        }
        longest = place;
        nanos = number
            .times(SPANS[place].1)
            .and_then(|part| nanos.checked_add(part))
            .ok_or("expected a whole number of nanoseconds, at most 584 years")?;
        rest = after.trim_start();
    }
    Ok(Duration::from_nanos(nanos))
}

/// Writes a size in the largest unit that divides it, so that [`size`] reads the same.
pub fn shown_size(bytes: u64) -> String {
    let (unit, factor) = SIZES[..SHOWN_SIZES]
        .iter()
        .find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor))
        .unwrap_or(&("B", 1));
    format!("{}{unit}", bytes / factor)
}

/// Writes a span in the longest unit that divides it, hours at most, so that [`span`] reads
/// the same.
pub fn shown_span(span: Duration) -> String {
    let nanos = span.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    let (unit, length) = SPANS[LONGEST_SHOWN_SPAN..]
        .iter()
        .find(|(_, length)| nanos.is_multiple_of(u128::from(*length)))
        .unwrap_or(&("ns", 1));
    format!("{}{unit}", nanos / u128::from(*length))
}

/// A number with a fraction of at most 9 digits: `units` and 10⁻⁹ parts of one.
struct Number {
    units: u64,
    billionths: u64,
}

impl Number {
    /// The product; `None` if it is no whole number or too large.
    fn times(&self, factor: u64) -> Option<u64> {
        const BILLION: u128 = 1_000_000_000;
        let part = u128::from(self.billionths) * u128::from(factor);
        if !part.is_multiple_of(BILLION) {
            return None;
        }
        let whole = u128::from(self.units) * u128::from(factor) + part / BILLION;
        u64::try_from(whole).ok()
    }
}

/// The number that a text begins with, and the rest of the text.
fn number(text: &str) -> Option<(Number, &str)> {
    let (whole, rest) = digits(text);
    let units = whole.parse().ok()?;
    let Some(fraction) = rest.strip_prefix('.') else {
        return Some((
            Number {
                units,
                billionths: 0,
            },
            rest,
        ));
    };
    let (fraction, rest) = digits(fraction);
    if fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let billionths = format!("{fraction:0<9}").parse().ok()?;
    Some((Number { units, billionths }, rest))
}

fn digits(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text.split_at(end)
}

fn unknown_size_unit(unit: &str, examples: &str) -> String {
    let folded = unit.to_ascii_lowercase();
    let meant: Vec<&str> = SIZES
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| {
            let name = name.to_ascii_lowercase();
            name == folded || (folded.len() == 1 && folded != "b" && name.starts_with(&folded))
        })
        .collect();
    match meant.is_empty() {
        true => examples.to_owned(),
        false => format!("there is no unit {unit:?}: write {}", meant.join(" or ")),
    }
}

fn unknown_span_unit(unit: &str, examples: &str) -> String {
    if unit.is_empty() {
        return format!("a unit is missing; {examples}");
    }
    let meant = match unit.to_lowercase().as_str() {
        "w" | "week" | "weeks" => "w",
        "d" | "day" | "days" => "d",
        "h" | "hr" | "hrs" | "hour" | "hours" => "h",
        "min" | "mins" | "minute" | "minutes" => "m",
        "s" | "sec" | "secs" | "second" | "seconds" => "s",
        "ms" | "msec" | "millis" | "milliseconds" => "ms",
        "us" | "usec" | "micros" | "microseconds" => "us",
        _ => return examples.to_owned(),
    };
    format!("there is no unit {unit:?}: write {meant}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_reads_binary_and_decimal_units_and_bare_bytes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("64KiB", 64 << 10),
            (" 1 GiB ", 1 << 30),
            ("1GB", 1_000_000_000),
            ("1.5GiB", 3 << 29),
            ("0.5KB", 500),
            ("16777215TiB", 16_777_215 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn size_refuses_guesses_and_names_the_unit_that_was_meant() {
        for (text, part) in [
            ("", "expected a size"),
            ("MiB", "expected a size"),
            ("-1", "expected a size"),
            ("1gib", "write GiB"),
            ("1g", "write GiB or GB"),
            ("1mb", "write MB"),
            ("1.5B", "whole number of bytes"),
            ("16777216TiB", "whole number of bytes"),
            ("1.GB", "expected a size"),
            ("1 parsec", "expected a size"),
        ] {
            let error = size(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn span_reads_one_unit_or_several_from_long_to_short() {
        for (text, nanos) in [
            ("0", 0),
            ("0s", 0),
            ("7d", 7 * 86_400_000_000_000),
            ("1w", 7 * 86_400_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("1h 30m", 5_400_000_000_000),
            ("1.5s", 1_500_000_000),
            ("500us", 500_000),
            ("500µs", 500_000),
            ("5 ms", 5_000_000),
        ] {
            assert_eq!(span(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
    }

    #[test]
    fn span_refuses_guesses_and_names_the_unit_that_was_meant() {
        for (text, part) in [
            ("", "expected a span"),
            ("5", "a unit is missing"),
            ("-5s", "expected a span"),
            ("30m1h", "from long to short"),
            ("1h1h", "from long to short"),
            ("5min", "write m"),
            ("5 Seconds", "write s"),
            ("1 parsec", "expected a span"),
            ("0.5ns", "whole number of nanoseconds"),
            ("99999999w", "at most 584 years"),
        ] {
            let error = span(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn shown_values_are_read_as_the_same() {
        for bytes in [0, 1, 1000, 1024, 3 << 30, u64::MAX] {
            assert_eq!(size(&shown_size(bytes)), Ok(bytes));
        }
        for nanos in [0, 1, 1_500_000_000, 604_800_000_000_000] {
            let given = Duration::from_nanos(nanos);
            assert_eq!(span(&shown_span(given)), Ok(given));
        }
        assert_eq!(shown_size(1_000_000_000), "1000000000B");
        assert_eq!(shown_span(Duration::from_secs(5400)), "90m");
    }
}
