//! Tickets: the answer to one batch.
//!
//! A ticket is a one-shot cell and not a channel. The waiter may be a task of any runtime or a plain thread.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::api::engine::Appended;
use crate::api::error::AppendError;
use crate::api::record::Batch;
use crate::base::sync::Mutex;

#[derive(Default)]
struct Cell {
    settled: Option<Result<Appended, AppendError>>,
    waker: Option<Waker>,
    /// The batch that there was no room for.
    refused: Option<Box<Batch>>,
}

/// The caller's side of a submitted batch: a future of the answer.
pub struct Ticket(Arc<Mutex<Cell>>);

/// The engine's side of a ticket. If it is dropped without an answer, which only a panic does, the caller
/// learns that the outcome is unknown.
pub struct TicketAnswer(Option<Arc<Mutex<Cell>>>);

impl Ticket {
    /// A ticket for a batch that an engine takes in, and the engine's side of it.
    pub fn new() -> (Self, TicketAnswer) {
        let cell = Arc::new(Mutex::new(Cell::default()));
        (Self(Arc::clone(&cell)), TicketAnswer(Some(cell)))
    }

    /// A ticket whose batch the engine refused before it queued the batch.
    pub fn refused(error: AppendError) -> Self {
        let (ticket, answer) = Self::new();
        answer.settle(Err(error));
        ticket
    }

    /// A ticket whose batch had no room, with the batch, which may be submitted again.
    pub fn turned_away(error: AppendError, batch: Box<Batch>) -> Self {
        let ticket = Self::refused(error);
        ticket.0.lock().refused = Some(batch);
        ticket
    }

    /// The batch, if it was refused as [`AppendError::Busy`]. Submit it again when there is room.
    pub fn take_back(&mut self) -> Option<Batch> {
        self.0.lock().refused.take().map(|batch| *batch)
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
        let mut cell = self.0.lock();
        if let Some(settled) = cell.settled.take() {
            return Poll::Ready(settled);
        }
        match &mut cell.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl TicketAnswer {
    /// Answers the batch: it has reached the requested level, or is known to be out of reach.
    pub fn settle(mut self, settled: Result<Appended, AppendError>) {
        self.answer(settled);
    }

    fn answer(&mut self, settled: Result<Appended, AppendError>) {
        let Some(cell) = self.0.take() else { return };
        let waker = {
            let mut cell = cell.lock();
            cell.settled = Some(settled);
            cell.waker.take()
        };
        if let Some(waker) = waker {
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
        let (ticket, answer) = Ticket::new();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _answer = answer;
            panic!("a bug");
        }));
        assert!(panicked.is_err());
        assert!(matches!(ticket.wait(), Err(AppendError::Unknown(_))));
    }

    #[test]
    fn an_answer_is_not_taken_back() {
        let (ticket, answer) = Ticket::new();
        answer.settle(Err(AppendError::Draining));
        assert!(matches!(ticket.wait(), Err(AppendError::Draining)));
    }
}
