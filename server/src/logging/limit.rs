//! One line a second from each place in the code that a peer can reach, and a count of the others.
//!
//! Libraries log each odd frame: without a limit, unexpected answers to pings made 165 MB of
//! lines a second. The limit applies to every event at `info` and above, except where no peer
//! reaches: the start and the end of the server, and errors of the engine, which name different
//! records each time. An operator asks for events at `debug` and `trace`, so they are not
//! limited.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::writer::LINES;

/// Target of the lines about panics.
pub(super) const PANIC: &str = "wald::panic";

/// Pause after which a place may log again.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Lines of the engine that one place may log at once: a start names several files.
const ENGINE_BURST: u32 = 8;

/// Lines that were suppressed.
static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Number of suppressed lines that no line has reported.
static UNTOLD: AtomicU64 = AtomicU64::new(0);

/// Places that have logged; as many as the code has, at most.
static SITES: Mutex<Vec<Site>> = Mutex::new(Vec::new());

/// Returns the number of lines suppressed so far.
pub(super) fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Whether there are suppressed lines that no line has reported.
pub(super) fn is_untold() -> bool {
    UNTOLD.load(Ordering::Relaxed) > 0
}

/// Logs the number of suppressed lines, for each place that suppressed some.
pub(super) fn tell() {
    if !is_untold() {
        return;
    }
    let told: Vec<_> = SITES
        .lock()
        .iter_mut()
        .filter(|site| site.suppressed > 0)
        .map(|site| (site.metadata, std::mem::take(&mut site.suppressed)))
        .collect();
    for (metadata, lines) in told {
        UNTOLD.fetch_sub(lines, Ordering::Relaxed);
        tracing::warn!(
            target: super::writer::TARGET,
            lines,
            source = metadata.target(),
            at = metadata.file().map(short),
            line = metadata.line(),
            "log lines were suppressed: one place logs at most one line a second"
        );
    }
}

/// A path without the directories of the machine that built it.
fn short(file: &str) -> &str {
    let (before, _) = file.rsplit_once("/src/").unwrap_or(("", file));
    let from = before.rfind('/').map_or(0, |slash| slash + 1);
    &file[from..]
}

/// A place in the code that logs.
struct Site {
    id: Identifier,
    metadata: &'static Metadata<'static>,
    /// Lines that it may log now.
    left: u32,
    /// Time at which it got the last of them.
    filled: Instant,
    suppressed: u64,
}

impl Site {
    /// Whether it may log at that moment.
    fn may_log(&mut self, now: Instant, burst: u32) -> bool {
        let seconds = now.duration_since(self.filled).as_secs();
        if seconds > 0 {
            let more = u32::try_from(seconds).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(more).min(burst);
            self.filled += Duration::from_secs(seconds);
        }
        if self.left == 0 {
            self.suppressed += 1;
            return false;
        }
        self.left -= 1;
        true
    }
}

/// Lines that one place may log at once; `None` where there is no limit.
fn burst(metadata: &Metadata<'_>) -> Option<u32> {
    let (level, target) = (*metadata.level(), metadata.target());
    if level > Level::INFO {
        return None;
    }
    let within = |module: &str| {
        let rest = target.strip_prefix(module);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    if target == "wald" || within("wald::serve") || within("wald::logging") {
        return None;
    }
    if within("wald_storage") {
        let names_records = level == Level::ERROR && !within("wald_storage::threads");
        return (!names_records).then_some(ENGINE_BURST);
    }
    Some(1)
}

/// A layer that passes on the lines that may be logged.
///
/// Not a filter: where a filter refuses a single event, tracing-subscriber keeps that state for the
/// next event of the thread, and fails an assertion in debug builds.
pub(super) struct Limited<L>(pub(super) L);

impl<S: Subscriber, L: Layer<S>> Layer<S> for Limited<L> {
    fn on_layer(&mut self, subscriber: &mut S) {
        self.0.on_layer(subscriber);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        if burst(metadata).is_none_or(|burst| may_log(metadata, burst, Instant::now())) {
            self.0.on_event(event, context);
        }
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        self.0.on_new_span(attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        self.0.on_record(id, values, context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        self.0.on_enter(id, context);
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        self.0.on_exit(id, context);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        self.0.on_close(id, context);
    }
}

fn may_log(metadata: &'static Metadata<'static>, burst: u32, now: Instant) -> bool {
    let id = metadata.callsite();
    let mut sites = SITES.lock();
    let allowed = match sites.iter_mut().find(|site| site.id == id) {
        Some(site) => site.may_log(now, burst),
        None => {
            sites.push(Site {
                id,
                metadata,
                left: burst - 1,
                filled: now,
                suppressed: 0,
            });
            true
        }
    };
    if !allowed {
        SUPPRESSED.fetch_add(1, Ordering::Relaxed);
        if UNTOLD.fetch_add(1, Ordering::Relaxed) == 0 {
            LINES.wake();
        }
    }
    allowed
}

#[cfg(test)]
mod tests {
    use tracing::subscriber::Interest;

    use super::*;

    fn site(now: Instant) -> Site {
        Site {
            id: Identifier(&CALLSITE),
            metadata: tracing::callsite::Callsite::metadata(&CALLSITE),
            left: 1,
            filled: now,
            suppressed: 0,
        }
    }

    struct Here;
    static CALLSITE: Here = Here;
    static METADATA: Metadata<'static> = tracing::metadata! {
        name: "a line",
        target: "h2::proto",
        level: Level::WARN,
        fields: &[],
        callsite: &CALLSITE,
        kind: tracing::metadata::Kind::EVENT
    };

    impl tracing::callsite::Callsite for Here {
        fn set_interest(&self, _: Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            &METADATA
        }
    }

    #[test]
    fn place_logs_once_a_second_and_counts_the_rest() {
        let now = Instant::now();
        let mut site = site(now);
        let at = |millis: u64| now + Duration::from_millis(millis);
        let logged: Vec<u64> = (0..3000)
            .filter(|millis| site.may_log(at(*millis), 1))
            .collect();
        assert_eq!(logged, [0, 1000, 2000]);
        assert_eq!(site.suppressed, 2997);
        // Silence saves nothing up.
        assert!(site.may_log(at(60_000), 1));
        assert!(!site.may_log(at(60_001), 1));
    }

    #[test]
    fn engine_may_name_several_files_at_once() {
        let now = Instant::now();
        let mut site = Site {
            left: ENGINE_BURST,
            ..site(now)
        };
        let logged = (0..20).filter(|_| site.may_log(now, ENGINE_BURST)).count();
        assert_eq!(logged, 8);
    }

    #[test]
    fn path_of_a_place_is_that_of_its_crate() {
        let file = "/home/builder/.cargo/registry/src/index/h2-0.4.20/src/proto/ping_pong.rs";
        assert_eq!(short(file), "h2-0.4.20/src/proto/ping_pong.rs");
        assert_eq!(short("server/src/transport.rs"), "server/src/transport.rs");
    }
}
