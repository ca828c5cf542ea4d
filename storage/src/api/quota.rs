//! Quotas of tenants: bounds on all logs whose names begin with one prefix.

use std::sync::Arc;

/// The quota of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    /// Name of the tenant, for errors and metrics. The engine does not interpret it.
    pub tenant: Arc<str>,
    /// The logs of the tenant are those whose names begin with these bytes. No prefix of a quota begins with that of
    /// another.
    pub prefix: Arc<str>,
    /// Limits of the tenant.
    pub limits: QuotaLimits,
}

/// Limits of a quota; `None` = no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Maximum number of logs.
    pub logs: Option<u64>,
    /// Maximum number of producers of all these logs.
    pub producers: Option<u64>,
    /// Maximum number of cursors of all these logs.
    pub cursors: Option<u64>,
    /// Maximum stored bytes, as [`LogInfo::stored_bytes`] counts them.
    ///
    /// [`LogInfo::stored_bytes`]: crate::LogInfo::stored_bytes
    pub stored_bytes: Option<u64>,
}

/// The present use of a quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaCounts {
    /// Number of logs.
    pub logs: u64,
    /// Number of producers of all these logs.
    pub producers: u64,
    /// Number of cursors of all these logs.
    pub cursors: u64,
    /// Stored bytes of all these logs.
    pub stored_bytes: u64,
}

/// A quota with its present use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaUse {
    /// The quota.
    pub quota: Quota,
    /// Its use.
    pub used: QuotaCounts,
}

/// Reason why quotas are refused. The ones before stay in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// A log could belong to two quotas.
    #[error(
        "the prefix {inner:?} of tenant {of_inner:?} lies in the prefix {outer:?} of tenant {of_outer:?}; a log must belong to one tenant"
    )]
    Nested {
        /// The longer prefix.
        inner: Arc<str>,
        /// Its tenant.
        of_inner: Arc<str>,
        /// The prefix that it begins with, perhaps the same.
        outer: Arc<str>,
        /// Its tenant.
        of_outer: Arc<str>,
    },
    /// There are more quotas than the engine holds.
    #[error("{given} tenants have quotas, and at most {max} may have some")]
    TooMany {
        /// Number given.
        given: usize,
        /// Maximum number.
        max: usize,
    },
}
