//! How long a caller waits, and what it is told when that is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName};
use tonic::Status;

use crate::status::{self, Access};

/// When the caller stops waiting; in the extensions of a request.
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

/// The `grpc-timeout` header: up to eight digits and a unit.
pub(super) fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(&GRPC_TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
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
        assert_eq!(timeout("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(timeout("3M"), Some(Duration::from_secs(180)));
        assert_eq!(timeout("10S"), Some(Duration::from_secs(10)));
        assert_eq!(timeout("5m"), Some(Duration::from_millis(5)));
        assert_eq!(timeout("5u"), Some(Duration::from_micros(5)));
        assert_eq!(timeout("0n"), Some(Duration::ZERO));
        for bad in ["", "m", "5", "123456789S", "-1S", "5x"] {
            assert_eq!(timeout(bad), None, "{bad}");
        }
        assert_eq!(grpc_timeout(&HeaderMap::new()), None);
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
