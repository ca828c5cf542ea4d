//! The exporter: batches of spans over gRPC, on a thread of its own.

use std::time::Duration;

use http::HeaderMap;
use opentelemetry::KeyValue;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::{Layer, Registry};

use super::TARGET;
use crate::config::Config;

/// Maximum time for the last batch when the process ends.
const LAST_BATCH: Duration = Duration::from_secs(5);

/// Headers as the propagator wants them.
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// Puts the span below the caller's, if there is one.
pub(super) fn adopt(span: &Span, headers: &HeaderMap) {
    if span.is_disabled() {
        return;
    }
    let caller = TraceContextPropagator::new().extract(&Headers(headers));
    if caller.span().span_context().is_valid() {
        // Fails only if no exporter is there, or the span has a parent: it has none yet.
        let _ = span.set_parent(caller);
    }
}

/// Sends spans to the collector that the configuration names.
pub(crate) struct Exporter {
    provider: SdkTracerProvider,
    /// Runs the connection; the event loops have no time for it.
    _runtime: tokio::runtime::Runtime,
}

impl Exporter {
    /// Starts the exporter; `None` if no collector is named. It connects when there is
    /// something to send, so that a collector which is away does not stop the start.
    ///
    /// # Errors
    /// If the endpoint is not a URL, or the system gives no thread.
    pub(crate) fn start(config: &Config) -> Result<Option<Self>, String> {
        if config.otlp_endpoint.is_empty() {
            return Ok(None);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("wald-otlp")
            .enable_all()
            .build()
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        let entered = runtime.enter();
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&config.otlp_endpoint)
            .with_timeout(config.otlp_timeout)
            .build()
            .map_err(|error| format!("otlp_endpoint is {:?}: {error}", config.otlp_endpoint))?;
        let resource = Resource::builder()
            .with_service_name(config.otlp_service_name.clone())
            .with_attributes([KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))])
            .build();
        let share = f64::from(config.otlp_sample_percent) / 100.0;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
                share,
            ))))
            .with_resource(resource)
            .build();
        drop(entered);
        Ok(Some(Self {
            provider,
            _runtime: runtime,
        }))
    }

    /// The layer that sends spans of `wald::call` to the exporter, and nothing else.
    pub(crate) fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("wald"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target(TARGET, LevelFilter::TRACE))
            .boxed()
    }

    /// Sends the remaining spans; blocks, at most a few seconds.
    pub(crate) fn finish(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_BATCH) {
            tracing::warn!(%error, "the last traces were not sent");
        }
    }
}
