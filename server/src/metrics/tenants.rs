//! Metrics of tenants. Names of tenants come from `auth_file`, and the first [`TENANTS`] of them become labels.

use std::sync::{Arc, OnceLock};

use prometheus::{Error, IntCounterVec, IntGaugeVec, Opts};

use super::{Maker, signed};
use crate::auth::TenantUsage;

/// Maximum number of tenants that are shown, in the order of their names.
pub(crate) const TENANTS: usize = 1_000;

/// The tenants of the `auth_file` in force.
type InForce = Box<dyn Fn() -> Vec<Arc<TenantUsage>> + Send + Sync>;

/// Figures of one tenant. Counters begin with the daemon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TenantFigures {
    pub(crate) appends: RateFigures,
    pub(crate) reads: RateFigures,
    /// Bytes of appends under way.
    pub(crate) inflight_bytes: u64,
    pub(crate) followers: u64,
    pub(crate) connections: u64,
}

/// Figures of the appends or the reads of one tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RateFigures {
    pub(crate) bytes: u64,
    pub(crate) records: u64,
    /// Requests refused because a rate was used up.
    pub(crate) refused: u64,
    /// Requests that waited for a rate.
    pub(crate) waits: u64,
}

/// The metrics.
pub(super) struct TenantMetrics {
    in_force: OnceLock<InForce>,
    bytes: IntCounterVec,
    records: IntCounterVec,
    refused: IntCounterVec,
    waits: IntCounterVec,
    inflight: IntGaugeVec,
    followers: IntGaugeVec,
    connections: IntGaugeVec,
    limits: IntGaugeVec,
}

impl TenantMetrics {
    /// `limits`: the gauge that [`super::quotas`] shows the limits of the engine in.
    pub(super) fn new(make: &Maker<'_>, limits: IntGaugeVec) -> Result<Self, Error> {
        let counters = |name: &str, help: &str| {
            let labels = ["tenant", "kind"];
            make.register(IntCounterVec::new(Opts::new(name, help), &labels)?)
        };
        Ok(Self {
            in_force: OnceLock::new(),
            bytes: counters(
                "wald_tenant_bytes_total",
                "Bytes of records that principals of a tenant sent or were given, by kind: append (rate limits let them pass), read.",
            )?,
            records: counters(
                "wald_tenant_records_total",
                "Records that principals of a tenant sent or were given, by kind: append (rate limits let them pass), read.",
            )?,
            refused: counters(
                "wald_tenant_rate_refusals_total",
                "Calls refused with RATE because their tenant had used up a rate, by kind: append, read. Rising for long: the tenant needs a higher rate or fewer calls.",
            )?,
            waits: counters(
                "wald_tenant_rate_waits_total",
                "Requests of sessions and messages of scans that waited because their tenant had used up a rate, by kind: append, read.",
            )?,
            inflight: make.gauges(
                "wald_tenant_inflight_bytes",
                "Bytes of appends of a tenant that have arrived and are not answered. Near its inflight_bytes, or near half of max_inflight_bytes: its calls get BUSY.",
                &["tenant"],
            )?,
            followers: make.gauges(
                "wald_tenant_followers",
                "Scans of a tenant that follow, and its reads that wait for a first record. At its limit followers, further ones get QUOTA.",
                &["tenant"],
            )?,
            connections: make.gauges(
                "wald_tenant_connections",
                "gRPC connections with calls of a tenant. At its limit connections, calls on further ones get QUOTA.",
                &["tenant"],
            )?,
            limits,
        })
    }

    /// Shows these tenants from now on.
    pub(super) fn watch(
        &self,
        tenants: impl Fn() -> Vec<Arc<TenantUsage>> + Send + Sync + 'static,
    ) {
        // Set once, at the start.
        let _ = self.in_force.set(Box::new(tenants));
    }

    /// Shows the figures of now. Tenants and limits that the file does not have any more are dropped.
    pub(super) fn show(&self) {
        let Some(in_force) = self.in_force.get() else {
            return;
        };
        for counters in [&self.bytes, &self.records, &self.refused, &self.waits] {
            counters.reset();
        }
        for gauges in [
            &self.inflight,
            &self.followers,
            &self.connections,
            &self.limits,
        ] {
            gauges.reset();
        }
        for tenant in in_force().iter().take(TENANTS) {
            let (name, figures) = (tenant.name(), tenant.figures());
            for (kind, rate) in [("append", figures.appends), ("read", figures.reads)] {
                for (counters, sum) in [
                    (&self.bytes, rate.bytes),
                    (&self.records, rate.records),
                    (&self.refused, rate.refused),
                    (&self.waits, rate.waits),
                ] {
                    counters.with_label_values(&[name, kind]).inc_by(sum);
                }
            }
            for (gauges, number) in [
                (&self.inflight, figures.inflight_bytes),
                (&self.followers, figures.followers),
                (&self.connections, figures.connections),
            ] {
                gauges.with_label_values(&[name]).set(signed(number));
            }
            for (key, limit) in tenant.limits() {
                if let Some(limit) = limit {
                    let limits = self.limits.with_label_values(&[name, key]);
                    limits.set(signed(limit));
                }
            }
        }
    }
}
