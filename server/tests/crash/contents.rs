//! Everything that is there after a start, read as any client would.

use std::collections::BTreeMap;

use wald_proto::v1;

use crate::support::{Daemon, payload};

/// A log, from the first record kept to the tail.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub(crate) first: u64,
    pub(crate) payloads: Vec<String>,
    pub(crate) writer_epoch: u64,
}

impl Kept {
    pub(crate) fn tail(&self) -> u64 {
        self.first + u64::try_from(self.payloads.len()).unwrap()
    }

    pub(crate) fn get(&self, lsn: u64) -> Option<&String> {
        let index = usize::try_from(lsn.checked_sub(self.first)?).unwrap();
        self.payloads.get(index)
    }
}

/// All logs, and for each older recovery epoch the end of its survivors.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) logs: BTreeMap<String, Kept>,
    pub(crate) survived: Vec<(u64, u64)>,
}

impl Found {
    pub(crate) fn first(&self, log: &str) -> u64 {
        self.logs.get(log).map_or(0, |kept| kept.first)
    }

    pub(crate) fn tail(&self, log: &str) -> u64 {
        self.logs.get(log).map_or(0, Kept::tail)
    }
}

/// Reads it all: dense from the first record kept, and up to the tail. A start must not
/// have found damage.
pub(crate) async fn read(daemon: &Daemon, ended_epochs: &[u64]) -> Found {
    let mut found = Found::default();
    let mut sizes = BTreeMap::new();
    for log in list(daemon).await {
        assert_eq!(
            log.durable_lsn, log.tail_lsn,
            "what a start shows of {} is durable",
            log.name
        );
        let kept = Kept {
            first: log.first_lsn.unwrap(),
            payloads: Vec::new(),
            writer_epoch: log.writer_epoch.unwrap_or(0),
        };
        sizes.insert(log.name.clone(), log.tail_lsn.unwrap() - kept.first);
        found.logs.insert(log.name, kept);
    }
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
        ..v1::ScanRequest::default()
    };
    let mut wal = daemon.wal().await;
    let mut messages = wal.scan(request).await.unwrap().into_inner();
    while let Some(message) = messages.message().await.unwrap() {
        for gap in &message.gaps {
            assert_eq!(gap.reason(), v1::GapReason::Trimmed, "{gap:?}");
            assert!(gap.to_lsn() <= found.first(&gap.log), "{gap:?}");
        }
        for batch in message.batches {
            let kept = found.logs.get_mut(&batch.log).unwrap();
            let next = kept.tail();
            assert_eq!(batch.first_lsn, Some(next), "{} is dense", batch.log);
            kept.payloads.extend(batch.records.iter().map(payload));
        }
    }
    for (name, kept) in &found.logs {
        let read = u64::try_from(kept.payloads.len()).unwrap();
        assert_eq!(read, sizes[name], "{name} is read up to its tail");
    }
    if let Some(log) = found.logs.keys().next() {
        for epoch in ended_epochs {
            let request = v1::GetTailRequest {
                log: log.clone(),
                recovery_epoch: Some(*epoch),
                ..v1::GetTailRequest::default()
            };
            let tail = wal.get_tail(request).await.unwrap();
            let survived = tail.into_inner().survived_position.unwrap();
            found.survived.push((*epoch, survived));
        }
    }
    found
}

/// All logs there are.
async fn list(daemon: &Daemon) -> Vec<v1::Log> {
    let mut logs = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = v1::ListLogsRequest {
            page_size: 1_000,
            page_token,
            ..v1::ListLogsRequest::default()
        };
        let page = daemon.logs().await.list_logs(request).await.unwrap();
        let page = page.into_inner();
        logs.extend(page.logs);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return logs;
        }
    }
}

/// Makes these logs, each in the sync mode that its name begins with.
pub(crate) async fn create(daemon: &Daemon, names: impl Iterator<Item = String>) {
    let mut logs = daemon.logs().await;
    for log in names {
        let config = v1::LogConfig {
            sync_mode: super::mode(&log).into(),
            ..v1::LogConfig::default()
        };
        let request = v1::CreateLogRequest {
            log,
            config: Some(config),
        };
        logs.create_log(request).await.unwrap();
    }
}
