//! Readers that follow everything, keep the records, and after a crash continue where they
//! were: their records must then equal the contents of the logs.

use std::collections::BTreeMap;

use bytes::Bytes;
use tonic::transport::Channel;
use wald_proto::v1;
use wald_proto::v1::Visibility;
use wald_proto::v1::wal_service_client::WalServiceClient;

use super::contents::Found;
use super::ledger::Crash;
use crate::support::{Daemon, payload};

/// The records that a reader holds of one log.
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
    told_of_loss: bool,
    pub(crate) shown: u64,
    /// Number of these records that a crash took.
    pub(crate) lost: u64,
}

impl Reader {
    pub(crate) fn new(visibility: Visibility) -> Self {
        Self {
            visibility,
            cursor: Bytes::new(),
            logs: BTreeMap::new(),
            told_of_loss: false,
            shown: 0,
            lost: 0,
        }
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
            match gap.reason() {
                v1::GapReason::Trimmed => {
                    let copy = self.logs.entry(gap.log.clone()).or_default();
                    copy.next = copy.next.max(gap.to_lsn());
                }
                // In a scan of many logs, a loss or a possible loss is reported.
                v1::GapReason::Lost => self.told_of_loss = true,
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

    /// Compares the records from before a crash with the contents after it; then reads on to
    /// the end, and must hold the same. A loss must be reported.
    pub(crate) async fn check(&mut self, daemon: &Daemon, found: &Found, crash: Crash) {
        let spared = match crash {
            Crash::Kill => Visibility::Written,
            Crash::PowerCut => Visibility::Durable,
        };
        // Visibilities are ordered from the strongest on.
        let stays = self.visibility <= spared;
        let mut lost_now = 0;
        for (log, copy) in &mut self.logs {
            copy.records = copy.records.split_off(&found.first(log));
            for (lsn, shown) in &copy.records {
                let there = found.logs.get(log).and_then(|kept| kept.get(*lsn));
                let lost = there.is_none() && !stays;
                assert!(
                    there == Some(shown) || lost,
                    "{log} {lsn} was shown to a reader ({:?}) as {shown:?}, is {there:?}",
                    self.visibility
                );
                lost_now += u64::from(lost);
            }
            copy.records.split_off(&found.tail(log));
            copy.next = copy.next.min(found.tail(log));
        }
        self.lost += lost_now;
        self.told_of_loss = false;
        let scan = daemon.wal().await.scan(self.request(false)).await;
        let mut messages = scan.unwrap().into_inner();
        while let Some(message) = messages.message().await.unwrap() {
            self.apply(message);
        }
        assert!(
            lost_now == 0 || self.told_of_loss,
            "{lost_now} lost silently"
        );
        assert!(!self.told_of_loss || !stays, "a loss is told of: {self:?}");
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
