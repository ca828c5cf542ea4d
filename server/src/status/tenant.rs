//! Requests beyond a limit of their tenant.

use tonic::{Code, Status};
use wald_proto::v1::Reason;
use wald_text::units::shown_size;

use super::failure::{Failure, Retry};
use super::{RETRY_LATER, RETRY_SOON};
use crate::auth::OverRate;

/// The tenant has used up a rate.
pub(crate) fn over_rate(tenant: &str, over: &OverRate) -> Status {
    let OverRate {
        setting,
        limit,
        wait,
    } = *over;
    let shown = match setting.contains("bytes") {
        true => shown_size(limit),
        false => limit.to_string(),
    };
    Failure::new(
        Code::ResourceExhausted,
        Reason::Rate,
        format!(
            "tenant {tenant} has used up its {setting} of {shown}; retry after {} ms",
            wait.as_millis() + 1
        ),
    )
    .fact("tenant", tenant)
    .fact("setting", setting)
    .fact("limit", limit)
    .refused(Retry::Safe)
    .retry_after(wait)
    .status()
}

/// The caller of a stream has another tenant since the rules changed.
pub(crate) fn tenant_changed() -> Status {
    Failure::new(
        Code::ResourceExhausted,
        Reason::Busy,
        "the caller has another tenant since auth_file changed; begin the stream again",
    )
    .refused(Retry::Safe)
    .retry_after(RETRY_SOON)
    .status()
}

/// The tenant has as many followers or connections as it may have.
pub(crate) fn over_count(tenant: &str, setting: &'static str, used: u64, limit: u64) -> Status {
    Failure::new(
        Code::ResourceExhausted,
        Reason::Quota,
        format!(
            "tenant {tenant} has {used} {setting}; its limit is {limit}; end some, or raise {setting} in auth_file"
        ),
    )
    .fact("tenant", tenant)
    .fact("setting", setting)
    .fact("used", used)
    .fact("limit", limit)
    .refused(Retry::Safe)
    .retry_after(RETRY_LATER)
    .status()
}

/// The requests of a tenant, or of a principal without one, use up their share of the memory. `holder`: its kind and
/// name.
pub(crate) fn share_busy(holder: &str, inflight: u64, limit: u64) -> Status {
    let busy = Failure::new(
        Code::ResourceExhausted,
        Reason::Busy,
        format!(
            "{holder} has {inflight} bytes of requests in flight, its share is {limit}; retry with backoff"
        ),
    );
    let (kind, name) = holder.split_once(' ').unwrap_or(("", holder));
    match kind {
        "tenant" => busy.fact("tenant", name),
        _ => busy.fact("principal", name),
    }
    .fact("inflight_bytes", inflight)
    .fact("limit_bytes", limit)
    .refused(Retry::Safe)
    .retry_after(RETRY_SOON)
    .status()
}
