//! Deadlines: the time that a caller waits, and the error that it gets afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName};
use tonic::Status;

use crate::status::{self, Access};

/// Time at which the caller stops waiting; in the extensions of a request.
#[derive(Debug, Clone)]
pub(crate) struct Deadline {
    /// The moment.
    pub(crate) at: Instant,
    /// Whether the request has reached the engine: from then on its outcome is unknown
    /// until it is answered, before it nothing was written.
    begun: Arc<AtomicBool>,
}

impl Deadline {
    pub(crate) fn new(at: Instant) -> Self {
        Self {
            at,
            begun: Arc::default(),
        }
    }

    /// Says that the request is about to reach the engine; false if it is too late.
    pub(crate) fn begin(&self) -> bool {
        let in_time = Instant::now() < self.at;
        if in_time {
            self.begun.store(true, Ordering::Relaxed);
        }
        in_time
    }

    /// The answer when the moment has come.
    pub(super) fn passed(&self, access: Access) -> Status {
        if access == Access::Write && !self.begun.load(Ordering::Relaxed) {
            return status::deadline_before_start();
        }
        status::deadline_under_way(access)
    }
}

static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// A `grpc-timeout` that is not one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MalformedTimeout;

/// The `grpc-timeout` header: one to eight digits and a unit.
///
/// # Errors
/// If the header is there and is anything else.
pub(super) fn grpc_timeout(headers: &HeaderMap) -> Result<Option<Duration>, MalformedTimeout> {
    match headers.get(&GRPC_TIMEOUT) {
        None => Ok(None),
        Some(value) => timeout(value.as_bytes()).map(Some).ok_or(MalformedTimeout),
    }
}

fn timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = digits.iter().fold(0, |number: u64, digit| {
        number * 10 + u64::from(digit - b'0')
    });
    Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeout_is_read_in_every_unit() {
        let timeout = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            grpc_timeout(&headers)
        };
        for (text, meant) in [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("10S", Duration::from_secs(10)),
            ("5m", Duration::from_millis(5)),
            ("5u", Duration::from_micros(5)),
            ("0n", Duration::ZERO),
            ("99999999H", Duration::from_secs(99_999_999 * 3600)),
        ] {
            assert_eq!(timeout(text), Ok(Some(meant)), "{text}");
        }
        for bad in ["", "m", "5", "123456789S", "-1S", "+1S", "5x", "abc", "1 S"] {
            assert_eq!(timeout(bad), Err(MalformedTimeout), "{bad}");
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn outcome_is_unknown_only_once_a_write_has_begun() {
        let outcome = |status: &Status| {
            use tonic_types::StatusExt as _;
            let details = status.get_error_details();
            details
                .error_info()
                .unwrap()
                .metadata
                .get("outcome")
                .cloned()
        };
        let deadline = Deadline::new(Instant::now() + Duration::from_secs(60));
        let waiting = deadline.passed(Access::Write);
        assert_eq!(outcome(&waiting).as_deref(), Some("NOT_APPLIED"));
        assert!(deadline.clone().begin());
        let begun = deadline.passed(Access::Write);
        assert_eq!(outcome(&begun).as_deref(), Some("UNKNOWN"));
        assert_eq!(outcome(&deadline.passed(Access::Read)), None);
    }
}
