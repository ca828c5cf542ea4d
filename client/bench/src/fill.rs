//! Preparation of a load: records to read, the echo service.

use anyhow::{Context, Result, bail};
use tonic::{Code, Status};
use wald_client::proto;
use wald_proto::echo::EchoRequest;

use crate::caller::Load;
use crate::connection::Connection;
use crate::measure::LoadTarget;
use crate::say;
use crate::spec::{LoadKind, Spec};

/// Records of one request at most, and bytes of them: below the server's limits as it comes.
const RECORDS: u64 = 1_000;
const BYTES: u64 = 256 << 10;

/// Records of each batch that single ones are read of, as in workload W3: a read checks the
/// whole frame that its record lies in.
const READ_RECORDS: u64 = 100;

/// Runs the work on a runtime of its own.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

/// Asks the echo service once.
pub(crate) fn check_echo(target: &LoadTarget) -> Result<()> {
    block_on(async {
        let connection = Connection::open(&target.dialer).await?;
        match connection.echo().echo(EchoRequest::default()).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::Unimplemented => bail!(
                "the server has no echo service; start it with --echo (or echo = true in its \
                 file), for measurements only"
            ),
            Err(status) => Err(status).context("the echo service does not answer"),
        }
    })
}

/// Appends to the log that will be read until it has the requested records, and flushes them.
pub(crate) fn fill(target: &LoadTarget, spec: &Spec) -> Result<()> {
    block_on(async {
        let connection = Connection::open(&target.dialer).await?;
        let mut wal = connection.wal();
        let log = spec.log(0);
        let mut tail = tail(&connection, &log).await?;
        if tail < spec.filled {
            say(&format!("filling {log}: {} records", spec.filled - tail));
        }
        let records = match spec.work {
            LoadKind::Read => READ_RECORDS,
            _ => RECORDS,
        };
        let most = (BYTES / u64::from(spec.record_bytes).max(1)).clamp(1, records);
        while tail < spec.filled {
            let records = most.min(spec.filled - tail);
            let spec = Spec {
                batch: u32::try_from(records)?,
                durability: crate::spec::Level::Written,
                ..spec.clone()
            };
            let batch = Load::new(&spec, std::time::Instant::now()).batch(0);
            wal.append_batch(batch).await?;
            tail += records;
        }
        wal.sync(proto::SyncRequest::default()).await?;
        Ok(())
    })
}

/// The log's tail; 0 if there is no such log.
async fn tail(connection: &Connection, log: &str) -> Result<u64, Status> {
    let request = proto::GetTailRequest {
        log: log.to_owned(),
        visibility: proto::Visibility::Written as i32,
        ..proto::GetTailRequest::default()
    };
    match connection.wal().get_tail(request).await {
        Ok(answer) => Ok(answer.into_inner().tail_lsn()),
        Err(status) if status.code() == Code::NotFound => Ok(0),
        Err(status) => Err(status),
    }
}
