//! Metrics of callers and their rights, and of files that are read again.

use std::time::SystemTime;

use prometheus::{Error, GaugeVec, IntCounterVec};

use super::{Maker, seconds_since_1970};
use crate::auth::Right;

/// Files that are read again together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// Certificates, keys, CA and CRL.
    Tls,
    /// `auth_file`.
    Auth,
    /// Keys of issuers of JWTs in files.
    JwksFile,
    /// Keys of issuers of JWTs behind URLs.
    JwksUrl,
    /// `encryption_key_file`.
    EncryptionKey,
}

impl FileKind {
    const ALL: [Self; 5] = [
        Self::Tls,
        Self::Auth,
        Self::JwksFile,
        Self::JwksUrl,
        Self::EncryptionKey,
    ];

    /// The log of the daemon after files have changed.
    pub(crate) fn in_force(self) -> &'static str {
        match self {
            Self::Tls => "the changed files of TLS are in force",
            Self::Auth => "the changed auth_file is in force",
            Self::JwksFile => "the changed files of jwks_file are in force",
            Self::JwksUrl => "the fetched keys of jwks_url are in force",
            Self::EncryptionKey => {
                "the changed encryption_key_file is in force: its last key wraps all data keys"
            }
        }
    }

    /// The log of the daemon after a fault.
    pub(crate) fn unusable(self) -> &'static str {
        match self {
            Self::Tls => "a file of TLS cannot be used; the earlier one stays in force",
            Self::Auth => "auth_file cannot be used; the earlier one stays in force",
            Self::JwksFile => "a jwks_file cannot be used; its earlier keys stay in force",
            Self::JwksUrl => {
                "keys cannot be fetched; those fetched earlier stay in force for 24 hours"
            }
            Self::EncryptionKey => {
                "encryption_key_file cannot be used; its earlier keys stay in force"
            }
        }
    }

    /// The label in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Auth => "auth",
            Self::JwksFile => "jwks_file",
            Self::JwksUrl => "jwks_url",
            Self::EncryptionKey => "encryption_key",
        }
    }
}

/// Reloads of files.
#[derive(Debug, Clone)]
pub(crate) struct ReloadMetrics {
    last_success: GaugeVec,
    failures: IntCounterVec,
}

impl ReloadMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let kinds = FileKind::ALL.map(FileKind::name);
        Ok(Self {
            last_success: make.gauges_by_kind(
                "wald_reload_last_success_timestamp_seconds",
                "Time in seconds since 1970 at which files were last read without a fault, by kind: tls (certificates, \
                 keys, CA, CRL), auth (auth_file), jwks_file and jwks_url (keys of issuers of JWTs; fetched keys count \
                 from the start), encryption_key (encryption_key_file). 0: there are none. More than 1 hour ago: the files have a fault, which the log names.",
                &kinds,
            )?,
            failures: make.counters(
                "wald_reload_failures_total",
                "Attempts to read files again, or to fetch keys from jwks_url, that found a fault, by kind; the earlier \
                 files stay in force. Above 0, the log names file and fault.",
                "kind",
                &kinds,
            )?,
        })
    }

    /// Records that the files were read without a fault.
    pub(crate) fn reloaded(&self, kind: FileKind, now: SystemTime) {
        let gauge = self.last_success.with_label_values(&[kind.name()]);
        gauge.set(seconds_since_1970(now));
    }

    /// Records that there are no files of this kind.
    pub(crate) fn absent(&self, kind: FileKind) {
        self.last_success.with_label_values(&[kind.name()]).set(0.0);
    }

    /// Counts an attempt that found a fault.
    pub(crate) fn failed(&self, kind: FileKind) {
        self.failures.with_label_values(&[kind.name()]).inc();
    }
}

/// The reason why a credential does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuthFailure {
    NoCredential,
    Bad,
    Expired,
    NoKeys,
}

impl AuthFailure {
    const ALL: [Self; 4] = [Self::NoCredential, Self::Bad, Self::Expired, Self::NoKeys];

    fn label(self) -> &'static str {
        match self {
            Self::NoCredential => "none",
            Self::Bad => "bad",
            Self::Expired => "expired",
            Self::NoKeys => "no_keys",
        }
    }
}

/// Callers that were refused.
#[derive(Debug, Clone)]
pub(crate) struct AuthMetrics {
    failures: IntCounterVec,
    denied: IntCounterVec,
}

impl AuthMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let rights: Vec<_> = Right::all().map(Right::name).collect();
        Ok(Self {
            failures: make.counters(
                "wald_auth_failures_total",
                "Calls and streams refused because of their credential, by reason: none; bad: unknown, wrong or revoked; \
                 expired; no_keys: no keys of the issuer of a JWT are in force. If bad rises, a client has an old token, or someone guesses.",
                "reason",
                &AuthFailure::ALL.map(AuthFailure::label),
            )?,
            denied: make.counters(
                "wald_authz_denied_total",
                "Requests refused because their principal lacks a right, by right (auth_file has the names). A client \
                 that needs the right has it granted in auth_file.",
                "op",
                &rights,
            )?,
        })
    }

    /// Counts a credential that does not count.
    pub(crate) fn failed(&self, failure: AuthFailure) {
        self.failures.with_label_values(&[failure.label()]).inc();
    }

    /// Counts a request without the right that it needs.
    pub(crate) fn denied(&self, right: Right) {
        self.denied.with_label_values(&[right.name()]).inc();
    }
}
