//! Readers that follow everything, keep what they were shown, and go on after a crash from
//! where they were: what they hold then must be what is there.

use std::collections::BTreeMap;

use bytes::Bytes;
use tonic::transport::Channel;
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;
use wald_proto::v1::{SyncMode, Visibility};

use super::contents::Found;
use crate::support::{Daemon, payload};

/// What a reader holds of one log.
#[derive(Debug, Default)]
struct Copy {
    records: BTreeMap<u64, String>,
    next: u64,
}

#[derive(Debug)]
pub(crate) struct Reader {
    visibility: Visibility,
    cursor: Bytes,
    logs: BTreeMap<String, Copy>,
    pub(crate) shown: u64,
    /// Of these, what a crash took.
    pub(crate) lost: u64,
}

impl Reader {
    pub(crate) fn new(visibility: Visibility) -> Self {
        Self {
            visibility,
            cursor: Bytes::new(),
            logs: BTreeMap::new(),
            shown: 0,
            lost: 0,
        }
    }

    /// Whether what this reader sees of a log can never be lost.
    fn sees_durable(&self, log: &str) -> bool {
        self.visibility == Visibility::Durable || super::mode(log) == SyncMode::Strict
    }

    fn request(&self, follow: bool) -> v1::ScanRequest {
        v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
            start: (!self.cursor.is_empty())
                .then(|| v1::scan_request::Start::Cursor(self.cursor.clone())),
            visibility: self.visibility.into(),
            follow,
            ..v1::ScanRequest::default()
        }
    }

    /// Reads on until the connection ends.
    pub(crate) async fn follow(mut self, mut wal: WalServiceClient<Channel>) -> Self {
        let Ok(answer) = wal.scan(self.request(true)).await else {
            return self;
        };
        let mut messages = answer.into_inner();
        while let Ok(Some(message)) = messages.message().await {
            self.apply(message);
        }
        self
    }

    fn apply(&mut self, message: v1::ScanResponse) {
        for gap in &message.gaps {
            let durable = self.sees_durable(&gap.log);
            let copy = self.logs.entry(gap.log.clone()).or_default();
            match gap.reason() {
                v1::GapReason::Trimmed => copy.next = copy.next.max(gap.to_lsn()),
                v1::GapReason::Lost => {
                    assert!(!durable, "what was shown as durable is lost: {gap:?}");
                    copy.next = gap.from_lsn();
                    copy.records.split_off(&gap.from_lsn());
                }
                reason => panic!("a gap for {reason:?}: {gap:?}"),
            }
        }
        for batch in &message.batches {
            let copy = self.logs.entry(batch.log.clone()).or_default();
            assert_eq!(
                batch.first_lsn(),
                copy.next,
                "a reader of {} gets one record after the other",
                batch.log
            );
            for record in &batch.records {
                copy.records.insert(copy.next, payload(record));
                copy.next += 1;
                self.shown += 1;
            }
        }
        self.cursor = message.cursor;
    }

    /// Holds what was shown before a crash against what is there after it; then reads on
    /// to the end, and must hold the same.
    pub(crate) async fn check(&mut self, daemon: &Daemon, found: &Found) {
        let durable: Vec<bool> = self.logs.keys().map(|log| self.sees_durable(log)).collect();
        for ((log, copy), durable) in self.logs.iter_mut().zip(durable) {
            copy.records = copy.records.split_off(&found.first(log));
            for (lsn, shown) in &copy.records {
                let there = found.logs.get(log).and_then(|kept| kept.get(*lsn));
                let lost = there.is_none() && !durable;
                assert!(
                    there == Some(shown) || lost,
                    "{log} {lsn} was shown to a reader ({:?}) as {shown:?}, is {there:?}",
                    self.visibility
                );
                self.lost += u64::from(lost);
            }
        }
        let scan = daemon.wal().await.scan(self.request(false)).await;
        let mut messages = scan.unwrap().into_inner();
        while let Some(message) = messages.message().await.unwrap() {
            self.apply(message);
        }
        for (log, kept) in &found.logs {
            let copy = self.logs.entry(log.clone()).or_default();
            copy.records = copy.records.split_off(&kept.first);
            assert!(
                copy.records.values().eq(&kept.payloads),
                "a reader of {log} who goes on holds {:?} of {}..{}",
                copy.records.keys(),
                kept.first,
                kept.tail()
            );
            copy.next = kept.tail();
        }
        self.logs.retain(|log, copy| {
            let known = found.logs.contains_key(log);
            assert!(known || copy.records.is_empty(), "{log} is gone");
            known
        });
    }
}
