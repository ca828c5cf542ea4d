//! Unary calls: one caller has one under way at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic::{Code, Status};
use wald_client::proto;
use wald_proto::echo;
use wald_proto::echo::echo_service_client::EchoServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::connection::Connection;
use crate::gate::Due;
use crate::record::{AnswerTimes, SharedRecorder};
use crate::spec::{LoadKind, Spec};

/// Pause after a failure: a refused caller does not repeat at once.
const PAUSE: Duration = Duration::from_millis(1);

/// Numbers that look random, the same in every run.
#[derive(Debug, Clone)]
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    /// `SplitMix64` (Steele, Lea, Flood 2014).
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A payload that does not compress.
pub(crate) fn payload(bytes: u32) -> Bytes {
    let mut draw = Draw(u64::from(bytes));
    std::iter::repeat_with(|| draw.next().to_le_bytes())
        .flatten()
        .take(usize::try_from(bytes).unwrap_or(usize::MAX))
        .collect()
}

pub(crate) fn record(data: Bytes) -> proto::Record {
    proto::Record {
        payload: Some(proto::record::Payload::Data(data)),
        ..proto::Record::default()
    }
}

/// State that all callers of a load share.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) spec: Spec,
    pub(crate) logs: Vec<String>,
    pub(crate) payload: Bytes,
    /// Origin of the times in payloads.
    pub(crate) epoch: Instant,
}

impl Load {
    pub(crate) fn new(spec: &Spec, epoch: Instant) -> Arc<Self> {
        Arc::new(Self {
            logs: (0..spec.logs.max(1))
                .map(|number| spec.log(number))
                .collect(),
            payload: payload(spec.record_bytes),
            spec: spec.clone(),
            epoch,
        })
    }

    pub(crate) fn payloads(&self) -> Vec<Bytes> {
        (0..self.spec.batch).map(|_| self.payload.clone()).collect()
    }

    pub(crate) fn log(&self, number: u64) -> String {
        let logs = self.logs.len() as u64;
        self.logs[usize::try_from(number % logs).unwrap_or(0)].clone()
    }

    pub(crate) fn batch(&self, number: u64) -> proto::AppendBatchRequest {
        let payloads = (0..self.spec.batch).map(|_| record(self.payload.clone()));
        proto::AppendBatchRequest {
            batches: vec![proto::LogBatch {
                log: self.log(number),
                records: payloads.collect(),
                condition: None,
            }],
            durability: self.spec.durability.number(),
            ..proto::AppendBatchRequest::default()
        }
    }

    /// The time in front, the rest as always.
    fn stamped(&self) -> Bytes {
        let mut data = self.payload.to_vec();
        let since = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let stamp = since.to_le_bytes();
        data.resize(data.len().max(stamp.len()), 0);
        data[..stamp.len()].copy_from_slice(&stamp);
        data.into()
    }
}

/// One caller.
#[derive(Debug, Clone)]
pub(crate) struct LoadCaller {
    load: Arc<Load>,
    wal: WalServiceClient<Connection>,
    echo: EchoServiceClient<Connection>,
    shared: SharedRecorder,
    number: u64,
    stride: u64,
    draw: Draw,
}

impl LoadCaller {
    /// The caller `index` of `callers`: together they go over the logs in turn.
    pub(crate) fn new(
        load: &Arc<Load>,
        connection: &Connection,
        shared: &SharedRecorder,
        index: usize,
        callers: usize,
    ) -> Self {
        Self {
            load: Arc::clone(load),
            wal: connection.wal(),
            echo: connection.echo(),
            shared: shared.clone(),
            number: index as u64,
            stride: callers as u64,
            draw: Draw(index as u64),
        }
    }

    /// Makes the call that is due. `false`: nobody answers any more, there is no point in
    /// going on.
    pub(crate) async fn call(&mut self, due: Due) -> bool {
        let sent = Instant::now();
        let done = self.send().await;
        let answered = Instant::now();
        match done {
            Ok((records, bytes)) => {
                self.shared.lock().answered(&AnswerTimes {
                    due: due.at,
                    sent: sent.max(due.at),
                    answered,
                    records,
                    bytes,
                    counts: due.counts,
                });
                true
            }
            Err(status) => {
                self.shared.lock().failed(&status);
                tokio::time::sleep(PAUSE).await;
                !ends(status.code())
            }
        }
    }

    /// Records that were acked or read, and bytes of their payloads.
    async fn send(&mut self) -> Result<(u64, u64), Status> {
        let load = &self.load;
        let spec = &load.spec;
        self.number = self.number.wrapping_add(self.stride);
        let sent = u64::from(spec.batch) * u64::from(spec.record_bytes);
        if spec.echo {
            let read = spec.work == LoadKind::Read;
            let request = echo::EchoRequest {
                records: if read { Vec::new() } else { load.payloads() },
                answer_bytes: if read { spec.record_bytes } else { 0 },
            };
            let answer = self.echo.echo(request).await?.into_inner();
            return Ok(match read {
                true => (1, answer.data.len() as u64),
                false => (answer.records, sent),
            });
        }
        match spec.work {
            LoadKind::Batch => {
                let request = load.batch(self.number);
                let answer = self.wal.append_batch(request).await?.into_inner();
                let ack = answer.appends.first();
                let records = ack.map_or(0, |ack| ack.next_lsn() - ack.first_lsn());
                Ok((records, sent))
            }
            LoadKind::Read => {
                let request = proto::ReadRequest {
                    log: load.log(0),
                    start: Some(proto::read_request::Start::Lsn(
                        self.draw.next() % spec.filled.max(1),
                    )),
                    max_records: 1,
                    visibility: spec.durability.visibility(),
                    ..proto::ReadRequest::default()
                };
                let page = self.wal.read(request).await?.into_inner();
                Ok(page.batch.map_or((0, 0), |batch| counted(&batch)))
            }
            _ => {
                let follow = spec.work == LoadKind::Follow;
                let request = proto::AppendRequest {
                    log: load.log(self.number),
                    record: Some(record(match follow {
                        true => load.stamped(),
                        false => load.payload.clone(),
                    })),
                    condition: None,
                    durability: spec.durability.number(),
                };
                self.wal.append(request).await?;
                Ok((1, u64::from(spec.record_bytes)))
            }
        }
    }
}

/// Whether a code ends a load: no connection, no such service. All else is counted.
pub(crate) fn ends(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable | Code::Unknown | Code::Unimplemented | Code::Internal | Code::Cancelled
    )
}

/// Records of a batch and bytes of their payloads.
pub(crate) fn counted(batch: &proto::RecordBatch) -> (u64, u64) {
    let bytes = batch.records.iter().map(|record| match &record.payload {
        Some(proto::record::Payload::Data(data)) => data.len() as u64,
        _ => 0,
    });
    (batch.records.len() as u64, bytes.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_has_its_size_and_does_not_repeat_itself() {
        assert_eq!(payload(0).len(), 0);
        let bytes = payload(1001);
        assert_eq!(bytes.len(), 1001);
        assert_ne!(bytes[..8], bytes[8..16]);
    }
}
