//! Exactly-once appends: repeated until they are acked, never applied twice.

use std::time::Duration;

use tokio::time::Instant;
use wald_proto::v1;
use wald_proto::v1::{Durability, Reason};

use crate::appender::pipeline_settings;
use crate::batch::{Condition, LogAck};
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::pipeline::{BatchReply, Pending, Pipeline, PipelineSettings, RecordAck, Stamp};
use crate::record::Record;
use crate::retry::{Repeat, after};

/// Settings of a [`Producer`].
#[must_use = "nothing is appended until it is opened"]
#[derive(Debug, Clone)]
pub struct ProducerBuilder {
    client: Client,
    log: String,
    identity: Option<(String, u64)>,
    first_sequence: u64,
    log_id: Option<u64>,
    writer_epoch: Option<u64>,
    settings: PipelineSettings,
}

impl Client {
    /// Appends to a log exactly once, whatever becomes of the connection; see [`Producer`].
    pub fn producer(&self, log: impl Into<String>) -> ProducerBuilder {
        ProducerBuilder {
            client: self.clone(),
            log: log.into(),
            identity: None,
            first_sequence: 0,
            log_id: None,
            writer_epoch: None,
            settings: PipelineSettings::default(),
        }
    }
}

impl ProducerBuilder {
    pipeline_settings!();

    /// The producer's name, and the number of this incarnation of it: a higher one shuts out
    /// the lower ones. Default: a name drawn at random, which [`Producer::close`] makes the server
    /// forget, and the lowest epoch that the log takes of a new producer. See [`Producer`] on
    /// restarts.
    pub fn id(mut self, id: impl Into<String>, epoch: u64) -> Self {
        self.identity = Some((id.into(), epoch));
        self
    }

    /// The sequence of the first batch. An incarnation that continues after a restart of the
    /// program gives the first sequence without a known ack. Default: 0.
    pub fn first_sequence(mut self, sequence: u64) -> Self {
        self.first_sequence = sequence;
        self
    }

    /// The log must have this number, or LOG_REPLACED. Default: the number that it has when
    /// the producer is opened.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.log_id = Some(log_id);
        self
    }

    /// Equals the log's writer epoch, or FENCED.
    pub fn writer_epoch(mut self, epoch: u64) -> Self {
        self.writer_epoch = Some(epoch);
        self
    }

    /// Maximum time of retries without an ack. Default: 60 s.
    pub fn retry_for(mut self, span: Duration) -> Self {
        self.settings.patience = span;
        self
    }

    /// Most batches that are not acked yet; beyond it they wait. Default: 512. From 1 to 1,024, and other values count as the
    /// nearest of them: a server recognises a producer's last 1,024 batches unless it is configured otherwise, and must
    /// recognise each batch that is sent again.
    pub fn window_batches(mut self, batches: usize) -> Self {
        self.settings.window_batches = batches.clamp(1, MOST_BATCHES);
        self
    }

    /// At most this number of batches that are not acked yet.
    pub(crate) fn at_most_batches(mut self, batches: usize) -> Self {
        self.settings.window_batches = self.settings.window_batches.min(batches);
        self
    }

    pub(crate) fn log_name(&self) -> &str {
        &self.log
    }

    /// Begins: makes the log if there is none, and learns its number. Must be called within
    /// a tokio runtime.
    ///
    /// # Errors
    /// The errors of GetLog and CreateLog.
    pub async fn open(self) -> Result<Producer, Error> {
        let is_drawn = self.identity.is_none();
        let log = match self.log_id {
            Some(_) if !is_drawn => None,
            _ => {
                let give_up_at = after(Instant::now(), self.settings.patience);
                Some(log(&self.client, &self.log, give_up_at).await?)
            }
        };
        let (id, epoch) = match self.identity {
            Some(identity) => identity,
            None => {
                let first = log.as_ref().map_or(0, |log| log.first_producer_epoch);
                (random_id()?, first)
            }
        };
        let found = log.map_or(0, |log| log.log_id);
        let log_id = self.log_id.unwrap_or(found);
        let stamp = Stamp {
            id: id.clone(),
            epoch,
            next_sequence: self.first_sequence,
            writer_epoch: self.writer_epoch,
            log_id,
        };
        Ok(Producer {
            log: self.log,
            log_id,
            id,
            epoch,
            first_sequence: self.first_sequence,
            durability: self.settings.durability,
            forgets: is_drawn.then(|| self.client.clone()),
            pipeline: Pipeline::start(self.client, self.settings, Some(stamp)),
        })
    }
}

/// Number of a producer's last batches that a server recognises, unless it is configured otherwise.
const MOST_BATCHES: usize = 1_024;

/// Time that [`Producer::close`] waits for the server to forget a random id.
const FORGET_TIMEOUT: Duration = Duration::from_secs(1);

/// A name that no other producer has.
fn random_id() -> Result<String, Error> {
    let mut bytes = [0; 16];
    // The random numbers of TLS: another library for them would be one more crate for every user.
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Random {
            detail: format!("{error:?}"),
        })
    })?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// A log, which is made if there is none.
async fn log(client: &Client, log: &str, give_up_at: Instant) -> Result<v1::Log, Error> {
    let mut failures = 0;
    loop {
        let error = match client.get_log(log).await {
            Ok(log) => return Ok(log),
            Err(error) if error.reason() == Some(Reason::LogNotFound) => {
                match client.create_log(log, v1::LogConfig::default()).await {
                    Ok(log) => return Ok(log),
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        // Another client has created it meanwhile, or the lost answer had reported success.
        let passing = error.reason() == Some(Reason::LogExists) || Repeat::Guarded.allows(&error);
        failures += 1;
        let pause = client.retry_policy().pause(failures, &error);
        if !passing || Instant::now() + pause >= give_up_at {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Appends to one log, exactly once and in order, over any number of lost connections and
/// restarts of the server.
///
/// Each batch carries the producer's id, its epoch and a sequence of its own, so the server
/// recognises a repeat and gives it the original's answer. On any passing failure the producer
/// reconnects and sends everything that is not acked again, in order, with growing pauses,
/// until nothing was acked for [`retry_for`](ProducerBuilder::retry_for). Batches are
/// pipelined: no batch waits for the acks of earlier ones.
///
/// ```no_run
/// # async fn example(client: wald_client::Client) -> Result<(), wald_client::Error> {
/// let producer = client.producer("orders").open().await?;
/// let first = producer.append("one").await?;
/// let both = producer.append_batch(["two", "three"]).await?;
/// println!("at {} and {}", first.await?.lsn, both.await?.first_lsn);
/// producer.close().await?;
/// # Ok(())
/// # }
/// ```
///
/// **Every other failure ends it** (PRODUCER_FENCED, PRODUCER_CONFLICT, FENCED, LOG_REPLACED,
/// RECORD_TOO_LARGE, POSITION_MISMATCH, ...). Batches that were acked before stay acked, and
/// every later batch fails too ([`ErrorKind::Behind`]). The log thus always holds a beginning
/// of the given batches, without a hole.
///
/// **The log is the one that existed at [`open`](ProducerBuilder::open)**, which creates it if
/// there is none. Its number goes with every batch: a repeat never brings a deleted log back,
/// nor reaches a log created later under the name (LOG_REPLACED).
///
/// Acks that are less than durable ([`durability`](ProducerBuilder::durability), the log's
/// sync mode) can be lost in a crash, and the server's memory of those batches with them: the
/// producer is then refused (PRODUCER_GAP) instead of leaving a hole.
///
/// **Restarts of the program.** With the default, a random id, a restarted program is another
/// producer, and cannot learn the outcome of batches whose acks it has not seen.
/// [`open_durable`](ProducerBuilder::open_durable) keeps the state for the next start. To keep it in another way, store id, epoch and log id before the first
/// batch, and each batch with its sequence (they count from
/// [`first_sequence`](ProducerBuilder::first_sequence), in the order of the calls) before it is
/// sent; forget it once it is acked. After a restart, either
///
/// - go on as the same incarnation: the same id, epoch and log id, `first_sequence` of the
///   first stored batch, and all stored batches again, the same content in the same order, with
///   [`append_batch`](Self::append_batch); batches that were applied are acked as
///   `deduplicated`. Use only `append_batch` then, because the grouping of single records
///   depends on time; or
/// - take the next epoch, and count from 0: as soon as its first batch is applied, the rest of
///   the old incarnation is shut out (PRODUCER_FENCED). The new epoch recognises no batch of
///   the old one. Look up every batch that was not acked in the log, or send it with the old
///   epoch first; otherwise it may be there twice.
///
/// Only the last 1,024 batches are recognised (unless the server is configured otherwise);
/// older ones are refused (PRODUCER_EXPIRED). A program that continues therefore begins with
/// the sequence after the last stored ack, not at 0 again.
#[derive(Debug)]
pub struct Producer {
    log: String,
    log_id: u64,
    id: String,
    epoch: u64,
    first_sequence: u64,
    durability: Durability,
    /// Present if the id was drawn at random: nobody uses it again.
    forgets: Option<Client>,
    pipeline: Pipeline,
}

impl Producer {
    /// The log's name.
    pub fn log(&self) -> &str {
        &self.log
    }

    /// The log's number.
    pub fn log_id(&self) -> u64 {
        self.log_id
    }

    /// The producer's name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The number of this incarnation.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Appends a record, in a batch with others that come at the same time. Waits only while
    /// the window is full; await its ack separately.
    ///
    /// # Errors
    /// [`ErrorKind::Behind`], once something has failed; the record was not sent then.
    pub async fn append(&self, record: impl Into<Record>) -> Result<Pending<RecordAck>, Error> {
        let record = record.into().into_proto();
        self.pipeline.record(self.log.clone(), record).await
    }

    /// Appends exactly these records as one batch, all or nothing.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub async fn append_batch<R>(&self, records: R) -> Result<Pending<LogAck>, Error>
    where
        R: IntoIterator,
        R::Item: Into<Record>,
    {
        self.append_batch_if(Condition::new(), records).await
    }

    /// Appends exactly these records as one batch, if this holds. The producer, the log's
    /// number, and unless named the writer epoch are the producer's own.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub async fn append_batch_if<R>(
        &self,
        condition: Condition,
        records: R,
    ) -> Result<Pending<LogAck>, Error>
    where
        R: IntoIterator,
        R::Item: Into<Record>,
    {
        let records = records.into_iter();
        self.append_batch_of(v1::LogBatch {
            log: self.log.clone(),
            records: records.map(|record| record.into().into_proto()).collect(),
            condition: condition.into_proto(),
        })
        .await
    }

    /// Appends this batch.
    pub(crate) async fn append_batch_of(
        &self,
        batch: v1::LogBatch,
    ) -> Result<Pending<LogAck>, Error> {
        let request = v1::AppendBatchRequest {
            batches: vec![batch],
            durability: self.durability.into(),
            ..Default::default()
        };
        self.pipeline.batch(request, BatchReply::Log).await
    }

    /// The sequence of its first batch.
    pub(crate) fn first_sequence(&self) -> u64 {
        self.first_sequence
    }

    /// Lets the server remember the id, also if it was drawn at random: the state has it.
    pub(crate) fn keep_id(&mut self) {
        self.forgets = None;
    }

    /// Sends the gathered records, waits for all acks, and ends the session. An id that was
    /// drawn at random is forgotten then, so that it takes no room in the log.
    ///
    /// # Errors
    /// The first failure.
    pub async fn close(self) -> Result<(), Error> {
        self.pipeline.close().await?;
        if let Some(client) = self.forgets {
            // If it fails, the server forgets the id once it has been idle for long enough.
            let forgotten = client.forget_producer(self.log, self.id, Some(self.log_id));
            let _ = tokio::time::timeout(FORGET_TIMEOUT, forgotten).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn window_has_at_most_the_batches_that_a_server_recognises() {
        let client = Client::builder("http://127.0.0.1:1").connect_lazy();
        let producer = client.unwrap().producer("log");
        let sizes = [0, 7, usize::MAX].map(|batches| {
            let settings = producer.clone().window_batches(batches).settings;
            settings.window_batches
        });
        assert_eq!(sizes, [1, 7, 1_024]);
    }
}
