//! One group of rows at a time: written, flushed, and only then the next. Rows that were on their way when their caller gave up
//! go on, and the next call waits for them. Memory therefore holds at most one group that is not in the write-ahead log. The
//! rows of a group are one object there, so that the tail has all of them or none.

use std::sync::PoisonError;

use bytes::Bytes;
use slatedb::config::{FlushOptions, FlushType};
use slatedb::{Db, WriteBatch};
use tokio::sync::Mutex;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, timeout_at};

use super::error::{TailError, TailErrorKind};
use super::settings::{PUT_TIMEOUT, ROWS_PER_FILE};

type RowResult = Result<(), slatedb::Error>;

/// Key and value.
type TailRow = (Bytes, Bytes);

#[derive(Debug)]
struct UnstoredRows {
    rows: Vec<TailRow>,
    stored: JoinHandle<RowResult>,
}

#[derive(Debug, Default)]
struct RowTurn {
    unstored: Option<UnstoredRows>,
    /// Number of objects of the write-ahead log since the memtable was last written as a file.
    objects: u32,
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

    /// Stores rows, together. They are in the bucket when this returns `Ok`.
    pub(super) async fn store(&self, rows: Vec<TailRow>) -> Result<(), TailError> {
        let deadline = Instant::now() + PUT_TIMEOUT;
        let late = |_| TailError::late(&self.place, "store a row");
        let mut turn = timeout_at(deadline, self.turn.lock()).await.map_err(late)?;
        if let Some(before) = &mut turn.unstored {
            let stored = timeout_at(deadline, &mut before.stored)
                .await
                .map_err(late)?;
            let same = before.rows == rows;
            turn.unstored = None;
            self.ended(stored)?;
            if same {
                return Ok(());
            }
        }
        let db = self.db.clone();
        let mut batch = WriteBatch::new();
        for (key, value) in &rows {
            batch.put_bytes(key.clone(), value.clone());
        }
        let stored = tokio::spawn(async move {
            db.write(batch).await?;
            let flush_type = FlushType::Wal;
            db.flush_with_options(FlushOptions { flush_type }).await
        });
        turn.objects += 1;
        if turn.objects >= ROWS_PER_FILE {
            turn.objects = 0;
            self.file_soon();
        }
        let unstored = turn.unstored.insert(UnstoredRows { rows, stored });
        let stored = timeout_at(deadline, &mut unstored.stored)
            .await
            .map_err(late)?;
        turn.unstored = None;
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
