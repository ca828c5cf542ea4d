//! The log on stderr: lines for people or JSON, with a filter that can be changed.
//!
//! ```text
//! event ──▶ log_filter ──▶ limit ──▶ formatted ──▶ queue ──▶ thread ──▶ stderr
//!                            │ one a second          │ full          ▲ may block
//!                            ▼                       ▼               │
//!                         counted                 counted ───────────┘ a later line
//! ```
//!
//! Rule: no thread but the writer's own ever waits for stderr. Nothing that a peer sends causes more
//! than one line a second from one place in the code ([`limit`]), and a stderr that nobody reads
//! costs the bytes of the queue and nothing else ([`writer`]).

mod limit;
mod writer;

use std::io::{self, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::config;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

use limit::Limited;
pub(crate) use writer::write_whole;
use writer::{LINES, LineQueue};

/// Longest time that the end of the process waits for stderr to take the last lines.
const FLUSH: Duration = Duration::from_secs(2);

/// The running log.
pub(crate) struct LogFilter {
    filter: reload::Handle<EnvFilter, Registry>,
    /// The text of the filter in force.
    text: Mutex<String>,
}

/// Starts the log of the process and the sender of traces. The filter applies to the log alone.
///
/// # Errors
/// If the filter cannot be understood, the process has a log already, or no thread can be made.
pub(crate) fn start(
    json: bool,
    filter: &str,
    traces: Option<Box<dyn Layer<Registry> + Send + Sync>>,
) -> Result<LogFilter, String> {
    let text = Mutex::new(filter.to_owned());
    let (filter, handle) = reload::Layer::new(config::log_filter(filter)?);
    let lines = if json {
        let lines = fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(LineQueue);
        Limited(lines).with_filter(filter).boxed()
    } else {
        let lines = fmt::layer()
            .with_target(false)
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .with_writer(LineQueue);
        Limited(lines).with_filter(filter).boxed()
    };
    let mut layers = vec![lines];
    layers.extend(traces);
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(|error| error.to_string())?;
    LINES
        .start_writing(io::stderr())
        .map_err(|error| format!("cannot start a thread: {error}"))?;
    std::panic::set_hook(Box::new(log_panic));
    Ok(LogFilter {
        filter: handle,
        text,
    })
}

/// Puts a line that is no event on stderr, after all lines before it.
pub(crate) fn print(line: &str) {
    match LINES.has_writer() {
        true => LINES.push(format!("{line}\n").into_bytes(), true),
        // Where nobody reads it, the exit code says enough.
        false => {
            let _unread = writeln!(io::stderr(), "{line}");
        }
    }
}

/// Waits until stderr has taken all lines, for at most 2 s. Without a running log there are none.
pub(crate) fn flush() {
    LINES.flush(FLUSH);
}

/// Log lines that were not written, since the process started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DroppedLines {
    /// Lines for which the queue had no room, because stderr was not read.
    pub(crate) unread: u64,
    /// Lines beyond one a second from one place in the code.
    pub(crate) repeated: u64,
}

/// Returns the number of lines that were not written so far.
pub(crate) fn lost() -> DroppedLines {
    DroppedLines {
        unread: LINES.lost(),
        repeated: limit::suppressed(),
    }
}

/// Logs a panic. The default hook writes to stderr itself, and waits for it.
fn log_panic(panic: &std::panic::PanicHookInfo<'_>) {
    let payload = panic.payload();
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let location = panic.location().map(ToString::to_string);
    let thread = std::thread::current();
    let backtrace = std::backtrace::Backtrace::capture();
    let backtrace = (backtrace.status() == std::backtrace::BacktraceStatus::Captured)
        .then(|| backtrace.to_string());
    tracing::error!(
        target: limit::PANIC,
        message,
        location,
        thread = thread.name(),
        backtrace,
        panicked = true,
    );
}

impl LogFilter {
    /// Changes the filter of the log from now on. Nothing happens if it is in force.
    pub(crate) fn set_filter(&self, filter: &str) {
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        if *text == filter {
            return;
        }
        let changed = config::log_filter(filter)
            .and_then(|new| self.filter.reload(new).map_err(|error| error.to_string()));
        match changed {
            Ok(()) => {
                filter.clone_into(&mut text);
                tracing::info!(filter, "log filter changed");
            }
            Err(error) => tracing::error!(filter, error, "log filter unchanged"),
        }
    }
}
