//! Quotas of tenants, and their use.

use prometheus::{Error, IntGaugeVec};
use wald_storage::Statistics;

use super::tenants::TENANTS;
use super::{Maker, signed};
use crate::auth;

/// Gauges of tenants, read from the engine when someone scrapes.
pub(super) struct QuotaGauges {
    logs: IntGaugeVec,
    producers: IntGaugeVec,
    cursors: IntGaugeVec,
    stored_bytes: IntGaugeVec,
    limits: IntGaugeVec,
}

impl QuotaGauges {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let of_tenant = |name, help| make.gauges(name, help, &["tenant"]);
        Ok(Self {
            logs: of_tenant(
                "wald_tenant_logs",
                "Logs of a tenant. At its limit new ones are refused with QUOTA.",
            )?,
            producers: of_tenant(
                "wald_tenant_producers",
                "Producers of all logs of a tenant. At its limit new ones are refused with QUOTA.",
            )?,
            cursors: of_tenant(
                "wald_tenant_cursors",
                "Cursors of all logs of a tenant. At its limit new ones are refused with QUOTA.",
            )?,
            stored_bytes: of_tenant(
                "wald_tenant_stored_bytes",
                "Bytes of the kept records of a tenant. Appends beyond its limit are refused with QUOTA; a trim frees at once.",
            )?,
            limits: make.gauges(
                "wald_tenant_limit",
                "Limit of a tenant, by limit: a key of limits in auth_file. Keys with bytes are in bytes, and rates are per second. Absent: no limit. Use above 0.9 of one for long: trim, delete or call less, or raise it.",
                &["tenant", "limit"],
            )?,
        })
    }

    /// The gauge of limits. [`super::tenants`] shows the limits that the engine does not check, and drops old labels.
    pub(super) fn limits(&self) -> IntGaugeVec {
        self.limits.clone()
    }

    pub(super) fn show(&self, now: &Statistics) {
        let gauges = [
            &self.logs,
            &self.producers,
            &self.cursors,
            &self.stored_bytes,
        ];
        // Tenants come and go, and so do their labels.
        gauges.iter().for_each(|gauges| gauges.reset());
        let mut quotas: Vec<_> = now.quotas.iter().collect();
        quotas.sort_unstable_by_key(|of| &of.quota.tenant);
        for of in quotas.into_iter().take(TENANTS) {
            let tenant = &*of.quota.tenant;
            for (gauges, (key, used, limit)) in gauges.iter().zip(auth::quota_rows(of)) {
                gauges.with_label_values(&[tenant]).set(signed(used));
                if let Some(limit) = limit {
                    let limits = self.limits.with_label_values(&[tenant, key]);
                    limits.set(signed(limit));
                }
            }
        }
    }
}
