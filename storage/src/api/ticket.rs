//! Tickets: the two answers to one batch.
//!
//! A ticket is a one-shot cell and not a channel. Both answers live in one allocation, and the first costs
//! nothing when no caller waits for it. The waiter may be a task of any runtime or a plain thread.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::api::engine::{Appended, Ordered};
use crate::api::error::AppendError;
use crate::api::record::Batch;
use crate::base::sync::Mutex;

#[derive(Default)]
struct Answers {
    ordered: Option<Result<Ordered, AppendError>>,
    settled: Option<Result<Appended, AppendError>>,
    /// Waker for the first answer. A caller that waits only for the last answer is not woken by the first:
    /// both are equally frequent, and most callers have no use for the first.
    orders: Option<Waker>,
    waker: Option<Waker>,
    /// The batch that there was no room for.
    refused: Option<Box<Batch>>,
}

/// The caller's side of a submitted batch. As a future it is the settled answer.
pub struct Ticket(Arc<Mutex<Answers>>);

/// The engine's side. If it is dropped without an answer, which only a panic does, the caller learns that the
/// outcome is unknown.
pub(crate) struct TicketAnswer(Option<Arc<Mutex<Answers>>>);

impl Ticket {
    pub(crate) fn new() -> (Self, TicketAnswer) {
        let cell = Arc::new(Mutex::new(Answers::default()));
        (Self(Arc::clone(&cell)), TicketAnswer(Some(cell)))
    }

    /// A ticket refused before it reached the engine's queue.
    pub(crate) fn refused(error: AppendError) -> Self {
        let (ticket, answer) = Self::new();
        answer.settle(Err(error));
        ticket
    }

    /// A ticket refused for lack of room, with the batch, which may be submitted again.
    pub(crate) fn turned_away(error: AppendError, batch: Box<Batch>) -> Self {
        let ticket = Self::refused(error);
        ticket.0.lock().refused = Some(batch);
        ticket
    }

    /// The batch, if it was refused as [`AppendError::Busy`]. Submit it again when there is room.
    pub fn take_back(&mut self) -> Option<Batch> {
        self.0.lock().refused.take().map(|batch| *batch)
    }

    /// Resolves when the batch has its lsns, or is refused.
    pub fn ordered(&mut self) -> impl Future<Output = Result<Ordered, AppendError>> + Send + '_ {
        std::future::poll_fn(|context| {
            let mut answers = self.0.lock();
            if let Some(ordered) = &answers.ordered {
                return Poll::Ready(ordered.clone());
            }
            answers.orders = Some(context.waker().clone());
            Poll::Pending
        })
    }

    /// Blocks the calling thread until the batch is settled.
    ///
    /// # Errors
    /// As the settled answer.
    pub fn wait(self) -> Result<Appended, AppendError> {
        block_on(self)
    }
}

impl Future for Ticket {
    type Output = Result<Appended, AppendError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut answers = self.0.lock();
        if let Some(settled) = answers.settled.take() {
            return Poll::Ready(settled);
        }
        match &mut answers.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl TicketAnswer {
    /// Gives the first answer: the batch has its place.
    pub(crate) fn order(&self, ordered: Ordered) {
        let waker = self.0.as_ref().and_then(|cell| {
            let mut answers = cell.lock();
            answers.ordered = Some(Ok(ordered));
            answers.orders.take()
        });
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Gives the last answer.
    pub(crate) fn settle(mut self, settled: Result<Appended, AppendError>) {
        self.answer(settled);
    }

    fn answer(&mut self, settled: Result<Appended, AppendError>) {
        let Some(cell) = self.0.take() else { return };
        let (orders, waker) = {
            let mut answers = cell.lock();
            if answers.ordered.is_none() {
                // A refusal has no place, and neither has a batch of checks only.
                let placeless = |appended: &Appended| Ordered {
                    appends: appended.appends.clone(),
                    position: appended.position,
                };
                answers.ordered = Some(settled.as_ref().map(placeless).map_err(Clone::clone));
            }
            answers.settled = Some(settled);
            (answers.orders.take(), answers.waker.take())
        };
        for waker in orders.into_iter().chain(waker) {
            waker.wake();
        }
    }
}

impl Drop for TicketAnswer {
    fn drop(&mut self) {
        if self.0.is_some() {
            let panicked = io::Error::other("the thread that was to answer panicked");
            self.answer(Err(AppendError::Unknown(Arc::new(panicked))));
        }
    }
}

/// Drives a future on the calling thread; for tools, tests and engine start.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    crate::base::sync::block_on(future)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_learns_that_the_answering_thread_is_gone() {
        let (mut ticket, answer) = Ticket::new();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _answer = answer;
            panic!("a bug");
        }));
        assert!(panicked.is_err());
        let ordered = block_on(ticket.ordered());
        assert!(matches!(ordered, Err(AppendError::Unknown(_))));
        assert!(matches!(ticket.wait(), Err(AppendError::Unknown(_))));
    }

    #[test]
    fn an_answer_is_not_taken_back() {
        let (ticket, answer) = Ticket::new();
        answer.settle(Err(AppendError::Draining));
        assert!(matches!(ticket.wait(), Err(AppendError::Draining)));
    }
}
