//! An error on its way to the wire: the parts that every `Status` of Wald carries.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, PreconditionViolation, StatusExt};
use wald_proto::v1::Reason;
use wald_storage::LogName;

/// The `domain` of every ErrorInfo.
const DOMAIN: &str = "wald.dev";

/// Maximum bytes of a message, and of preconditions. A status travels in HTTP/2 headers.
/// Clients take 8 or 16 KiB of headers; some end the connection over much more.
const MAX_MESSAGE_BYTES: usize = 1000;
const MAX_PRECONDITION_BYTES: usize = 2000;

/// Outcome of a request that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Provably nothing was written.
    NotApplied,
    /// It may or may not survive.
    Unknown,
}

/// Whether the same request may be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    /// Retry the request unchanged.
    Safe,
    /// Only with the same producer or expected_lsn.
    SafeWithCondition,
    /// It would fail the same way.
    Never,
}

/// Whether the RPC writes: only then the error has `outcome` and `retry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Append, Sync, administration.
    Write,
    /// Everything else.
    Read,
}

/// An error on its way to the wire.
pub(super) struct Failure {
    code: Code,
    reason: Reason,
    pub(super) message: String,
    facts: Vec<(&'static str, String)>,
    effect: Option<(Outcome, Retry)>,
    retry_after: Option<Duration>,
    field: Option<String>,
    pub(super) preconditions: Vec<PreconditionViolation>,
}

impl Failure {
    pub(super) fn new(code: Code, reason: Reason, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            facts: Vec::new(),
            effect: None,
            retry_after: None,
            field: None,
            preconditions: Vec::new(),
        }
    }

    pub(super) fn fact(mut self, key: &'static str, value: impl ToString) -> Self {
        self.facts.push((key, value.to_string()));
        self
    }

    pub(super) fn fact_if(self, key: &'static str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.fact(key, value),
            None => self,
        }
    }

    pub(super) fn with_message(mut self, message: String) -> Self {
        self.message = message;
        self
    }

    /// Builds the error of a call that writes nothing: it has no outcome.
    pub(super) fn of_read(mut self, message: String) -> Self {
        self.effect = None;
        self.with_message(message)
    }

    /// Builds the error of a call that writes and could not read the state of its log first. Nothing was written.
    pub(super) fn of_unbegun_write(self) -> Self {
        match self.code {
            Code::Unavailable | Code::ResourceExhausted => self.refused(Retry::Safe),
            _ => self.refused(Retry::Never),
        }
    }

    pub(super) fn refused(mut self, retry: Retry) -> Self {
        self.effect = Some((Outcome::NotApplied, retry));
        self
    }

    pub(super) fn unknown(mut self) -> Self {
        self.effect = Some((Outcome::Unknown, Retry::SafeWithCondition));
        self
    }

    pub(super) fn refused_if_write(self, access: Access, retry: Retry) -> Self {
        match access {
            Access::Write => self.refused(retry),
            Access::Read => self,
        }
    }

    pub(super) fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// Names the condition on a log that did not hold.
    pub(super) fn precondition(mut self, log: &LogName) -> Self {
        self.preconditions = vec![PreconditionViolation::new(
            self.reason.as_str(),
            log.as_str(),
            self.message.clone(),
        )];
        self
    }

    pub(super) fn field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    pub(super) fn status(mut self) -> Status {
        self.shorten();
        let mut metadata: std::collections::HashMap<String, String> = self
            .facts
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        if let Some((outcome, retry)) = self.effect {
            let outcome = match outcome {
                Outcome::NotApplied => "NOT_APPLIED",
                Outcome::Unknown => "UNKNOWN",
            };
            let retry = match retry {
                Retry::Safe => "SAFE",
                Retry::SafeWithCondition => "SAFE_WITH_CONDITION",
                Retry::Never => "NEVER",
            };
            metadata.insert("outcome".to_owned(), outcome.to_owned());
            metadata.insert("retry".to_owned(), retry.to_owned());
        }
        let mut details = ErrorDetails::with_error_info(self.reason.as_str(), DOMAIN, metadata);
        if let Some(field) = self.field {
            details.add_bad_request_violation(field, self.message.clone());
        }
        if !self.preconditions.is_empty() {
            details.set_precondition_failure(self.preconditions);
        }
        if self.retry_after.is_some() {
            details.set_retry_info(self.retry_after);
        }
        let status = Status::with_error_details(self.code, self.message, details);
        // Every status that a unit test makes is compared.
        #[cfg(test)]
        super::tests::assert_in_contract(&status);
        status
    }

    /// Leaves out the parts that no client would take.
    fn shorten(&mut self) {
        if self.message.len() > MAX_MESSAGE_BYTES {
            let whole = |end: &usize| self.message.is_char_boundary(*end);
            let end = (0..=MAX_MESSAGE_BYTES).rev().find(whole);
            self.message.truncate(end.unwrap_or(0));
            self.message.push('…');
        }
        let mut bytes = 0;
        let told = self.preconditions.iter().take_while(|violation| {
            bytes += violation.r#type.len();
            bytes += violation.subject.len() + violation.description.len();
            bytes <= MAX_PRECONDITION_BYTES
        });
        let told = told.count().max(1);
        self.preconditions.truncate(told);
    }
}
