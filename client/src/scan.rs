//! Scanning: a range of one log, of all logs with a prefix, or of everything; once, or
//! following records that are appended later.

use bytes::Bytes;
use wald_proto::v1;
use wald_proto::v1::scan_request::Start;
use wald_proto::v1::{GapReason, Visibility, scan_request};

use crate::client::Client;
use crate::error::Error;
use crate::lsn::Lsn;
use crate::record::Batch;
use crate::scan_stream::ScanStream;

/// The logs to scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// The log with this name.
    Log(String),
    /// All logs whose names start with this.
    Prefix(String),
    /// All logs.
    All,
}

impl From<&str> for Selector {
    fn from(log: &str) -> Self {
        Self::Log(log.to_owned())
    }
}

impl From<String> for Selector {
    fn from(log: String) -> Self {
        Self::Log(log)
    }
}

/// A place in a scan. Opaque; resumes a scan with the same selector and visibility, also in
/// another process and after a restart of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor(Bytes);

impl Cursor {
    /// The cursor as bytes, to be kept.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }
}

impl From<Bytes> for Cursor {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

/// Records that a scan does not deliver, named exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The log's name.
    pub log: String,
    /// The first missing lsn.
    pub from_lsn: Option<Lsn>,
    /// The lsn after the last missing one. None: up to wherever the log ended.
    pub to_lsn: Option<Lsn>,
    /// The reason why they are missing.
    pub reason: GapReason,
}

/// Progress of a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Resumes exactly here. None if the server gave none.
    pub cursor: Option<Cursor>,
    /// Everything that was there has been delivered.
    pub caught_up: bool,
    /// The tail; of a scan of one log.
    pub tail_lsn: Option<Lsn>,
    /// Every lsn below it is flushed to the device; of a scan of one log.
    pub durable_lsn: Option<Lsn>,
    /// Every lsn below it is in the bucket of a replica; of a scan of one log. None without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// Rises with every unclean start of the server.
    pub recovery_epoch: u64,
}

/// The events of a scan, in order.
#[derive(Debug)]
pub enum ScanEvent {
    /// Missing records, named before the records behind them.
    Gap(Gap),
    /// Records.
    Batch(Batch),
    /// Everything before this event is complete; keep its cursor to resume here.
    Progress(Progress),
    /// The connection was lost. The scan resumes automatically: continue to wait for it, or
    /// drop it to give up.
    Interrupted(Error),
}

/// A scan, to be opened. Begins at the first record kept by default.
#[must_use = "nothing is sent until it is opened"]
#[derive(Debug, Clone)]
pub struct Scan {
    pub(crate) client: Client,
    pub(crate) request: v1::ScanRequest,
}

impl Client {
    /// Scans the records that exist now.
    pub fn scan(&self, selector: impl Into<Selector>) -> Scan {
        let selector = match selector.into() {
            Selector::Log(log) => scan_request::Selector::Log(log),
            Selector::Prefix(prefix) => scan_request::Selector::Prefix(prefix),
            Selector::All => scan_request::Selector::All(v1::AllLogs {}),
        };
        Scan {
            client: self.clone(),
            request: v1::ScanRequest {
                selector: Some(selector),
                ..Default::default()
            },
        }
    }

    /// Scans the existing records, and then records that are appended later, without end.
    /// Resumes by its cursor after a lost connection: no record comes twice, none is skipped.
    pub fn follow(&self, selector: impl Into<Selector>) -> Scan {
        let mut scan = self.scan(selector);
        scan.request.follow = true;
        scan
    }
}

impl Scan {
    /// Begins at this lsn; one log only.
    pub fn from_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.request.start = Some(Start::Lsn(lsn.into().get()));
        self
    }

    /// Begins at the first record with this time or a later one, in microseconds since the
    /// Unix epoch, UTC.
    pub fn from_timestamp_us(mut self, timestamp_us: i64) -> Self {
        self.request.start = Some(Start::TimestampUs(timestamp_us));
        self
    }

    /// Begins `count` records before the tail; more than 0 for one log only.
    pub fn last(mut self, count: u64) -> Self {
        self.request.start = Some(Start::TailOffset(count));
        self
    }

    /// Begins with records that are appended from now on.
    pub fn from_now(self) -> Self {
        self.last(0)
    }

    /// Begins exactly where a scan with the same selector and visibility gave this cursor.
    pub fn after(mut self, cursor: Cursor) -> Self {
        self.request.start = Some(Start::Cursor(cursor.0));
        self
    }

    /// Ends before this lsn; one log only.
    pub fn until_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.request.until_lsn = Some(lsn.into().get());
        self
    }

    /// Ends after `count` records.
    pub fn max_records(mut self, count: u64) -> Self {
        self.request.max_records = count;
        self
    }

    /// Which records to see. Default: those that the log's sync mode acks; of several logs, those that the server's acks.
    pub fn visibility(mut self, visibility: Visibility) -> Self {
        self.request.visibility = visibility.into();
        self
    }

    /// Any node of the store may answer from its copy, which is usually a second old, and at most twice its `lease_ttl`.
    /// Readers then do not load the owner if the client begins with a stand-by. Implies the visibility REPLICATED.
    pub fn any_node(mut self) -> Self {
        self.request.any_node = true;
        self
    }

    /// The log must have this number, or LOG_REPLACED; one log only.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.request.log_id = Some(log_id);
        self
    }

    /// Opens the scan; a failure comes as its first event.
    pub fn open(self) -> ScanStream {
        ScanStream::new(self)
    }
}

/// Takes a message apart: its events in order, the records in them counted.
pub(crate) fn events(message: v1::ScanResponse) -> Result<(Vec<ScanEvent>, u64), Error> {
    let mut events = Vec::with_capacity(message.gaps.len() + message.batches.len() + 1);
    let mut count = 0;
    for gap in message.gaps {
        events.push(ScanEvent::Gap(Gap {
            reason: gap.reason(),
            log: gap.log,
            from_lsn: gap.from_lsn.map(Lsn::new),
            to_lsn: gap.to_lsn.map(Lsn::new),
        }));
    }
    for batch in message.batches {
        let batch = Batch::from_proto(batch)?;
        count += batch.records.len() as u64;
        events.push(ScanEvent::Batch(batch));
    }
    events.push(ScanEvent::Progress(Progress {
        cursor: (!message.cursor.is_empty()).then_some(Cursor(message.cursor)),
        caught_up: message.caught_up,
        tail_lsn: message.tail_lsn.map(Lsn::new),
        durable_lsn: message.durable_lsn.map(Lsn::new),
        replicated_lsn: message.replicated_lsn.map(Lsn::new),
        recovery_epoch: message.recovery_epoch,
    }));
    Ok((events, count))
}
