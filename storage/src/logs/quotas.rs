//! Bounds on the totals of all logs together: logs, producers, cursors, bytes of their names. All of these
//! stay in memory, so without a bound one client fills it.
//!
//! The committer counts and checks in one step, before it gives a batch its lsns. A batch that
//! makes several logs passes as a whole or not at all. A store that exceeds a bound (the setting
//! was lowered) opens and serves; only new logs, producers and cursors are refused.
//!
//! The same step refuses new names with characters that people do not see: two logs would look
//! alike, or a name would read backwards. Existing names stay usable.

pub(crate) mod tenants;

use wald_text::shown::{is_invisible, is_odd_blank};

use super::extras::Extras;
use crate::api::config::Bounds;
use crate::api::error::{AppendError, Bounded, Named};
use crate::base::ids::{LogName, Name};

/// Deleted logs that may wait for the sorter beyond `max_logs`: 1/4 of `max_logs`, and 1,024.
const WAITING_PART: u64 = 4;
const WAITING_LEAST: u64 = 1024;

impl Bounds {
    /// Maximum logs and bytes of names, with deleted logs. Deleted logs stay in memory for a while, so logs
    /// that come and go need a bound, too.
    fn with_deleted(&self) -> (u64, u64) {
        let with_deleted = |limit: u64| {
            let slack = limit / WAITING_PART;
            limit.saturating_add(slack).saturating_add(WAITING_LEAST)
        };
        let name_bytes = with_deleted(self.name_bytes).saturating_add(
            WAITING_LEAST.saturating_mul(crate::base::ids::MAX_LOG_NAME_BYTES as u64),
        );
        (with_deleted(self.logs), name_bytes)
    }

    /// Whether deleted logs have more than half of the room that other logs leave them. Then the sorter
    /// forgets them even if it has little to sort: otherwise it would wait for data that is refused.
    pub(crate) fn is_crowded(&self, there: &Holdings) -> bool {
        let (logs, name_bytes) = self.with_deleted();
        let crowded =
            |deleted: u64, others: u64, limit: u64| deleted > limit.saturating_sub(others) / 2;
        crowded(there.deleted, there.logs, logs)
            || crowded(there.deleted_name_bytes, there.name_bytes, name_bytes)
    }

    /// The error that refuses a request with these additions and the first log `log`. `None` if it fits.
    pub(crate) fn refuse(
        &self,
        there: &Holdings,
        wanted: &QuotaRequest,
        log: &LogName,
    ) -> Option<AppendError> {
        if let Some((what, name, character)) = &wanted.invisible
            && !self.allow_invisible_names
        {
            return Some(AppendError::InvisibleName {
                log: log.clone(),
                what: *what,
                name: name.as_str().into(),
                character: *character,
            });
        }
        let (logs_with_deleted, name_bytes_with_deleted) = self.with_deleted();
        let bounds = [
            (Bounded::Logs, wanted.logs, there.logs, self.logs),
            (
                Bounded::DeletedLogs,
                wanted.logs,
                there.logs.saturating_add(there.deleted),
                logs_with_deleted,
            ),
            (
                Bounded::Producers,
                wanted.producers,
                there.producers,
                self.producers,
            ),
            (
                Bounded::Cursors,
                wanted.cursors,
                there.cursors,
                self.cursors,
            ),
            (
                Bounded::NameBytes,
                wanted.name_bytes,
                there.name_bytes,
                self.name_bytes,
            ),
            (
                Bounded::DeletedNameBytes,
                wanted.name_bytes,
                there.name_bytes.saturating_add(there.deleted_name_bytes),
                name_bytes_with_deleted,
            ),
        ];
        bounds
            .into_iter()
            .find(|(_, more, used, limit)| *more > 0 && used.saturating_add(*more) > *limit)
            .map(|(what, _, used, limit)| AppendError::Quota {
                log: log.clone(),
                what,
                used,
                limit,
                tenant: None,
            })
    }
}

/// Totals of all logs together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    /// Logs with a name.
    pub(crate) logs: u64,
    /// Deleted logs that the sorter has not forgotten yet.
    pub(crate) deleted: u64,
    pub(crate) producers: u64,
    /// Producers of the log that has the most.
    pub(crate) producers_of_log: u64,
    pub(crate) cursors: u64,
    /// Forgotten producers whose ids are remembered.
    pub(crate) gone: u64,
    /// Bytes of all names, without the names of deleted logs.
    pub(crate) name_bytes: u64,
    /// Bytes of the names of deleted logs.
    pub(crate) deleted_name_bytes: u64,
}

/// Additions of a request to the totals.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct QuotaRequest {
    logs: u64,
    producers: u64,
    cursors: u64,
    name_bytes: u64,
    /// The first new name with a character that people do not see, and that character.
    invisible: Option<(Named, String, char)>,
}

impl QuotaRequest {
    pub(crate) fn log(name: &LogName) -> Self {
        let mut wanted = Self::default();
        wanted.add_log(name);
        wanted
    }

    pub(crate) fn add_log(&mut self, name: &LogName) {
        self.logs += 1;
        self.add_name(Named::Log, name.as_str());
    }

    pub(crate) fn add_producer(&mut self, id: &Name) {
        self.producers += 1;
        self.add_name(Named::Producer, id.as_str());
    }

    pub(crate) fn add_cursor(&mut self, name: &Name) {
        self.cursors += 1;
        self.add_name(Named::Cursor, name.as_str());
    }

    fn add_name(&mut self, what: Named, name: &str) {
        self.name_bytes += name.len() as u64;
        if self.invisible.is_none() && !name.is_ascii() {
            let unseen = |c: &char| is_invisible(*c) || is_odd_blank(*c);
            let found = name.chars().find(unseen);
            self.invisible = found.map(|character| (what, name.to_owned(), character));
        }
    }

    /// Whether it adds anything.
    pub(crate) fn is_something(&self) -> bool {
        *self != Self::default()
    }
}

/// Producers and cursors of one log, and the bytes of their names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LogUsage {
    pub(crate) producers: u64,
    /// Forgotten producers whose ids are remembered.
    pub(crate) gone: u64,
    pub(crate) cursors: u64,
    pub(crate) name_bytes: u64,
}

impl LogUsage {
    pub(crate) fn of(extras: Option<&Extras>) -> Self {
        let Some(extras) = extras else {
            return Self::default();
        };
        let mut load = extras.cursor_load();
        load.producers = extras.producers.len();
        load.gone = extras.producers.gone();
        load.name_bytes += extras.producers.id_bytes();
        load
    }

    pub(crate) fn producer(id: &Name) -> Self {
        Self {
            producers: 1,
            name_bytes: id.as_str().len() as u64,
            ..Self::default()
        }
    }

    pub(crate) fn gone(gone: u64) -> Self {
        Self {
            gone,
            ..Self::default()
        }
    }

    pub(crate) fn cursor(name: &Name) -> Self {
        Self {
            cursors: 1,
            name_bytes: name.as_str().len() as u64,
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.producers += more.producers;
        self.gone += more.gone;
        self.cursors += more.cursors;
        self.name_bytes += more.name_bytes;
    }

    pub(crate) fn take(&mut self, less: Self) {
        self.producers = self.producers.saturating_sub(less.producers);
        self.gone = self.gone.saturating_sub(less.gone);
        self.cursors = self.cursors.saturating_sub(less.cursors);
        self.name_bytes = self.name_bytes.saturating_sub(less.name_bytes);
    }
}
