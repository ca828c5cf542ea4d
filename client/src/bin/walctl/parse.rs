//! Values of flags: spans, moments, places in a log.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// A span such as `5s`, `500ms`, `1h 30m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let span: SignedDuration = text
        .parse()
        .map_err(|_| "expected a span such as 5s, 500ms or 1h30m".to_owned())?;
    Duration::try_from(span).map_err(|_| "a span cannot be negative".to_owned())
}

/// A moment, in microseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(pub(crate) i64);

/// RFC 3339, or a span, which means so long ago.
pub(crate) fn moment(text: &str) -> Result<Moment, String> {
    let moment = match text.parse::<Timestamp>() {
        Ok(moment) => moment,
        Err(_) => {
            let ago: SignedDuration = text.parse().map_err(|_| {
                "expected a time such as 2026-11-20T17:00:00Z, or a span such as 10m, \
                 which is so long ago"
                    .to_owned()
            })?;
            Timestamp::now()
                .checked_sub(ago)
                .map_err(|error| error.to_string())?
        }
    };
    Ok(Moment(moment.as_microsecond()))
}

/// Where a scan begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Lsn(u64),
    Time(Moment),
}

/// Digits are an lsn; anything else is a moment.
pub(crate) fn place(text: &str) -> Result<Place, String> {
    match text.parse() {
        Ok(lsn) => Ok(Place::Lsn(lsn)),
        Err(_) => moment(text)
            .map(Place::Time)
            .map_err(|error| format!("not an lsn: {error}")),
    }
}

/// `LOG=LSN`; the name may contain `=`.
pub(crate) fn log_and_lsn(text: &str) -> Result<(String, u64), String> {
    let expected = || "expected LOG=LSN, such as orders=12".to_owned();
    let (log, lsn) = text.rsplit_once('=').ok_or_else(expected)?;
    Ok((log.to_owned(), lsn.parse().map_err(|_| expected())?))
}

/// A number as the names of segments have it.
pub(crate) fn hexadecimal(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16).map_err(|_| "expected up to 16 hexadecimal digits".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_reads_units_and_refuses_bare_and_negative_numbers() {
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert!(duration("5").is_err());
        assert!(duration("-5s").is_err());
    }

    #[test]
    fn place_tells_lsns_from_times() {
        assert_eq!(place("12"), Ok(Place::Lsn(12)));
        assert_eq!(
            place("1970-01-01T00:00:01Z"),
            Ok(Place::Time(Moment(1_000_000)))
        );
        assert!(place("yesterday").is_err());
    }

    #[test]
    fn log_and_lsn_splits_at_the_last_sign() {
        assert_eq!(log_and_lsn("a=b=3"), Ok(("a=b".to_owned(), 3)));
        assert!(log_and_lsn("a").is_err());
    }
}
