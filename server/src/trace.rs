//! One span for each gRPC call, sent to a collector over OTLP. The exporter is there with
//! the feature `otlp` only; without it, and without `otlp_endpoint`, a span is disabled and
//! costs a comparison.
//!
//! Spans are of the level TRACE and of a target of their own, so that the log does not
//! show them, whatever is traced.

#[cfg(feature = "otlp")]
mod otlp;

use std::time::Duration;

use http::HeaderMap;
use tracing::Span;
use tracing::field::Empty;
use wald_storage::AppendTimes;

#[cfg(feature = "otlp")]
pub(crate) use otlp::Exporter;

/// Target of the spans.
const TARGET: &str = "wald::call";

/// Codes that are the server's fault, by the conventions of OpenTelemetry: Unknown,
/// DeadlineExceeded, Unimplemented, Internal, Unavailable, DataLoss.
const FAULTS: [usize; 6] = [2, 4, 12, 13, 14, 15];

/// The span of a call to `path` (`/wald.v1.WalService/Append`), below the caller's span if
/// its `traceparent` is among the headers.
pub(crate) fn call(path: &str, headers: &HeaderMap) -> Span {
    let name = path.trim_start_matches('/');
    let (service, method) = name.split_once('/').unwrap_or((name, ""));
    let span = tracing::trace_span!(
        target: TARGET,
        "call",
        otel.name = name,
        otel.kind = "server",
        otel.status_code = Empty,
        rpc.system = "grpc",
        rpc.service = service,
        rpc.method = method,
        rpc.grpc.status_code = Empty,
        wald.queue_us = Empty,
        wald.encode_us = Empty,
        wald.write_us = Empty,
        wald.flush_us = Empty,
        wald.replicate_us = Empty,
    );
    #[cfg(feature = "otlp")]
    otlp::adopt(&span, headers);
    #[cfg(not(feature = "otlp"))]
    let _ = headers;
    span
}

/// Writes down where the time of an append went in the engine, in the span of the call that
/// is being worked on.
pub(crate) fn phases(times: &AppendTimes) {
    let span = Span::current();
    if span.is_disabled() {
        return;
    }
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    span.record("wald.queue_us", micros(times.queue));
    span.record("wald.encode_us", micros(times.encode));
    span.record("wald.write_us", micros(times.write));
    span.record("wald.flush_us", micros(times.flush));
    if !times.replicate.is_zero() {
        span.record("wald.replicate_us", micros(times.replicate));
    }
}

/// Writes down how the call ended.
pub(crate) fn ended(span: &Span, code: usize) {
    span.record("rpc.grpc.status_code", code);
    if FAULTS.contains(&code) {
        span.record("otel.status_code", "ERROR");
    }
}
