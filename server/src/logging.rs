//! The log on stderr: lines for people or JSON, with a filter that can be changed.

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

/// The running log.
pub(crate) struct Log {
    filter: reload::Handle<EnvFilter, Registry>,
}

/// Starts the log of the process, and beside it what sends traces. The filter is the
/// log's alone.
///
/// # Errors
/// If the filter cannot be understood, or the process has a log already.
pub(crate) fn start(
    json: bool,
    filter: &str,
    traces: Option<Box<dyn Layer<Registry> + Send + Sync>>,
) -> Result<Log, String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| error.to_string())?;
    let (filter, handle) = reload::Layer::new(filter);
    let lines = if json {
        fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(std::io::stderr)
            .with_filter(filter)
            .boxed()
    } else {
        fmt::layer()
            .with_target(false)
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .with_writer(std::io::stderr)
            .with_filter(filter)
            .boxed()
    };
    let mut layers = vec![lines];
    layers.extend(traces);
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(|error| error.to_string())?;
    Ok(Log { filter: handle })
}

impl Log {
    /// Changes what is logged from now on.
    pub(crate) fn set_filter(&self, filter: &str) {
        let changed = EnvFilter::try_new(filter)
            .map_err(|error| error.to_string())
            .and_then(|new| self.filter.reload(new).map_err(|error| error.to_string()));
        match changed {
            Ok(()) => tracing::info!(filter, "log filter changed"),
            Err(error) => tracing::error!(filter, error, "log filter unchanged"),
        }
    }
}
