//! One span for each gRPC call, sent to a collector over OTLP. The exporter is there with
//! the feature `otlp` only; without it, and without `otlp_endpoint`, a span is disabled and
//! costs a comparison.
//!
//! Spans are of the level TRACE and of a target of their own, so that the log does not
//! show them, whatever is traced.

#[cfg(feature = "otlp")]
mod otlp;

use http::HeaderMap;
use tracing::Span;
use tracing::field::Empty;

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
    );
    #[cfg(feature = "otlp")]
    otlp::adopt(&span, headers);
    #[cfg(not(feature = "otlp"))]
    let _ = headers;
    span
}

/// Writes down how the call ended.
pub(crate) fn ended(span: &Span, code: usize) {
    span.record("rpc.grpc.status_code", code);
    if FAULTS.contains(&code) {
        span.record("otel.status_code", "ERROR");
    }
}
