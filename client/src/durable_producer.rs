//! A producer that goes on after a restart of its program.

use std::collections::VecDeque;
use std::fmt;

use futures_util::FutureExt as _;
use wald_proto::v1;
use wald_proto::v1::{Reason, StateKind};

use crate::batch::LogAck;
use crate::error::{Error, ErrorKind, Outcome};
use crate::pipeline::Pending;
use crate::producer::{Producer, ProducerBuilder};
use crate::record::Record;
use crate::state::{KeptState, State, failed};

/// Most batches that are kept and not acked. Each save writes all of them.
const BATCHES_KEPT: usize = 64;

impl ProducerBuilder {
    /// Begins as [`open`](Self::open), and keeps the producer's state in `state`. If a state is there, the producer of
    /// that state goes on: batches whose acks it had not seen are sent again.
    ///
    /// At most 64 batches wait for their acks, whatever [`window_batches`](Self::window_batches) says, since each save writes all
    /// of them. `id`, `first_sequence` and `log_id` come from the state, once there is one.
    ///
    /// # Errors
    /// As `open`, and [`ErrorKind::State`] if the state cannot be read or belongs to another log.
    pub async fn open_durable(mut self, state: impl State) -> Result<DurableProducer, Error> {
        let state = KeptState::new(state);
        self = self.at_most_batches(BATCHES_KEPT);
        let found: Option<v1::ProducerState> = state.load().await?;
        let is_new = found.is_none();
        if let Some(found) = &found {
            if found.kind() != StateKind::Producer {
                return Err(failed("it is not the state of a producer".to_owned()));
            }
            if found.log != self.log_name() {
                let (has, wanted) = (&found.log, self.log_name());
                return Err(failed(format!(
                    "it is the state of a producer of the log {has:?}, not of {wanted:?}"
                )));
            }
            self = self
                .id(found.id.clone(), found.epoch)
                .log_id(found.log_id)
                .first_sequence(found.sequence);
        }
        let mut producer = self.clone().open().await?;
        producer.keep_id();
        let kept = found.unwrap_or_else(|| v1::ProducerState {
            log: producer.log().to_owned(),
            log_id: producer.log_id(),
            id: producer.id().to_owned(),
            epoch: producer.epoch(),
            sequence: producer.first_sequence(),
            batches: Vec::new(),
            earlier_batches: 0,
            kind: StateKind::Producer.into(),
        });
        let mut durable = DurableProducer {
            builder: self.log_id(kept.log_id),
            producer,
            state,
            loaded: kept.batches.len(),
            kept,
            acks: VecDeque::new(),
            failed: None,
        };
        if is_new || !durable.kept.batches.is_empty() {
            // Before the first batch: without it the next start would be another producer. A state that was found may not
            // be flushed.
            durable.save().await?;
        }
        durable.send_kept().await?;
        Ok(durable)
    }
}

/// Appends to one log exactly once, over restarts of the server **and of the program**.
///
/// Each batch is kept in the state before it is sent. Once [`append_batch`](Self::append_batch) has returned, the batch
/// will be in the log once, and in its place: if the program ends before the ack, the next
/// [`open_durable`](ProducerBuilder::open_durable) with the same state sends it again. [`next_sequence`](Self::next_sequence)
/// says where the program goes on in its own input.
///
/// ```no_run
/// # async fn example(client: wald_client::Client) -> Result<(), wald_client::Error> {
/// use wald_client::FileState;
///
/// let state = FileState::new("orders.state");
/// let mut orders = client.producer("orders").open_durable(state).await?;
/// for number in orders.next_sequence()..1000 {
///     orders.append_batch([format!("order {number}")]).await?;
/// }
/// orders.close().await?;
/// # Ok(())
/// # }
/// ```
///
/// A save costs about two flushes of the state's device, so larger batches go faster. **A failure ends the producer** as it
/// ends a [`Producer`]. A batch that the server refuses for good, such as one with a record that is too large, stays in
/// the state, and every later start fails with it: check the size of records before.
///
/// **A producer that has been idle for longer than the server keeps producers** (`producer_max_idle`, 7 days unless
/// configured otherwise) is unknown there. If no batch is in doubt, it goes on in a new epoch, and nobody notices. If the
/// state has batches that an earlier run may have appended, nobody can tell whether they are in the log, and every start is
/// refused (PRODUCER_EXPIRED) until somebody decides it (`walctl state settle`). For the same reason, never go back to an old copy of a state.
///
/// Acks are taken, and failures are seen, by the next call: call [`flush`](Self::flush) behind the last batch of a while.
///
/// An ack counts at the durability that [`durability`](ProducerBuilder::durability) or the log's sync mode asks for. With less
/// than DURABLE a crash of the server can lose acked batches. The producer is then refused (PRODUCER_GAP) instead of leaving a hole,
/// unless the server has also forgotten it since: the new epoch begins behind the hole, and nobody notices.
pub struct DurableProducer {
    /// Opens `producer`, but for its id and sequence.
    builder: ProducerBuilder,
    producer: Producer,
    state: KeptState,
    /// Number of batches at the beginning of `kept` that an earlier run may have sent.
    loaded: usize,
    /// The batches without a known ack, the first of them not yet taken off after its ack.
    kept: v1::ProducerState,
    /// Acks of the first batches of `kept`: those that were sent.
    acks: VecDeque<Pending<LogAck>>,
    /// The failure that has ended it.
    failed: Option<Error>,
}

impl fmt::Debug for DurableProducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableProducer")
            .field("producer", &self.producer)
            .field("next_sequence", &self.next_sequence())
            .finish_non_exhaustive()
    }
}

impl DurableProducer {
    /// The log's name.
    pub fn log(&self) -> &str {
        self.producer.log()
    }

    /// The log's number.
    pub fn log_id(&self) -> u64 {
        self.producer.log_id()
    }

    /// The producer's name, which stays over restarts.
    pub fn id(&self) -> &str {
        self.producer.id()
    }

    /// Number of batches that it was given so far, in all runs of the program: the sequence of the next one.
    pub fn next_sequence(&self) -> u64 {
        self.kept.earlier_batches + self.kept.sequence + self.kept.batches.len() as u64
    }

    /// Keeps these records as one batch, and sends them. Returns its sequence once the batch is kept; the ack may come later.
    ///
    /// Cancelling it leaves the batch kept or not; `next_sequence` tells.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the batch could not be kept. [`ErrorKind::Behind`] with the failure of an earlier batch, and the
    /// outcome of this one: NOT_APPLIED if it was not kept, UNKNOWN if it was, so that the next start sends it.
    pub async fn append_batch<R>(&mut self, records: R) -> Result<u64, Error>
    where
        R: IntoIterator,
        R::Item: Into<Record>,
    {
        let records = records.into_iter();
        let records: Vec<_> = records.map(|record| record.into().into_proto()).collect();
        if records.is_empty() {
            return Err(Error::new(ErrorKind::EmptyBatch));
        }
        let room = self.make_room().await;
        room.map_err(|first| behind(first, Outcome::NotApplied))?;
        let sequence = self.next_sequence();
        self.kept.batches.push(v1::LogBatch {
            records,
            ..v1::LogBatch::default()
        });
        self.save().await?;
        match self.send_kept().await {
            Ok(()) => Ok(sequence),
            // The batch is kept, so the next start sends it.
            Err(first) => Err(behind(first, Outcome::Unknown)),
        }
    }

    /// Waits until there is room for another batch.
    async fn make_room(&mut self) -> Result<(), Error> {
        self.take_acks()?;
        loop {
            // Batches of calls that were cancelled, or of an epoch that is over: their acks make room.
            self.save_and_send().await?;
            if self.kept.batches.len() < BATCHES_KEPT {
                return Ok(());
            }
            self.take_ack().await?;
        }
    }

    /// Waits for the acks of all batches.
    ///
    /// # Errors
    /// The first failure.
    pub async fn flush(&mut self) -> Result<(), Error> {
        while !self.kept.batches.is_empty() {
            self.save_and_send().await?;
            self.take_ack().await?;
        }
        self.save().await
    }

    /// Waits for the acks of all batches, and ends the session. The next start goes on as the same producer.
    ///
    /// # Errors
    /// The first failure.
    pub async fn close(mut self) -> Result<(), Error> {
        self.flush().await?;
        self.producer.close().await
    }

    /// Takes the acks that have come.
    fn take_acks(&mut self) -> Result<(), Error> {
        self.check()?;
        while let Some(first) = self.acks.front_mut() {
            match first.now_or_never() {
                Some(acked) => self.taken(acked)?,
                None => break,
            }
        }
        Ok(())
    }

    /// Takes the next ack when it comes.
    async fn take_ack(&mut self) -> Result<(), Error> {
        self.check()?;
        match self.acks.front_mut() {
            Some(first) => {
                let acked = first.await;
                self.taken(acked)
            }
            None => Ok(()),
        }
    }

    fn taken(&mut self, acked: Result<LogAck, Error>) -> Result<(), Error> {
        match acked {
            Ok(_) => {
                self.acks.pop_front();
                self.kept.batches.remove(0);
                self.kept.sequence += 1;
                self.loaded = self.loaded.saturating_sub(1);
                Ok(())
            }
            Err(error) => match self.next_epoch(&error) {
                Some(epoch) => {
                    self.begin_again(epoch);
                    Ok(())
                }
                None => self.fail(error),
            },
        }
    }

    /// The epoch in which this producer goes on after the failure of its first batch in doubt. The server has forgotten the
    /// producer, and has applied none of the batches: each was sent once, and refused.
    fn next_epoch(&self, error: &Error) -> Option<u64> {
        let forgotten = error.reason() == Some(Reason::ProducerExpired);
        let applied_none = self.loaded == 0 && error.outcome() == Outcome::NotApplied;
        error
            .fact_number("first_epoch")
            .filter(|_| forgotten && applied_none)
    }

    /// Begins a new epoch, whose batches are not sent yet.
    fn begin_again(&mut self, epoch: u64) {
        self.acks.clear();
        self.kept.earlier_batches += std::mem::take(&mut self.kept.sequence);
        self.kept.epoch = epoch;
    }

    async fn save(&mut self) -> Result<(), Error> {
        self.check()?;
        match self.state.save(&self.kept).await {
            Ok(()) => Ok(()),
            Err(error) => self.fail(error),
        }
    }

    /// Sends batches of calls that were cancelled. Their saves may not have ended, or have failed.
    async fn save_and_send(&mut self) -> Result<(), Error> {
        if self.acks.len() < self.kept.batches.len() {
            self.save().await?;
            self.send_kept().await?;
        }
        Ok(())
    }

    /// Sends the batches that are kept and were not sent.
    async fn send_kept(&mut self) -> Result<(), Error> {
        self.check()?;
        while self.acks.len() < self.kept.batches.len() {
            if self.producer.epoch() != self.kept.epoch {
                self.save().await?;
                let builder = self.builder.clone();
                let builder = builder.id(self.kept.id.clone(), self.kept.epoch);
                self.producer = builder.first_sequence(0).open().await?;
                continue;
            }
            let batch = v1::LogBatch {
                log: self.producer.log().to_owned(),
                ..self.kept.batches[self.acks.len()].clone()
            };
            match self.producer.append_batch_of(batch).await {
                Ok(ack) => self.acks.push_back(ack),
                // The first failure is in an ack.
                Err(_) if !self.acks.is_empty() => self.take_ack().await?,
                Err(error) => return self.fail(error),
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Error> {
        match &self.failed {
            Some(first) => Err(first.clone()),
            None => Ok(()),
        }
    }

    fn fail(&mut self, error: Error) -> Result<(), Error> {
        self.failed = Some(error.clone());
        Err(error)
    }
}

/// The error of a batch behind a failure, with the outcome of this batch.
fn behind(first: Error, outcome: Outcome) -> Error {
    Error::new(ErrorKind::Behind { first, outcome })
}
