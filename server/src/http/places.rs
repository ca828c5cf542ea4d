//! Places for connections of the HTTP port: a fixed number, each with a bound on its time.
//!
//! ```text
//! accept ─▶ silent ── request ─▶ at work ── answer taken ─▶ idle ── request ─▶ at work ...
//!             │ head_timeout       │ unread for UNREAD       │ idle_timeout
//!             ▼                    ▼                         ▼
//!            end                  end                       end
//! ```
//!
//! When all places are taken, the connection that has been without a request at work for the
//! longest time gives way. At most three quarters of the places may be at work (`http.rs`), so that one
//! is always found.

use std::collections::BTreeMap;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::metrics::{CountedConnection, PortMetrics};

/// Longest time that a peer may leave an answer unread before its connection ends.
pub(super) const UNREAD: Duration = Duration::from_secs(30);

/// Bounds on the time of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeBounds {
    /// From the accept to the first complete head, and from the first byte of a later head to
    /// its end.
    pub(super) head: Duration,
    /// From an answer to the first byte of the next head.
    pub(super) idle: Duration,
}

/// The reason why a connection ends before its client closes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overdue {
    /// A request did not arrive in time.
    Head,
    /// No further request came.
    Idle,
    /// The peer left an answer unread.
    Unread,
    /// Another connection needed the place.
    GaveWay,
}

/// Everything that decides about the end of a connection.
#[derive(Debug)]
struct PlaceState {
    /// Since when no request is at work: the accept, the last answer, or the last byte that the
    /// peer took of it.
    since: Instant,
    /// Arrival time of the first byte of a head.
    head: Option<Instant>,
    /// Whether bytes arrived while a request was at work that was whole: they may begin the next head.
    early: bool,
    at_work: bool,
    /// Whether a request was complete.
    served: bool,
    /// Since when the peer takes nothing that waits to be sent.
    blocked: Option<Instant>,
}

/// One place, shared by the connection's socket, its requests and the acceptor.
#[derive(Debug)]
pub(super) struct ConnPlace {
    state: Mutex<PlaceState>,
    gives_way: Notify,
    counted: CountedConnection,
}

impl ConnPlace {
    fn new(counted: CountedConnection) -> Self {
        Self {
            counted,
            state: Mutex::new(PlaceState {
                since: Instant::now(),
                head: None,
                early: false,
                at_work: false,
                served: false,
                blocked: None,
            }),
            gives_way: Notify::new(),
        }
    }

    /// Records that bytes arrived.
    pub(super) fn received(&self, bytes: usize) {
        self.counted.received(bytes);
        let mut state = self.state.lock();
        if state.at_work {
            state.early = true;
        } else {
            state.head.get_or_insert_with(Instant::now);
        }
    }

    /// Records that the peer took bytes.
    pub(super) fn sent(&self, bytes: usize) {
        self.counted.sent(bytes);
        let mut state = self.state.lock();
        state.blocked = None;
        if state.served && !state.at_work {
            state.since = Instant::now();
        }
    }

    /// Records that the peer does not take the bytes that wait to be sent.
    pub(super) fn blocked(&self) {
        self.state.lock().blocked.get_or_insert_with(Instant::now);
    }

    /// Whether the peer does not take the bytes that wait to be sent.
    pub(super) fn is_blocked(&self) -> bool {
        self.state.lock().blocked.is_some()
    }

    /// Records that the request at work has arrived whole.
    pub(super) fn request_is_whole(&self) {
        self.state.lock().early = false;
    }

    /// Begins a request, which ends when the guard goes.
    pub(super) fn work(self: &Arc<Self>) -> RequestAtWork {
        let mut state = self.state.lock();
        state.at_work = true;
        state.served = true;
        state.head = None;
        state.early = false;
        RequestAtWork(Arc::clone(self))
    }

    /// Time at which the connection ends if nothing happens, and the reason.
    fn ends(&self, bounds: &TimeBounds) -> Option<(Instant, Overdue)> {
        let state = self.state.lock();
        if let Some(blocked) = state.blocked {
            return Some((blocked + UNREAD, Overdue::Unread));
        }
        if state.at_work {
            return None;
        }
        if !state.served {
            return Some((state.since + bounds.head, Overdue::Head));
        }
        Some(match state.head {
            Some(head) => (head + bounds.head, Overdue::Head),
            None => (state.since + bounds.idle, Overdue::Idle),
        })
    }

    /// Resolves when the connection has to end. To be polled by the task that serves it, since
    /// each of its turns may move the time.
    pub(super) async fn overdue(&self, bounds: TimeBounds) -> Overdue {
        let mut gives_way = pin!(self.gives_way.notified());
        let mut sleep = pin!(sleep_until(Instant::now() + bounds.head));
        poll_fn(|context| {
            if gives_way.as_mut().poll(context).is_ready() {
                return Poll::Ready(Overdue::GaveWay);
            }
            let Some((at, why)) = self.ends(&bounds) else {
                return Poll::Pending;
            };
            if sleep.deadline() != at {
                sleep.as_mut().reset(at);
            }
            sleep.as_mut().poll(context).map(|()| why)
        })
        .await
    }
}

/// A request at work, up to the last byte of its answer that was handed to the transport.
#[derive(Debug)]
pub(super) struct RequestAtWork(pub(super) Arc<ConnPlace>);

impl Drop for RequestAtWork {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.at_work = false;
        state.since = Instant::now();
        state.head = state.early.then_some(state.since);
    }
}

/// All places. At most one more connection exists than there are places, while another one
/// gives way.
#[derive(Debug)]
pub(super) struct ConnPlaces {
    most: usize,
    taken: Mutex<TakenPlaces>,
    /// Notified when a place becomes free.
    free: Notify,
    port: PortMetrics,
}

#[derive(Debug, Default)]
struct TakenPlaces {
    next: u64,
    places: BTreeMap<u64, Arc<ConnPlace>>,
}

impl ConnPlaces {
    pub(super) fn new(most: usize, port: PortMetrics) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1),
            taken: Mutex::default(),
            free: Notify::new(),
            port,
        })
    }

    /// Takes a place for an accepted connection. If none is free, the connection that has been
    /// idle for the longest time must give way; the returned flag reports it.
    pub(super) async fn take(self: &Arc<Self>) -> (Holder, bool) {
        let mut made_room = false;
        loop {
            let free = self.free.notified();
            {
                let mut taken = self.taken.lock();
                if taken.places.len() < self.most {
                    let number = taken.next;
                    taken.next += 1;
                    let place = Arc::new(ConnPlace::new(self.port.connected()));
                    taken.places.insert(number, Arc::clone(&place));
                    let places = Arc::clone(self);
                    let holder = Holder {
                        number,
                        place,
                        places,
                    };
                    return (holder, made_room);
                }
                if !made_room {
                    made_room = give_way(&taken);
                }
            }
            let begin = Instant::now();
            free.await;
            self.port.waited(begin.elapsed());
        }
    }

    /// Ends the connection that has been idle for the longest time, if there is one.
    pub(super) fn make_room(&self) -> bool {
        give_way(&self.taken.lock())
    }
}

/// Tells the connection to end that has been without a request at work for the longest time.
fn give_way(taken: &TakenPlaces) -> bool {
    let idle = taken.places.values().filter_map(|place| {
        let state = place.state.lock();
        (!state.at_work || state.blocked.is_some()).then_some((state.since, place))
    });
    let longest = idle.min_by_key(|(since, _)| *since);
    if let Some((_, place)) = longest {
        place.gives_way.notify_one();
    }
    longest.is_some()
}

/// The place of one connection, free again when this goes.
#[derive(Debug)]
pub(super) struct Holder {
    number: u64,
    place: Arc<ConnPlace>,
    places: Arc<ConnPlaces>,
}

impl Holder {
    pub(super) fn place(&self) -> &Arc<ConnPlace> {
        &self.place
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.places.taken.lock().places.remove(&self.number);
        self.places.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    const BOUNDS: TimeBounds = TimeBounds {
        head: Duration::from_secs(10),
        idle: Duration::from_secs(60),
    };

    fn port() -> PortMetrics {
        Metrics::new().unwrap().ports.http.clone()
    }

    async fn ends_after(place: &ConnPlace) -> (u64, Overdue) {
        let now = Instant::now();
        let why = place.overdue(BOUNDS).await;
        (now.elapsed().as_secs(), why)
    }

    async fn after(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn each_state_of_a_connection_has_its_own_bound() {
        let (holder, _) = ConnPlaces::new(1, port()).take().await;
        let place = holder.place();
        assert_eq!(ends_after(place).await, (10, Overdue::Head));
        // Trickled bytes of the first head gain nothing.
        place.received(1);
        assert_eq!(ends_after(place).await, (0, Overdue::Head));
        drop(place.work());
        after(7).await;
        assert_eq!(ends_after(place).await, (53, Overdue::Idle));
        drop(place.work());
        place.received(1);
        after(4).await;
        place.received(1);
        assert_eq!(ends_after(place).await, (6, Overdue::Head));
        // A request at work has no bound here, unless its answer is not read.
        let work = place.work();
        let overdue = tokio::time::timeout(Duration::from_secs(900), place.overdue(BOUNDS)).await;
        assert!(overdue.is_err());
        place.blocked();
        after(20).await;
        place.sent(1);
        place.blocked();
        assert_eq!(ends_after(place).await, (30, Overdue::Unread));
        // Bytes of the next head that came early count from the end of the work.
        place.sent(1);
        place.received(1);
        drop(work);
        assert_eq!(ends_after(place).await, (10, Overdue::Head));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_a_body_do_not_begin_the_next_head() {
        let (holder, _) = ConnPlaces::new(1, port()).take().await;
        let place = holder.place();
        let work = place.work();
        place.received(1);
        place.request_is_whole();
        drop(work);
        assert_eq!(ends_after(place).await, (60, Overdue::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn longest_idle_connection_gives_way_and_work_never_does() {
        let port = port();
        let places = ConnPlaces::new(3, port.clone());
        let (working, _) = places.take().await;
        let work = working.place().work();
        after(1).await;
        let (oldest, _) = places.take().await;
        after(1).await;
        let (newer, made_room) = places.take().await;
        assert!(!made_room);
        // An answer makes it the newest of all.
        drop(newer.place().work());
        assert_eq!(port.seconds(), 0.0);
        let task = tokio::spawn({
            let place = Arc::clone(oldest.place());
            async move {
                let why = place.overdue(BOUNDS).await;
                after(2).await;
                drop(oldest);
                why
            }
        });
        let (_next, made_room) = places.take().await;
        assert!(made_room);
        assert_eq!(task.await.unwrap(), Overdue::GaveWay);
        assert!((2.0..2.1).contains(&port.seconds()), "{port:?}");
        let quiet = Duration::from_secs(9);
        let place = Arc::clone(newer.place());
        assert!(
            tokio::time::timeout(quiet, place.overdue(BOUNDS))
                .await
                .is_err()
        );
        // A peer that does not read its answer gives way like an idle one.
        working.place().blocked();
        assert!(places.make_room());
        assert_eq!(
            working.place().overdue(BOUNDS).await,
            Overdue::GaveWay,
            "the oldest of all, blocked"
        );
        drop(work);
    }
}
