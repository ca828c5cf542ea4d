//! One session: messages go out as the window allows, acks are matched to them in order.
//!
//! The transport pulls messages from [`Outgoing`] when it can send, so that no queue and no
//! task lies between a free place in the window and the message that takes it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use futures_core::Stream;
use tonic::Status;
use wald_client::proto;
use wald_proto::echo;

use crate::caller::Load;
use crate::connection::Connection;
use crate::gate::{Due, Gate};
use crate::record::{AnswerTimes, SharedRecorder};

/// Times at which messages of an open loop are due, and whether more will follow.
#[derive(Debug, Default)]
struct Paced {
    due: VecDeque<Due>,
    over: bool,
}

/// A session between its two directions.
#[derive(Debug)]
struct Flow {
    /// Sent and not acked, in order.
    waiting: VecDeque<(Due, Instant)>,
    most: usize,
    /// Number of calls left in a burst, if there are bursts.
    burst: Option<usize>,
    paced: Option<Paced>,
    waker: Option<Waker>,
}

impl Flow {
    /// The next call to send.
    fn next(&mut self, gate: &Gate) -> Poll<Option<Due>> {
        if let Some(left) = &mut self.burst {
            if self.waiting.is_empty() {
                *left = self.most;
            }
            if *left == 0 {
                return Poll::Pending;
            }
        } else if self.waiting.len() >= self.most {
            return Poll::Pending;
        }
        let now = Instant::now();
        let due = match &mut self.paced {
            None => gate.next(now),
            Some(paced) => match paced.due.pop_front() {
                None if !paced.over => return Poll::Pending,
                due => due,
            },
        };
        if let Some(due) = due {
            if let Some(left) = &mut self.burst {
                *left -= 1;
            }
            self.waiting.push_back((due, now.max(due.at)));
        }
        Poll::Ready(due)
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// A session that a pacer can send due calls to.
#[derive(Debug, Clone)]
pub(crate) struct LoadSession {
    load: Arc<Load>,
    shared: SharedRecorder,
    gate: Arc<Gate>,
    flow: Arc<Mutex<Flow>>,
}

impl LoadSession {
    /// A session with at most `most` messages in flight; paced, if the load has a rate.
    pub(crate) fn new(
        load: &Arc<Load>,
        shared: &SharedRecorder,
        gate: &Arc<Gate>,
        most: usize,
    ) -> Self {
        let spec = &load.spec;
        Self {
            load: Arc::clone(load),
            shared: shared.clone(),
            gate: Arc::clone(gate),
            flow: Arc::new(Mutex::new(Flow {
                waiting: VecDeque::with_capacity(most),
                most,
                burst: spec.burst.then_some(0),
                paced: spec.rate.map(|_| Paced::default()),
                waker: None,
            })),
        }
    }

    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message is due; `None`: the last one was.
    pub(crate) fn tell(&self, due: Option<Due>) {
        let mut flow = self.flow();
        if let Some(paced) = &mut flow.paced {
            paced.over |= due.is_none();
            paced.due.extend(due);
        }
        flow.wake();
    }

    /// Runs the session to its end: everything sent is acked, or it failed.
    pub(crate) async fn run(self, connection: Connection, first_log: u64) {
        let done = match self.load.spec.echo {
            true => self.echo(connection).await,
            false => self.append(connection, first_log).await,
        };
        if let Err(status) = done {
            self.shared.lock().failed(&status);
        }
    }

    async fn append(&self, connection: Connection, first_log: u64) -> Result<(), Status> {
        let load = Arc::clone(&self.load);
        let requests = self.outgoing(move |request_id| proto::AppendSessionRequest {
            request_id,
            batch: Some(load.batch(first_log.wrapping_add(request_id))),
            ..proto::AppendSessionRequest::default()
        });
        let mut wal = connection.wal();
        let mut acks = wal.append_session(requests).await?.into_inner();
        let mut number = 0;
        while let Some(answer) = acks.message().await? {
            let acks = answer.ack.unwrap_or_default().appends;
            let records = acks.iter().map(|ack| ack.next_lsn() - ack.first_lsn());
            self.acked(number, answer.request_id, records.sum())?;
            number += 1;
        }
        Ok(())
    }

    async fn echo(&self, connection: Connection) -> Result<(), Status> {
        let load = Arc::clone(&self.load);
        let requests = self.outgoing(move |request_id| echo::EchoSessionRequest {
            request_id,
            records: load.payloads(),
        });
        let mut client = connection.echo();
        let mut answers = client.echo_session(requests).await?.into_inner();
        let mut number = 0;
        while let Some(answer) = answers.message().await? {
            self.acked(number, answer.request_id, answer.records)?;
            number += 1;
        }
        Ok(())
    }

    fn outgoing<F>(&self, make: F) -> Outgoing<F> {
        Outgoing {
            session: self.clone(),
            make,
            number: 0,
        }
    }

    /// An ack came, which must be that of the oldest message without one.
    fn acked(&self, expected: u64, request_id: u64, records: u64) -> Result<(), Status> {
        let answered = Instant::now();
        let mut flow = self.flow();
        let oldest = flow.waiting.pop_front();
        let Some((due, sent)) = oldest.filter(|_| expected == request_id) else {
            return Err(Status::internal(format!(
                "ack {request_id} came where {expected} was due"
            )));
        };
        flow.wake();
        drop(flow);
        self.shared.lock().answered(&AnswerTimes {
            due: due.at,
            sent,
            answered,
            records,
            bytes: records * u64::from(self.load.spec.record_bytes),
            counts: due.counts,
        });
        Ok(())
    }
}

/// The messages of a session, made when the transport polls for them.
struct Outgoing<F> {
    session: LoadSession,
    make: F,
    number: u64,
}

impl<F, T> Stream for Outgoing<F>
where
    F: Fn(u64) -> T + Unpin,
{
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let due = {
            let mut flow = self.session.flow();
            let due = flow.next(&self.session.gate);
            if due.is_pending() {
                flow.waker = Some(context.waker().clone());
            }
            due
        };
        due.map(|due| {
            due.map(|_| {
                let number = self.number;
                self.number += 1;
                (self.make)(number)
            })
        })
    }
}

/// Runs the sessions of one thread.
pub(crate) fn all<'a>(
    sessions: &'a [LoadSession],
    connections: &'a [Connection],
) -> impl Future<Output = ()> + 'a {
    let running: Vec<_> = sessions
        .iter()
        .zip(connections)
        .enumerate()
        .map(|(index, (session, connection))| {
            tokio::spawn(session.clone().run(connection.clone(), index as u64))
        })
        .collect();
    async {
        for session in running {
            // A panic in it shows on stderr.
            let _ = session.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::spec::{Extent, LoadKind, Spec};

    fn session(most: usize, burst: bool, rate: Option<f64>) -> (LoadSession, Arc<Gate>) {
        let begin = Instant::now();
        let gate = Arc::new(Gate::new(begin, Extent::For(Duration::from_secs(60))));
        let spec = Spec {
            work: LoadKind::Session,
            burst,
            rate,
            ..Spec::default()
        };
        let shared = SharedRecorder::new(gate.window(rate.is_some()), false);
        let load = Load::new(&spec, begin);
        (LoadSession::new(&load, &shared, &gate, most), gate)
    }

    fn sent(session: &LoadSession, gate: &Gate) -> usize {
        std::iter::from_fn(|| match session.flow().next(gate) {
            Poll::Ready(due) => due,
            Poll::Pending => None,
        })
        .count()
    }

    #[test]
    fn window_is_filled_again_by_each_ack_a_burst_only_when_all_are_acked() {
        let (session, gate) = session(4, false, None);
        assert_eq!(sent(&session, &gate), 4);
        session.acked(0, 0, 1).unwrap();
        assert_eq!(sent(&session, &gate), 1);

        let (session, gate) = self::session(4, true, None);
        assert_eq!(sent(&session, &gate), 4);
        for ack in 0..3 {
            session.acked(ack, ack, 1).unwrap();
            assert_eq!(sent(&session, &gate), 0);
        }
        session.acked(3, 3, 1).unwrap();
        assert_eq!(sent(&session, &gate), 4);
    }

    #[test]
    fn paced_session_sends_what_is_due_and_ends_after_the_last() {
        let (session, gate) = session(4, false, Some(1.0));
        assert!(session.flow().next(&gate).is_pending());
        session.tell(gate.next(Instant::now()));
        session.tell(None);
        assert!(matches!(session.flow().next(&gate), Poll::Ready(Some(_))));
        assert!(matches!(session.flow().next(&gate), Poll::Ready(None)));
    }

    #[test]
    fn ack_out_of_order_is_an_error() {
        let (session, gate) = session(4, false, None);
        assert_eq!(sent(&session, &gate), 4);
        assert!(session.acked(0, 1, 1).is_err());
    }
}
