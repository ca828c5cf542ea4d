//! Named cursors: positions at which the consumers of a log continue after a restart.

use std::time::{Duration, SystemTime};

use wald_proto::v1;

use crate::client::Client;
use crate::error::Error;
use crate::lsn::Lsn;
use crate::ops::call;
use crate::retry::Repeat;

/// A wish to move a named cursor of a log, or to make it.
#[derive(Debug, Clone, PartialEq)]
pub struct CursorCommit(v1::CursorCommit);

impl CursorCommit {
    /// Moves the cursor to `lsn`, the next to read: all below it is done.
    pub fn new(log: impl Into<String>, cursor: impl Into<String>, lsn: impl Into<Lsn>) -> Self {
        Self(v1::CursorCommit {
            log: log.into(),
            cursor: cursor.into(),
            lsn: lsn.into().get(),
            ..Default::default()
        })
    }

    /// The position that the cursor must have now, or POSITION_MISMATCH; 0 also matches a
    /// cursor that does not exist yet.
    pub fn expected_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.0.expected_lsn = Some(lsn.into().get());
        self
    }

    /// The log must have this number, or LOG_REPLACED.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.0.log_id = Some(log_id);
        self
    }

    /// Whether a repeat cannot be applied a second time.
    pub(crate) fn guards(&self) -> bool {
        self.0
            .expected_lsn
            .is_some_and(|expected| expected != self.0.lsn)
    }

    pub(crate) fn into_proto(self) -> v1::CursorCommit {
        self.0
    }
}

/// A named cursor as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedCursor {
    /// Its name within the log.
    pub name: String,
    /// The next lsn to read.
    pub lsn: Lsn,
    /// The log's number, unique for ever.
    pub log_id: u64,
    /// Time of the last move.
    pub update_time: Option<SystemTime>,
}

/// A page of a log's cursors.
#[derive(Debug, Clone, PartialEq)]
pub struct CursorPage {
    /// The cursors, by name.
    pub cursors: Vec<NamedCursor>,
    /// Asks for the next page. None: this was the last.
    pub next_page_token: Option<String>,
}

impl NamedCursor {
    fn from_proto(cursor: Option<v1::Cursor>) -> Result<Self, Error> {
        let cursor = cursor.ok_or(Error::contract("cursor"))?;
        Ok(Self {
            lsn: cursor.lsn.ok_or(Error::contract("Cursor.lsn"))?.into(),
            name: cursor.name,
            log_id: cursor.log_id,
            update_time: cursor.update_time.and_then(|time| {
                let seconds = u64::try_from(time.seconds).ok()?;
                let nanos = u32::try_from(time.nanos).ok()?;
                Some(SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos))
            }),
        })
    }
}

impl Client {
    /// Moves a cursor, or makes it, durably. Inside a batch:
    /// [`AppendBatch::cursor`](crate::AppendBatch::cursor).
    ///
    /// # Errors
    /// POSITION_MISMATCH, LOG_NOT_FOUND, LOG_REPLACED, BEYOND_TAIL, INVALID_CURSOR_NAME, QUOTA,
    /// and the errors of every call.
    pub async fn commit_cursor(&self, commit: CursorCommit) -> Result<NamedCursor, Error> {
        let repeat = match commit.guards() {
            true => Repeat::Guarded,
            // A late repeat would undo another client's commit in between.
            false => Repeat::Harmful,
        };
        let request = v1::CommitCursorRequest {
            commit: Some(commit.into_proto()),
        };
        let answer = call!(self, cursor_service.commit_cursor, repeat, request)?;
        NamedCursor::from_proto(answer.cursor)
    }

    /// Returns the position of a cursor. With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, CURSOR_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn get_cursor(
        &self,
        log: impl Into<String>,
        cursor: impl Into<String>,
        log_id: Option<u64>,
    ) -> Result<NamedCursor, Error> {
        let request = v1::GetCursorRequest {
            log: log.into(),
            cursor: cursor.into(),
            log_id,
        };
        let answer = call!(self, cursor_service.get_cursor, Repeat::Read, request)?;
        NamedCursor::from_proto(answer.cursor)
    }

    /// A page of the cursors of a log, by name. A `page_size` of 0 is the server's default
    /// (100); no token begins at the start. With a `log_id`, only if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, INVALID_PAGE_TOKEN, LOG_REPLACED, and the errors of every call.
    pub async fn list_cursors(
        &self,
        log: impl Into<String>,
        page_size: u32,
        page_token: Option<String>,
        log_id: Option<u64>,
    ) -> Result<CursorPage, Error> {
        let request = v1::ListCursorsRequest {
            page_size,
            page_token: page_token.unwrap_or_default(),
            log: log.into(),
            log_id,
        };
        let answer = call!(self, cursor_service.list_cursors, Repeat::Read, request)?;
        Ok(CursorPage {
            cursors: answer
                .cursors
                .into_iter()
                .map(|cursor| NamedCursor::from_proto(Some(cursor)))
                .collect::<Result<_, _>>()?,
            next_page_token: Some(answer.next_page_token).filter(|token| !token.is_empty()),
        })
    }

    /// Forgets a cursor, durably: retention no longer waits for it. With a `log_id`, only
    /// if it is that log.
    ///
    /// # Errors
    /// LOG_NOT_FOUND, CURSOR_NOT_FOUND, LOG_REPLACED, and the errors of every call.
    pub async fn delete_cursor(
        &self,
        log: impl Into<String>,
        cursor: impl Into<String>,
        log_id: Option<u64>,
    ) -> Result<(), Error> {
        let request = v1::DeleteCursorRequest {
            log: log.into(),
            cursor: cursor.into(),
            log_id,
        };
        call!(self, cursor_service.delete_cursor, Repeat::Harmful, request)?;
        Ok(())
    }
}
