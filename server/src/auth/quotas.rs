//! Quotas of tenants in the engine, as the `auth_file` in force has them.
//!
//! ```text
//! start:  rules ──▶ quotas ──▶ engine, before the first call is served
//! reload: rules ──watch──▶ quotas ──▶ engine
//! ```
//!
//! The engine counts and refuses. Without `auth_file` there is no tenant and no quota.

use std::sync::Arc;

use tokio::sync::watch;
use wald_storage::{LogEngine, Quota, QuotaError, QuotaLimits, QuotaUse};

use super::rules::{Rules, Tenant};
use super::{Authority, TenantLimits};

/// Sets the quotas of all tenants, and keeps them as `auth_file` changes. The task ends with the rules.
///
/// # Errors
/// If the engine refuses the quotas.
pub(crate) async fn keep(
    authority: &Authority,
    engine: &Arc<dyn LogEngine>,
) -> Result<(), QuotaError> {
    let Authority::File(authority) = authority else {
        return Ok(());
    };
    let mut rules = authority.rules.clone();
    let mut in_force = quotas_of(&mut rules);
    set(&in_force, &**engine).await?;
    let engine = Arc::clone(engine);
    tokio::spawn(async move {
        while rules.changed().await.is_ok() {
            let quotas = quotas_of(&mut rules);
            // Rules also change with the keys of issuers.
            if quotas == in_force {
                continue;
            }
            match set(&quotas, &*engine).await {
                Ok(()) => in_force = quotas,
                Err(error) => tracing::error!(%error, "the quotas of tenants stay as they were"),
            }
        }
    });
    Ok(())
}

fn quotas_of(rules: &mut watch::Receiver<Arc<Rules>>) -> Vec<Quota> {
    let rules = Arc::clone(&rules.borrow_and_update());
    let tenants = rules.file.tenants.values();
    tenants.map(|tenant| quota(tenant)).collect()
}

async fn set(quotas: &[Quota], engine: &dyn LogEngine) -> Result<(), QuotaError> {
    let used = engine.set_quotas(quotas.to_vec()).await?;
    used.iter().for_each(warn);
    Ok(())
}

fn quota(tenant: &Tenant) -> Quota {
    let TenantLimits {
        logs,
        producers,
        cursors,
        stored_bytes,
        ..
    } = tenant.limits;
    Quota {
        tenant: tenant.name.as_str().into(),
        prefix: tenant.prefix.as_str().into(),
        limits: QuotaLimits {
            logs,
            producers,
            cursors,
            stored_bytes,
        },
    }
}

/// The limits of a quota: key, use, limit.
pub(crate) fn rows(of: &QuotaUse) -> [(&'static str, u64, Option<u64>); 4] {
    let (used, limits) = (&of.used, &of.quota.limits);
    [
        ("logs", used.logs, limits.logs),
        ("producers", used.producers, limits.producers),
        ("cursors", used.cursors, limits.cursors),
        ("stored_bytes", used.stored_bytes, limits.stored_bytes),
    ]
}

/// Warns of a limit that a tenant exceeds: it was lowered, or is new.
fn warn(of: &QuotaUse) {
    for (key, used, limit) in rows(of) {
        if let Some(limit) = limit.filter(|limit| used > *limit) {
            tracing::warn!(
                tenant = %of.quota.tenant,
                limit = key,
                used,
                most = limit,
                "a tenant exceeds a limit; it keeps everything, and gets QUOTA for more"
            );
        }
    }
}
