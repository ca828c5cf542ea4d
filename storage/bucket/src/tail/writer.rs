//! One row at a time: written, flushed, and only then the next. A row that was on its way when its caller gave up goes
//! on, and the next call waits for it. Memory therefore holds at most one row that is not in the write-ahead log.

use std::sync::PoisonError;

use bytes::Bytes;
use slatedb::Db;
use slatedb::config::{FlushOptions, FlushType};
use tokio::sync::Mutex;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, timeout_at};

use super::error::{TailError, TailErrorKind};
use super::settings::{PUT_TIMEOUT, ROWS_PER_FILE};

type RowResult = Result<(), slatedb::Error>;

#[derive(Debug)]
struct UnstoredRow {
    key: Bytes,
    value: Bytes,
    stored: JoinHandle<RowResult>,
}

#[derive(Debug, Default)]
struct RowTurn {
    row: Option<UnstoredRow>,
    /// Number of rows since the memtable was last written as a file.
    rows: u32,
}

pub(super) struct Writer {
    db: Db,
    place: String,
    turn: Mutex<RowTurn>,
    /// The newest write of the memtable as a file.
    file: std::sync::Mutex<Option<JoinHandle<RowResult>>>,
}

impl Writer {
    pub(super) fn new(db: Db, place: &str) -> Self {
        Self {
            db,
            place: place.to_owned(),
            turn: Mutex::default(),
            file: std::sync::Mutex::default(),
        }
    }

    /// Stores a row. It is in the bucket when this returns `Ok`.
    pub(super) async fn store(&self, key: Bytes, value: Bytes) -> Result<(), TailError> {
        let deadline = Instant::now() + PUT_TIMEOUT;
        let late = |_| TailError::late(&self.place, "store a row");
        let mut turn = timeout_at(deadline, self.turn.lock()).await.map_err(late)?;
        if let Some(before) = &mut turn.row {
            let stored = timeout_at(deadline, &mut before.stored)
                .await
                .map_err(late)?;
            let same = before.key == key && before.value == value;
            turn.row = None;
            self.ended(stored)?;
            if same {
                return Ok(());
            }
        }
        let db = self.db.clone();
        let (row_key, row) = (key.clone(), value.clone());
        let stored = tokio::spawn(async move {
            db.put_bytes(row_key, row).await?;
            let flush_type = FlushType::Wal;
            db.flush_with_options(FlushOptions { flush_type }).await
        });
        turn.rows += 1;
        if turn.rows >= ROWS_PER_FILE {
            turn.rows = 0;
            self.file_soon();
        }
        let row = turn.row.insert(UnstoredRow { key, value, stored });
        let stored = timeout_at(deadline, &mut row.stored).await.map_err(late)?;
        turn.row = None;
        self.ended(stored)
    }

    /// Lets the memtable be written as a file. One file at a time: the bytes that wait meanwhile have their bound in the
    /// database.
    pub(super) fn file_soon(&self) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.as_ref().is_some_and(|file| !file.is_finished()) {
            return;
        }
        let db = self.db.clone();
        *file = Some(tokio::spawn(async move {
            let flush_type = FlushType::MemTable;
            db.flush_with_options(FlushOptions { flush_type }).await
        }));
    }

    fn ended(&self, stored: Result<RowResult, JoinError>) -> Result<(), TailError> {
        let action = "store a row";
        match stored {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                let closed = self.db.status().close_reason;
                Err(TailError::of(&self.place, action, &error, closed))
            }
            Err(error) => {
                let what = format!("cannot {action}: {error}");
                Err(TailError::new(TailErrorKind::Stopped, &self.place, what))
            }
        }
    }
}
