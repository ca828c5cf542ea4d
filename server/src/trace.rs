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

use crate::status;

#[cfg(feature = "otlp")]
pub(crate) use otlp::Exporter;

/// Target of the spans.
const TARGET: &str = "wald::call";

/// Codes that are the server's fault, by the conventions of OpenTelemetry: Unknown,
/// DeadlineExceeded, Unimplemented, Internal, Unavailable, DataLoss.
const FAULTS: [usize; 6] = [2, 4, 12, 13, 14, 15];

/// The span of a call to `path` (`/wald.v1.WalService/Append`), below the caller's span if
/// its `traceparent` is among the headers. `is_known`: whether the server knows the method; clients may invent others
/// without end.
///
/// Names follow OpenTelemetry's conventions for RPC since 1.45:
/// <https://opentelemetry.io/docs/specs/semconv/rpc/grpc/>.
pub(crate) fn call(path: &str, is_known: bool, headers: &HeaderMap) -> Span {
    let called = path.trim_start_matches('/');
    let (name, method) = match is_known {
        true => (called, called),
        false => ("grpc", "_OTHER"),
    };
    let span = tracing::trace_span!(
        target: TARGET,
        "call",
        otel.name = name,
        otel.kind = "server",
        otel.status_code = Empty,
        rpc.system.name = "grpc",
        rpc.method = method,
        rpc.method_original = Empty,
        rpc.response.status_code = Empty,
        "error.type" = Empty,
        wald.queue_us = Empty,
        wald.encode_us = Empty,
        wald.write_us = Empty,
        wald.flush_us = Empty,
        wald.replicate_us = Empty,
    );
    if !is_known {
        span.record("rpc.method_original", called);
    }
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
    if span.is_disabled() {
        return;
    }
    let name = i32::try_from(code).map_or("UNKNOWN", |code| status::code_name(code.into()));
    span.record("rpc.response.status_code", name);
    if FAULTS.contains(&code) {
        span.record("error.type", name);
        span.record("otel.status_code", "ERROR");
    }
}
