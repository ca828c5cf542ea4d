//! Makes batches of the queue, and passes acks to their waiters.

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use wald_proto::v1;

use super::{PipelineSettings, RecordAck, behind};
use crate::batch::{BatchAck, LogAck};
use crate::error::{Error, Outcome};
use crate::lsn::Lsn;
use crate::retry::after;

/// An entry of the queue.
#[derive(Debug)]
pub(super) enum Work {
    /// One record, to be gathered with others.
    Record(Box<Gathered>),
    Batch(SealedBatch),
}

/// Records of one log that become one batch.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) log: String,
    pub(super) records: Vec<v1::Record>,
    pub(super) bytes: usize,
    pub(super) replies: Vec<oneshot::Sender<Result<RecordAck, Error>>>,
    pub(super) permit: OwnedSemaphorePermit,
    pub(super) seal_at: Instant,
}

/// A batch that does not change any more.
#[derive(Debug)]
pub(super) struct SealedBatch {
    pub(super) request: v1::AppendBatchRequest,
    pub(super) reply: BatchReply,
    pub(super) permit: OwnedSemaphorePermit,
}

/// A waiter for a batch.
#[derive(Debug)]
pub(crate) enum BatchReply {
    Records(Vec<oneshot::Sender<Result<RecordAck, Error>>>),
    Log(oneshot::Sender<Result<LogAck, Error>>),
    Batch(oneshot::Sender<Result<BatchAck, Error>>),
}

impl BatchReply {
    // A caller that dropped its Pending needs no result: a failed send does not matter.

    pub(super) fn ack(self, mut ack: BatchAck) {
        match self {
            Self::Batch(reply) => {
                let _ = reply.send(Ok(ack));
            }
            Self::Log(reply) => {
                let append = ack.appends.pop();
                let _ = reply.send(append.ok_or(Error::contract("AppendBatchResponse.appends")));
            }
            Self::Records(replies) => {
                let Some(append) = ack.appends.pop() else {
                    let error = Error::contract("AppendBatchResponse.appends");
                    return Self::Records(replies).fail(error);
                };
                for (lsn, reply) in (append.first_lsn.get()..).zip(replies) {
                    let _ = reply.send(Ok(RecordAck {
                        lsn: Lsn::new(lsn),
                        durability: ack.durability,
                        deduplicated: append.deduplicated,
                        position: ack.position,
                        recovery_epoch: ack.recovery_epoch,
                        log_id: append.log_id,
                    }));
                }
            }
        }
    }

    pub(super) fn fail(self, error: Error) {
        match self {
            Self::Records(replies) => {
                for reply in replies {
                    let _ = reply.send(Err(error.clone()));
                }
            }
            Self::Log(reply) => {
                let _ = reply.send(Err(error));
            }
            Self::Batch(reply) => {
                let _ = reply.send(Err(error));
            }
        }
    }
}

/// Makes batches of the queued records.
#[derive(Debug)]
pub(super) struct Gatherer {
    work: mpsc::UnboundedReceiver<Work>,
    /// Taken from the queue, but not for the batch that is being gathered.
    put_back: Option<Work>,
    gathered: Option<Box<Gathered>>,
    settings: PipelineSettings,
}

impl Gatherer {
    pub(super) fn new(work: mpsc::UnboundedReceiver<Work>, settings: PipelineSettings) -> Self {
        Self {
            work,
            put_back: None,
            gathered: None,
            settings,
        }
    }

    /// The next batch; none once the queue is closed and empty. Loses nothing if it is
    /// dropped while it waits.
    pub(super) async fn next(&mut self) -> Option<SealedBatch> {
        loop {
            let work = match (self.put_back.take(), &self.gathered) {
                (Some(work), _) => Some(work),
                (None, Some(gathered)) if self.is_full(gathered) => return self.seal(),
                (None, Some(gathered)) => {
                    match timeout_at(gathered.seal_at, self.work.recv()).await {
                        Ok(work) => work,
                        Err(_) => return self.seal(),
                    }
                }
                (None, None) => self.work.recv().await,
            };
            match (work, &mut self.gathered) {
                (None, _) => return self.seal(),
                (Some(Work::Batch(sealed)), None) => return Some(sealed),
                (Some(Work::Record(mut first)), None) => {
                    first.seal_at = after(Instant::now(), self.settings.linger);
                    self.gathered = Some(first);
                }
                (Some(Work::Record(more)), Some(gathered))
                    if more.log == gathered.log
                        && gathered.bytes + more.bytes <= self.settings.batch_bytes =>
                {
                    gathered.bytes += more.bytes;
                    gathered.records.extend(more.records);
                    gathered.replies.extend(more.replies);
                    gathered.permit.merge(more.permit);
                }
                (Some(work), Some(_)) => {
                    self.put_back = Some(work);
                    return self.seal();
                }
            }
        }
    }

    fn is_full(&self, gathered: &Gathered) -> bool {
        gathered.records.len() >= self.settings.batch_records
            || gathered.bytes >= self.settings.batch_bytes
    }

    fn seal(&mut self) -> Option<SealedBatch> {
        let gathered = self.gathered.take()?;
        Some(SealedBatch {
            request: v1::AppendBatchRequest {
                batches: vec![v1::LogBatch {
                    log: gathered.log,
                    records: gathered.records,
                    condition: None,
                }],
                durability: self.settings.durability.into(),
                ..Default::default()
            },
            reply: BatchReply::Records(gathered.replies),
            permit: gathered.permit,
        })
    }

    /// Fails everything that was not sent, and takes nothing any more.
    pub(super) async fn fail(&mut self, first: &Error) {
        self.work.close();
        while let Some(sealed) = self.next().await {
            sealed.reply.fail(behind(first, Outcome::NotApplied));
        }
    }
}
