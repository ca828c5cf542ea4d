//! The producers that a log knows: listing and forgetting them.

use std::time::{Duration, SystemTime};

use wald_proto::v1;

use crate::client::Client;
use crate::error::Error;
use crate::ops::call;
use crate::retry::Repeat;

/// A producer of a log as the server knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogProducer {
    /// Its id.
    pub id: String,
    /// Its newest epoch; lower ones are shut out (PRODUCER_FENCED).
    pub epoch: u64,
    /// The sequence of its next batch in this epoch.
    pub next_sequence: u64,
    /// Arrival time of its newest batch. An idle producer is forgotten 7 days later (setting
    /// `producer_max_idle` of the server).
    pub last_append_time: Option<SystemTime>,
}

/// A page of a log's producers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProducerPage {
    /// The producers, by id.
    pub producers: Vec<LogProducer>,
    /// Asks for the next page. None: this was the last.
    pub next_page_token: Option<String>,
}

impl LogProducer {
    fn from_proto(producer: v1::LogProducer) -> Result<Self, Error> {
        let epoch = producer.epoch;
        let next_sequence = producer.next_sequence;
        Ok(Self {
            id: producer.id,
            epoch: epoch.ok_or(Error::contract("LogProducer.epoch"))?,
            next_sequence: next_sequence.ok_or(Error::contract("LogProducer.next_sequence"))?,
            last_append_time: producer.last_append_time.and_then(|time| {
                let seconds = u64::try_from(time.seconds).ok()?;
                let nanos = u32::try_from(time.nanos).ok()?;
                Some(SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos))
            }),
        })
    }
}

impl Client {
    /// A page of the producers of a log, by id. A `page_size` of 0 is the server's default
    /// (100); no token begins at the start. With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, INVALID_PAGE_TOKEN, LOG_REPLACED, and the errors of every call.
    pub async fn list_producers(
        &self,
        log: impl Into<String>,
        page_size: u32,
        page_token: Option<String>,
        log_id: Option<u64>,
    ) -> Result<ProducerPage, Error> {
        let request = v1::ListProducersRequest {
            page_size,
            page_token: page_token.unwrap_or_default(),
            log: log.into(),
            log_id,
        };
        let answer = call!(self, log_service.list_producers, Repeat::Read, request)?;
        let producers = answer.producers.into_iter().map(LogProducer::from_proto);
        Ok(ProducerPage {
            producers: producers.collect::<Result<_, _>>()?,
            next_page_token: Some(answer.next_page_token).filter(|token| !token.is_empty()),
        })
    }

    /// Forgets a producer, durably, which makes room for another one. Its epoch is over: later
    /// batches of this epoch are refused with PRODUCER_EXPIRED and are never appended twice.
    /// With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, PRODUCER_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn forget_producer(
        &self,
        log: impl Into<String>,
        producer_id: impl Into<String>,
        log_id: Option<u64>,
    ) -> Result<(), Error> {
        let request = v1::ForgetProducerRequest {
            log: log.into(),
            producer_id: producer_id.into(),
            log_id,
        };
        call!(self, log_service.forget_producer, Repeat::Harmful, request)?;
        Ok(())
    }
}
