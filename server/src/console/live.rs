//! Changes as server-sent events: a sample of the whole server each second, and the new records
//! of one log if a page shows one.
//!
//! The browser pulls both. A page that reads slowly gets fewer samples, and only the newest
//! records; the skipped records are reported as passed.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Query, State};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tonic::Status;
use wald_storage::{LogTarget, Lsn, ScanStart, Selector};

use super::history::{COLUMNS, Point};
use super::records::{self, Cut, GapView, RecordOrGap, RecordsPage};
use super::{Console, ConsoleError, server};
use crate::auth::{
    Caller, CookieSession, Engine, HeldRight, Lease, LogRight, Permitted, ServerRight, TenantUsage,
};
use crate::convert;
use crate::drain::draining;
use crate::status::{self, Access};

/// Time between two messages with records: as good as at once for an eye.
const PACE: Duration = Duration::from_millis(150);
/// Records of a message; with the pace some 6,000 a second. More are passed.
const MAX_RECORDS: u64 = 1000;

/// The changes that a page wants.
#[derive(Deserialize)]
pub(super) struct LiveQuery {
    /// The log whose new records are wanted; none: samples only.
    log: Option<String>,
    /// From this lsn on; none: from now on.
    from: Option<u64>,
    /// The log must be this one, if given.
    log_id: Option<u64>,
}

/// The first event.
#[derive(Serialize)]
struct FirstEvent {
    server: server::ServerView,
    columns: [&'static str; COLUMNS.len()],
    points: Vec<Point>,
}

/// `GET /console/api/live?log=&from=&log_id=`
pub(super) async fn live(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    session: Option<Extension<CookieSession>>,
    Query(query): Query<LiveQuery>,
) -> Result<Response, ConsoleError> {
    let Ok(place) = Arc::clone(&console.streams).try_acquire_owned() else {
        return Err(Status::resource_exhausted("too many pages are open; close some").into());
    };
    // From before the first event on, so that no change falls between it and them.
    let samples = samples(&console, &caller);
    let hello = FirstEvent {
        columns: COLUMNS,
        points: console.history.points(),
        server: console.server(&caller),
    };
    let first = event("hello", &hello);
    let tail = match query.log {
        None => stream::empty().boxed(),
        // A log that is not there ends its part only: a browser cannot see why a whole
        // stream was refused.
        Some(log) => match LiveTail::of(&console, &caller, &log, query.from, query.log_id).await {
            Ok(tail) => tail.events().boxed(),
            Err(status) => stream::once(async { ended(status) }).boxed(),
        },
    };
    // A page that stays open must not hold a stop.
    let mut phase = console.node.phase.clone();
    let mut lease = caller.lease(HeldRight::Server(ServerRight::Console));
    let stop = Box::pin(async move {
        tokio::select! {
            () = draining(&mut phase) => {}
            _ = lease_end(&mut lease) => {}
            () = session_end(session) => {}
        }
    });
    let events = stream::once(async { first })
        .chain(stream::select(samples, tail))
        .take_until(stop);
    Ok(Sse::new(while_holding(place, events)).into_response())
}

/// Resolves when the lease ends, if there is one.
async fn lease_end(lease: &mut Option<Lease>) -> Status {
    match lease {
        Some(lease) => lease.ended().await,
        None => std::future::pending().await,
    }
}

/// Resolves when the session of the person ends, if there is one.
async fn session_end(session: Option<Extension<CookieSession>>) {
    match session {
        Some(Extension(session)) => session.ended().await,
        None => std::future::pending().await,
    }
}

/// The end of the records, with the reason.
fn ended(status: Status) -> Result<Event, Infallible> {
    event("ended", &ConsoleError(status).told())
}

fn event(name: &str, data: &impl Serialize) -> Result<Event, Infallible> {
    // Every value that is sent here has a JSON form.
    let data = serde_json::to_string(data).unwrap_or_default();
    Ok(Event::default().event(name).data(data))
}

/// The stream, whose end gives the place back.
fn while_holding(
    place: OwnedSemaphorePermit,
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> impl Stream<Item = Result<Event, Infallible>> + Send + 'static {
    events.map(move |event| {
        let _held = &place;
        event
    })
}

/// A sample each second, and a description of the server whenever its phase changes.
fn samples(
    console: &Arc<Console>,
    caller: &Caller,
) -> stream::BoxStream<'static, Result<Event, Infallible>> {
    let newest = console.history.newest();
    let mut phase = console.node.phase.clone();
    phase.mark_unchanged();
    let state = (newest, phase, Arc::clone(console), caller.clone());
    stream::unfold(state, |state| async {
        let (mut newest, mut phase, console, caller) = state;
        let event = tokio::select! {
            changed = newest.changed() => {
                changed.ok()?;
                let sample = Arc::clone(&newest.borrow_and_update());
                Ok(Event::default().event("sample").data(&*sample))
            }
            changed = phase.changed() => {
                changed.ok()?;
                // The stream ends with the right; until then it has the facts that the rules of now allow.
                event("server", &console.server(caller.current().ok()?.as_ref()))
            }
        };
        Some((event, (newest, phase, console, caller)))
    })
    .boxed()
}

/// The new records of a log on their way to a page.
struct LiveTail {
    engine: Engine,
    tenant: Option<Arc<TenantUsage>>,
    target: Permitted<LogTarget>,
    /// Ends the records with the right to read them.
    lease: Option<Lease>,
    next: Lsn,
    /// Records that the page shows and a crash has taken back.
    lost: Option<GapView>,
    earliest: Instant,
    ended: bool,
}

impl LiveTail {
    /// Begins at `from`, or at the end.
    async fn of(
        console: &Console,
        caller: &Caller,
        log: &str,
        from: Option<u64>,
        log_id: Option<u64>,
    ) -> Result<Self, Status> {
        let engine = console.node.store(Access::Read)?.engine.clone();
        let target = convert::target(log, log_id, Access::Read)?;
        let target = caller.allow_by(LogRight::Read, target)?;
        let stat = engine.stat(&target, None, None).await;
        let info = stat.map_err(|error| status::read(&error))?.info;
        // From now on it is this log, not one that was created later under its name.
        let target = target.pinned(info.log_id);
        let selector = Selector::Log(target.get().clone());
        let lease = caller.lease(HeldRight::Logs(LogRight::Read, selector));
        let from = from.map_or(info.tail_lsn, Lsn::new);
        let lost = (from > info.tail_lsn).then(|| GapView::lost(info.tail_lsn, from));
        Ok(Self {
            engine,
            tenant: caller.tenant().cloned(),
            target,
            lease,
            next: from.min(info.tail_lsn),
            lost,
            earliest: Instant::now(),
            ended: false,
        })
    }

    fn events(self) -> impl Stream<Item = Result<Event, Infallible>> + Send {
        stream::unfold(self, |mut tail| async {
            if tail.ended {
                return None;
            }
            let mut lease = tail.lease.take();
            // First: no record is sent once the right has ended.
            let page = tokio::select! {
                biased;
                status = lease_end(&mut lease) => Err(status),
                page = tail.page() => page,
            };
            tail.lease = lease;
            let event = match page {
                Ok(page) => event("records", &page),
                Err(status) => {
                    tail.ended = true;
                    ended(status)
                }
            };
            Some((event, tail))
        })
    }

    /// Waits for new records and reads the newest of them.
    async fn page(&mut self) -> Result<RecordsPage, Status> {
        if self.lost.is_none() {
            let beyond = (self.engine).log_tail_beyond(&self.target, self.next).await;
            beyond.map_err(|error| status::read(&error))?;
        }
        tokio::time::sleep_until(self.earliest).await;
        self.earliest = Instant::now() + PACE;
        let tenant = self.tenant.as_deref();
        // A page that is beyond the rate waits, and gets the newest records then.
        let _place = match tenant {
            Some(tenant) => tenant.read_place_in_turn().await,
            None => None,
        };
        let stat = self.engine.stat(&self.target, None, None).await;
        let tail = stat.map_err(|error| status::read(&error))?.info.tail_lsn;
        let newest = Lsn::new(tail.get().saturating_sub(MAX_RECORDS));
        let start = self.next.max(newest);
        let mut page = records::read(
            &self.engine,
            tenant,
            &self.target,
            ScanStart::Lsn(start),
            None,
            MAX_RECORDS,
            Cut::LINE,
        )
        .await?;
        let passed = (start > self.next).then(|| GapView::passed(self.next, start));
        for gap in [passed, self.lost.take()].into_iter().flatten() {
            page.items.insert(0, RecordOrGap::Gap { gap });
        }
        self.next = Lsn::new(page.next_lsn);
        Ok(page)
    }
}
