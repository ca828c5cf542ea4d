//! Values of flags: moments, places in a log, headers. Sizes and spans are `wald_text::units`.

use jiff::{SignedDuration, Timestamp};
use wald_text::units;

/// A moment, in microseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(pub(crate) i64);

/// RFC 3339, or a span, which means so long ago.
pub(crate) fn moment(text: &str) -> Result<Moment, String> {
    let moment = match text.parse::<Timestamp>() {
        Ok(moment) => moment,
        Err(_) => {
            const EXPECTED: &str = "expected a time such as 2026-11-20T17:00:00Z (UTC), or a span \
                                    before now, such as 10m or 7d";
            let ago = units::span(text).map_err(|_| EXPECTED)?;
            let ago = SignedDuration::try_from(ago).map_err(|_| EXPECTED)?;
            Timestamp::now()
                .checked_sub(ago)
                .map_err(|error| error.to_string())?
        }
    };
    Ok(Moment(moment.as_microsecond()))
}

/// Begin of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanBegin {
    Lsn(u64),
    Time(Moment),
}

/// Digits are an lsn; anything else is a moment.
pub(crate) fn place(text: &str) -> Result<ScanBegin, String> {
    match text.parse() {
        Ok(lsn) => Ok(ScanBegin::Lsn(lsn)),
        Err(_) => moment(text)
            .map(ScanBegin::Time)
            .map_err(|error| format!("not an lsn: {error}")),
    }
}

/// `LOG=LSN`; the name may contain `=`.
pub(crate) fn log_and_lsn(text: &str) -> Result<(String, u64), String> {
    let expected = || "expected LOG=LSN, such as orders=12".to_owned();
    let (log, lsn) = text.rsplit_once('=').ok_or_else(expected)?;
    Ok((log.to_owned(), lsn.parse().map_err(|_| expected())?))
}

/// `KEY=VALUE`; the value may contain `=`.
pub(crate) fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE, such as trace=abc".to_owned()),
    }
}

/// A size that a record may have.
pub(crate) fn record_size(text: &str) -> Result<u32, String> {
    let bytes = units::size(text)?;
    u32::try_from(bytes).map_err(|_| "a record has less than 4GiB".to_owned())
}

/// Bytes per second below this are slower than any device, so a unit was probably forgotten.
const SLOW_BYTES_PER_SECOND: u64 = 64 << 10;

/// Warns of a rate that was probably meant to have a larger unit.
pub(crate) fn warn_of_slow(bytes_per_second: u64) {
    if (1..SLOW_BYTES_PER_SECOND).contains(&bytes_per_second) {
        crate::output::say(&format!(
            "warning: --max-bytes-per-second is {}, which is very slow; write a unit, such as 50MB",
            units::shown_size(bytes_per_second)
        ));
    }
}

/// A number of things: whole, without unit.
pub(crate) fn count<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse()
        .map_err(|_| "expected a whole number without sign and unit, such as 1000".to_owned())
}

/// A number of things that is not 0.
pub(crate) fn one_or_more(text: &str) -> Result<u64, String> {
    match count(text)? {
        0 => Err("expected 1 or more".to_owned()),
        count => Ok(count),
    }
}

/// The number of a record in its log.
pub(crate) fn lsn(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| {
        "expected an lsn, a whole number such as 12; `walctl read LOG --time 10m --max 1` shows the \
         lsn of a time"
            .to_owned()
    })
}

/// A number as the names of segments have it.
pub(crate) fn hexadecimal(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16).map_err(|_| "expected up to 16 hexadecimal digits".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_splits_at_the_first_sign_and_needs_a_key() {
        assert_eq!(header("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(header("a").is_err() && header("=b").is_err());
    }

    #[test]
    fn place_tells_lsns_from_times() {
        assert_eq!(place("12"), Ok(ScanBegin::Lsn(12)));
        assert_eq!(
            place("1970-01-01T00:00:01Z"),
            Ok(ScanBegin::Time(Moment(1_000_000)))
        );
        assert!(place("yesterday").is_err());
    }

    #[test]
    fn log_and_lsn_splits_at_the_last_sign() {
        assert_eq!(log_and_lsn("a=b=3"), Ok(("a=b".to_owned(), 3)));
        assert!(log_and_lsn("a").is_err());
    }
}
