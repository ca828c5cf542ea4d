//! One writer: appends of every kind, each told to the ledger before it is sent and after
//! it is answered.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::sync::Semaphore;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::ledger::{Ledger, Part};

/// Logs that all writers append to; each has one of its own besides.
const SHARED_LOGS: usize = 24;

pub(crate) struct Writer {
    pub(crate) number: usize,
    pub(crate) wal: WalServiceClient<Channel>,
    pub(crate) ledger: Arc<Mutex<Ledger>>,
    /// One permit for every ack.
    pub(crate) acks: Arc<Semaphore>,
    pub(crate) random: StdRng,
}

impl Writer {
    /// Appends until the daemon is gone.
    pub(crate) async fn run(mut self) {
        loop {
            let served = match self.random.random_range(0..10) {
                0..5 => self.append().await,
                5..8 => self.batch().await,
                8 => self.append_as_expected().await,
                _ => self.append_as_not_expected().await,
            };
            if !served {
                return;
            }
        }
    }

    fn durability(&mut self) -> v1::Durability {
        match self.random.random_range(0..4) {
            0 => v1::Durability::Written,
            1 => v1::Durability::Durable,
            _ => v1::Durability::Unspecified,
        }
    }

    fn sizes(&mut self, records: usize) -> Vec<usize> {
        let mut size = || self.random.random_range(0..200);
        (0..records).map(|_| size()).collect()
    }

    fn shared_log(&mut self) -> String {
        format!("shared/{}", self.random.random_range(0..SHARED_LOGS))
    }

    fn own_log(&self) -> String {
        format!("own/{}", self.number)
    }

    async fn append(&mut self) -> bool {
        let log = self.shared_log();
        self.append_if(log, None).await
    }

    /// At the tail of its own log, which nobody else moves.
    async fn append_as_expected(&mut self) -> bool {
        let log = self.own_log();
        let tail = self.ledger.lock().tail(&log);
        self.append_if(log, Some(tail)).await
    }

    /// Where the tail of its own log is not: must be refused, and never be seen.
    async fn append_as_not_expected(&mut self) -> bool {
        let log = self.own_log();
        let tail = self.ledger.lock().tail(&log);
        let wrong = if tail > 0 && self.random.random_bool(0.5) {
            tail - 1
        } else {
            tail + 1
        };
        self.append_if(log, Some(wrong)).await
    }

    async fn append_if(&mut self, log: String, expected_lsn: Option<u64>) -> bool {
        let sizes = self.sizes(1);
        let (attempt, parts) = self.ledger.lock().attempt(&[(log, sizes)]);
        let request = v1::AppendRequest {
            condition: expected_lsn.map(|lsn| v1::AppendCondition {
                expected_lsn: Some(lsn),
                ..v1::AppendCondition::default()
            }),
            durability: self.durability().into(),
            ..crate::support::append(&parts[0].log, &parts[0].payloads[0])
        };
        match self.wal.append(request).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                let lsn = answer.lsn.unwrap();
                if let Some(expected) = expected_lsn {
                    assert_eq!(lsn, expected, "an append goes where it was expected");
                }
                let mut ledger = self.ledger.lock();
                ledger.acked(attempt, vec![lsn], answer.position.unwrap());
                self.acks.add_permits(1);
                true
            }
            Err(status) => self.failed(attempt, &status),
        }
    }

    async fn batch(&mut self) -> bool {
        let mut logs = Vec::new();
        for _ in 0..self.random.random_range(2..=3) {
            let log = self.shared_log();
            if logs.iter().all(|(known, _)| *known != log) {
                let records = self.random.random_range(1..=3);
                logs.push((log, self.sizes(records)));
            }
        }
        let (attempt, parts) = self.ledger.lock().attempt(&logs);
        let request = v1::AppendBatchRequest {
            batches: parts.iter().map(part).collect(),
            durability: self.durability().into(),
            ..v1::AppendBatchRequest::default()
        };
        match self.wal.append_batch(request).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                let firsts = answer.appends.iter().map(|a| a.first_lsn.unwrap());
                let mut ledger = self.ledger.lock();
                ledger.acked(attempt, firsts.collect(), answer.position.unwrap());
                self.acks.add_permits(1);
                true
            }
            Err(status) => self.failed(attempt, &status),
        }
    }

    /// Whether the daemon answered. If not, the outcome stays unknown.
    fn failed(&self, attempt: usize, status: &Status) -> bool {
        let details = status.get_error_details();
        let Some(info) = details.error_info() else {
            return false;
        };
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert_eq!(info.metadata["outcome"], "NOT_APPLIED");
        self.ledger.lock().refused(attempt);
        true
    }
}

fn part(part: &Part) -> v1::LogBatch {
    let payloads: Vec<&str> = part.payloads.iter().map(String::as_str).collect();
    crate::support::part(&part.log, &payloads)
}
