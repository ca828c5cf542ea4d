//! Memory of the messages of one stream of requests: its window, then the budget of the server.

use std::sync::Arc;
use std::task::Waker;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

use super::{Admission, Busy, Charge, GroupShare, Kind, Share};

/// Bytes that a stream has received and not answered, and the task that waits for room.
#[derive(Clone)]
pub(crate) struct Window(Arc<SharedWindow>);

struct SharedWindow {
    limit: u64,
    used: Mutex<Charge>,
    /// The reader of the stream, while it waits for room.
    waiting: AtomicWaker,
}

/// The room that messages take, given back when it is dropped.
pub(crate) struct Passage {
    window: Window,
    bytes: u64,
}

/// Whether bytes may be received.
pub(crate) enum Entry {
    Granted,
    /// An answer of the stream makes room.
    WindowFull,
    /// An answer of any connection makes room.
    BudgetFull,
    /// An answer makes room, but perhaps none comes: other connections may also have begun messages that cannot end.
    StuckIn(Busy),
}

impl Window {
    /// An empty window of `session_window` bytes, charged to the budget of that kind.
    pub(crate) fn new(
        admission: &Arc<Admission>,
        share: (&Share, Option<&Arc<GroupShare>>),
        kind: Kind,
    ) -> Self {
        Self(Arc::new(SharedWindow {
            limit: admission.session_window,
            used: Mutex::new(Charge::new(admission, share, kind)),
            waiting: AtomicWaker::new(),
        }))
    }

    /// Makes room for `bytes` more of a message that has `passage` already, in the window and then in the budget of
    /// the server. A message of `announced` bytes begins only if all of it has room.
    pub(crate) fn enter(&self, passage: &mut Passage, bytes: u64, announced: u64) -> Entry {
        let mut used = self.0.used.lock();
        // One message has room, however large it is.
        if used.bytes() > passage.bytes && used.bytes() + bytes > self.0.limit {
            return Entry::WindowFull;
        }
        let is_first = passage.bytes == 0;
        if is_first && used.look(0, announced).is_err() {
            return Entry::BudgetFull;
        }
        match used.grow(passage.bytes, bytes) {
            Ok(()) => {
                passage.bytes += bytes;
                Entry::Granted
            }
            Err(_) if is_first => Entry::BudgetFull,
            Err(busy) => Entry::StuckIn(busy),
        }
    }

    /// The room of a message before any of it is received.
    pub(crate) fn nothing(&self) -> Passage {
        let window = self.clone();
        Passage { window, bytes: 0 }
    }

    /// Wakes this task when an answer of the stream has made room.
    pub(crate) fn wake_at_room(&self, waker: &Waker) {
        self.0.waiting.register(waker);
    }

    /// Calls `look` with the charge of the stream.
    pub(crate) fn with_charge<R>(&self, look: impl FnOnce(&Charge) -> R) -> R {
        look(&self.0.used.lock())
    }
}

impl Passage {
    /// Takes more room than the encoded messages, whatever is free: the decoded requests are larger.
    pub(crate) fn enlarge(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.window.0.used.lock().enlarge(bytes);
    }

    /// Takes over the room of other messages of the stream.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.window.0, &other.window.0));
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.window.0.used.lock().shrink(self.bytes);
            self.window.0.waiting.wake();
        }
    }
}
