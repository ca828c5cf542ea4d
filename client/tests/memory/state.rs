//! Logs in memory: conditions, producers, fences and cursors as the contract has them.

use std::collections::{BTreeMap, HashMap};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};
use wald_client::proto::*;

/// One log.
#[derive(Default)]
pub(crate) struct StoredLog {
    pub(crate) log_id: u64,
    pub(crate) config: LogConfig,
    pub(crate) records: Vec<Record>,
    pub(crate) writer_epoch: u64,
    pub(crate) producers: BTreeMap<String, StoredProducer>,
    pub(crate) first_producer_epoch: u64,
    /// Epochs of forgotten producers, by id.
    pub(crate) gone: BTreeMap<String, u64>,
    pub(crate) cursors: BTreeMap<String, u64>,
}

/// A producer's incarnation, and its batches: their content and their first lsn.
#[derive(Default)]
pub(crate) struct StoredProducer {
    pub(crate) epoch: u64,
    pub(crate) batches: Vec<(Vec<Record>, u64)>,
}

/// All logs.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) logs: BTreeMap<String, StoredLog>,
    /// Newest batches of a producer that repeats are compared with; none: all.
    pub(crate) producer_window: Option<usize>,
    last_log_id: u64,
}

/// A refusal after which nothing was written.
pub(crate) fn refuse(code: Code, reason: &str, facts: &[(&str, String)]) -> Status {
    let mut facts: HashMap<String, String> = facts
        .iter()
        .map(|(name, fact)| ((*name).to_owned(), fact.clone()))
        .collect();
    facts.insert("outcome".into(), "NOT_APPLIED".into());
    facts
        .entry("retry".into())
        .or_insert_with(|| "NEVER".into());
    let details = ErrorDetails::with_error_info(reason, "wald.dev", facts);
    Status::with_error_details(code, "refused by the server in memory", details)
}

impl State {
    /// The log, made if there is none.
    pub(crate) fn log(&mut self, name: &str) -> &mut StoredLog {
        self.logs.entry(name.to_owned()).or_insert_with(|| {
            self.last_log_id += 1;
            StoredLog {
                log_id: self.last_log_id,
                ..Default::default()
            }
        })
    }

    /// The log, if it is there and has this number.
    pub(crate) fn existing(
        &mut self,
        name: &str,
        log_id: Option<u64>,
    ) -> Result<&mut StoredLog, Status> {
        let Some(log) = self.logs.get_mut(name) else {
            return Err(refuse(Code::NotFound, "LOG_NOT_FOUND", &[]));
        };
        match log_id {
            Some(log_id) if log_id != log.log_id => {
                Err(refuse(Code::FailedPrecondition, "LOG_REPLACED", &[]))
            }
            _ => Ok(log),
        }
    }

    /// Applies the whole, or refuses it.
    pub(crate) fn append(
        &mut self,
        request: AppendBatchRequest,
    ) -> Result<AppendBatchResponse, Status> {
        let records: usize = request.batches.iter().map(|b| b.records.len()).sum();
        if records > 1_000 {
            let facts = [
                ("records", records),
                ("limit_records", 1_000),
                ("bytes", 9),
                ("limit_bytes", 99),
            ];
            let facts = facts.map(|(name, value)| (name, value.to_string()));
            return Err(refuse(Code::InvalidArgument, "REQUEST_TOO_LARGE", &facts));
        }
        let mut repeats = Vec::new();
        for batch in &request.batches {
            repeats.push(self.check(batch)?);
        }
        for commit in &request.cursors {
            self.check_cursor(commit)?;
        }
        let mut appends = Vec::new();
        for (batch, repeat) in request.batches.into_iter().zip(repeats) {
            appends.push(self.apply(batch, repeat));
        }
        for commit in request.cursors {
            self.log(&commit.log)
                .cursors
                .insert(commit.cursor, commit.lsn);
        }
        Ok(AppendBatchResponse {
            appends,
            durability: Durability::Durable.into(),
            ..Default::default()
        })
    }

    /// Whether the batch may be applied; the first lsn of the original, if it is a repeat.
    fn check(&self, batch: &LogBatch) -> Result<Option<u64>, Status> {
        let none = StoredLog::default();
        let existing = self.logs.get(&batch.log);
        let log = existing.unwrap_or(&none);
        let condition = batch.condition.clone().unwrap_or_default();
        if let Some(wanted) = &condition.producer {
            let new = StoredProducer::default();
            let known = log.producers.get(&wanted.id).unwrap_or(&new);
            let over = log.gone.get(&wanted.id).map_or(0, |epoch| epoch + 1);
            let first_epoch = over.max(log.first_producer_epoch);
            if !log.producers.contains_key(&wanted.id) && wanted.epoch < first_epoch {
                let facts = [("first_epoch", first_epoch.to_string())];
                return Err(refuse(Code::FailedPrecondition, "PRODUCER_EXPIRED", &facts));
            }
            if wanted.epoch < known.epoch {
                let facts = [("epoch", known.epoch.to_string())];
                return Err(refuse(Code::FailedPrecondition, "PRODUCER_FENCED", &facts));
            }
            let batches = match wanted.epoch > known.epoch {
                true => &[][..],
                false => &known.batches[..],
            };
            let place = usize::try_from(wanted.sequence).unwrap();
            let window = self.producer_window.unwrap_or(batches.len());
            let oldest = batches.len().saturating_sub(window);
            if place < oldest {
                let facts = [("log", batch.log.clone()), ("oldest", oldest.to_string())];
                return Err(refuse(Code::FailedPrecondition, "PRODUCER_EXPIRED", &facts));
            }
            if let Some((records, first)) = batches.get(place) {
                return match *records == batch.records {
                    true => Ok(Some(*first)),
                    false => Err(refuse(Code::AlreadyExists, "PRODUCER_CONFLICT", &[])),
                };
            }
            if condition.log_id.is_none_or(|log_id| log_id == log.log_id) && place > batches.len() {
                let facts = [("expected", batches.len().to_string())];
                return Err(refuse(Code::Aborted, "PRODUCER_GAP", &facts));
            }
        }
        let failed =
            |reason, facts: &[(&str, String)]| Err(refuse(Code::FailedPrecondition, reason, facts));
        if condition.log_id.is_some_and(|log_id| log_id != log.log_id) {
            return failed("LOG_REPLACED", &[]);
        }
        if condition.must_exist && existing.is_none() {
            return failed("LOG_MISSING", &[]);
        }
        let named = condition.writer_epoch.unwrap_or(0);
        if named != log.writer_epoch {
            let mut facts = vec![("writer_epoch", log.writer_epoch.to_string())];
            facts.extend(
                condition
                    .writer_epoch
                    .map(|given| ("given_writer_epoch", given.to_string())),
            );
            return failed("FENCED", &facts);
        }
        let tail = log.records.len() as u64;
        if let Some(expected) = condition.expected_lsn.filter(|lsn| *lsn != tail) {
            let facts = [
                ("expected_lsn", expected.to_string()),
                ("actual_lsn", tail.to_string()),
            ];
            return failed("POSITION_MISMATCH", &facts);
        }
        Ok(None)
    }

    fn apply(&mut self, batch: LogBatch, repeat: Option<u64>) -> LogAppend {
        let log = self.log(&batch.log);
        let count = batch.records.len() as u64;
        let first = repeat.unwrap_or(log.records.len() as u64);
        if repeat.is_none() {
            for mut record in batch.records.clone() {
                // As the contract says: a stored time never goes back.
                let newest = log.records.last().map_or(0, |last| last.timestamp_us);
                record.timestamp_us = record.timestamp_us.max(newest);
                log.records.push(record);
            }
            if let Some(producer) = batch.condition.and_then(|condition| condition.producer) {
                let known = log.producers.entry(producer.id).or_default();
                if producer.epoch > known.epoch {
                    known.batches.clear();
                }
                known.epoch = producer.epoch;
                known.batches.push((batch.records, first));
            }
        }
        LogAppend {
            log_id: log.log_id,
            log: batch.log,
            first_lsn: Some(first),
            next_lsn: Some(first + count),
            deduplicated: repeat.is_some(),
            ..Default::default()
        }
    }

    pub(crate) fn check_cursor(&mut self, commit: &CursorCommit) -> Result<(), Status> {
        let log = self.existing(&commit.log, commit.log_id)?;
        let stands = log.cursors.get(&commit.cursor).copied().unwrap_or(0);
        if commit
            .expected_lsn
            .is_some_and(|expected| expected != stands)
        {
            let facts = [
                ("log", commit.log.clone()),
                ("cursor", commit.cursor.clone()),
                ("expected_lsn", commit.expected_lsn().to_string()),
                ("actual_lsn", stands.to_string()),
            ];
            return Err(refuse(
                Code::FailedPrecondition,
                "POSITION_MISMATCH",
                &facts,
            ));
        }
        if commit.lsn > log.records.len() as u64 {
            return Err(refuse(Code::OutOfRange, "BEYOND_TAIL", &[]));
        }
        Ok(())
    }
}
