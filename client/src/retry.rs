//! Rules for repeating calls.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use tokio::time::Instant;
use wald_proto::v1::Reason;

use crate::error::{Error, Retry};
use crate::nodes::NextNode;

/// Number and pace of repeats of a call, within its deadline.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// Maximum attempts, the first included. Default: 16, whose pauses are longer than the
    /// default deadline, so that the deadline decides. 1 repeats nothing. A scan has no
    /// deadline; it gives up as well when it has failed for as long as the client's timeout. A
    /// follow that was open once retries without end.
    pub max_attempts: u32,
    /// Pause before the first repetition; doubles each time, with jitter down to half of
    /// it. Default: 50 ms. No pause comes before the attempt at an owner that a server names.
    pub first_pause: Duration,
    /// Longest pause. Default: 2 s. A pause that the server asks for is kept even if longer.
    pub max_pause: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: 16,
            first_pause: Duration::from_millis(50),
            max_pause: Duration::from_secs(2),
        }
    }
}

impl RetryPolicy {
    /// The time to wait after the `failures`th failure in a row.
    pub(crate) fn pause(&self, failures: u32, error: &Error) -> Duration {
        let doubled = 2u32.saturating_pow(failures.saturating_sub(1));
        let full = self.first_pause.saturating_mul(doubled).min(self.max_pause);
        full.mul_f64(0.5 + jitter() / 2.0)
            .max(error.retry_delay().unwrap_or_default())
    }
}

/// The time after a span: 30 years at the most, which counts as never. The clock cannot count every `Duration`.
pub(crate) fn after(time: Instant, span: Duration) -> Instant {
    time + span.min(Duration::from_secs(30 * 365 * 24 * 3600))
}

/// A number in 0..1. The standard library's hash keys are random enough to keep clients
/// from knocking in step, and cost no dependency.
fn jitter() -> f64 {
    let bits = RandomState::new().build_hasher().finish();
    f64::from(u32::try_from(bits >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}

/// Failed attempts in a row of a call, a producer or a scan.
#[derive(Debug, Default)]
pub(crate) struct FailedAttempts {
    pub(crate) count: u32,
    /// Whether no pause came after the last one.
    at_once: bool,
}

impl FailedAttempts {
    /// Counts a failed attempt. Returns the pause before the next one, which goes to `next`: none
    /// if a server named the owner. Of two attempts in a row only one has no pause, because two
    /// servers may name each other.
    pub(crate) fn pause(
        &mut self,
        policy: &RetryPolicy,
        error: &Error,
        next: NextNode,
    ) -> Duration {
        self.count += 1;
        self.at_once = next == NextNode::Owner && !self.at_once;
        match self.at_once {
            true => Duration::ZERO,
            false => policy.pause(self.count, error),
        }
    }
}

/// Effect of a request that is applied twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Nothing: it writes nothing.
    Read,
    /// None: the request names the final state, not a change.
    Harmless,
    /// It cannot be: a condition holds at most once.
    Guarded,
    /// Records twice.
    Harmful,
}

impl Repeat {
    /// The effect of an append that is sent twice.
    pub(crate) fn of_append(guarded: bool) -> Self {
        match guarded {
            true => Self::Guarded,
            false => Self::Harmful,
        }
    }

    /// Whether to send the request again after this error.
    pub(crate) fn allows(self, error: &Error) -> bool {
        // A quota does not pass without a change: its reason is reported at once.
        if error.reason() == Some(Reason::Quota) {
            return false;
        }
        match error.retry() {
            Retry::Safe => true,
            Retry::SafeWithCondition => self != Self::Harmful,
            Retry::Never => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn default_attempts_last_longer_than_the_default_deadline() {
        let policy = RetryPolicy::default();
        let error = Error::new(ErrorKind::Gone);
        let pauses = (1..policy.max_attempts).map(|failures| policy.pause(failures, &error));
        let lasting: Duration = pauses.sum();
        assert!(lasting >= crate::client::DEFAULT_TIMEOUT, "{lasting:?}");
    }
}
