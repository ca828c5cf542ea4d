//! Detects that the data directory disappears while the engine serves it.
//!
//! ```text
//! rm -rf DATA             the open files have no name any more; writes still succeed
//! mv DATA away, mkdir     the names belong to another directory, writes go to the old one
//! mount another volume    the names belong to another volume, writes go to the old one
//! ```
//!
//! In all three cases every append would still be acknowledged, and no later start would find the
//! records. A thread therefore compares names and open files once a second: LOCK and the segment
//! in use must still have their names, and FORMAT must exist. It looks names up by the full path
//! of the data directory, because a directory that is held open stays the old one.
//!
//! Only two findings count: a name that is missing, and a name that belongs to another file. The
//! process holds LOCK and the segment open, so their identities are stable on every file system.
//! Other errors are ignored. Two checks in a row must fail before the journal fails, which takes
//! 1 to 2 seconds.

use std::io;
use std::time::Duration;

use super::Core;
use crate::api::pace::Control;
use crate::disk::FileIdentity;
use crate::disk::directory::{FORMAT, LOCK};

/// Pause between two checks.
const PAUSE: Duration = Duration::from_secs(1);

/// The action that the journal's failure names.
const GUARDING: &str = "checking the data directory";

impl Core {
    /// Checks the data directory until `control` stops it or the journal has failed. Each check
    /// also reads the clocks, so that an idle store reports a jump of the system's clock. It also ends
    /// backups that no caller reads.
    pub(crate) fn guard(&self, control: &Control) {
        let mut before = None;
        while !control.is_stopped() && self.journal.failure().is_none() {
            self.journal.expiry_now();
            self.held_files.end_unread(self.journal.clock.monotonic());
            before = self.check_directory(before);
            control.wait(PAUSE);
        }
        // Another thread may fail the journal first, with an error that does not name the cause.
        if self.journal.failure().is_some()
            && let Some(finding) = self.finding()
        {
            tracing::error!(finding, "the data directory is not the one that was opened");
        }
    }

    /// Checks once and returns the finding; `before` is the finding of the check before. Fails
    /// the journal if both have one.
    fn check_directory(&self, before: Option<String>) -> Option<String> {
        let found = self.finding();
        if let (Some(found), Some(_)) = (&found, before) {
            let error = io::Error::new(io::ErrorKind::NotFound, found.clone());
            self.journal.fail(GUARDING, &error);
        }
        found
    }

    /// Describes the difference if the directory is not the one that was opened.
    fn finding(&self) -> Option<String> {
        let segment = self.journal.current();
        let held = |path: &str, identity: io::Result<FileIdentity>| {
            let held = identity.ok()?;
            match self.disk.identity(path) {
                Err(error) if is_missing(&error) => Some(format!("{path} is missing")),
                Ok(named) if named != held => {
                    Some(format!("{path} is another file than the one in use"))
                }
                _ => None,
            }
        };
        let missing = |path: &str| match self.disk.identity(path) {
            Err(error) if is_missing(&error) => Some(format!("{path} is missing")),
            _ => None,
        };
        let found = held(LOCK, self.lock.identity())
            .or_else(|| missing(FORMAT))
            .or_else(|| {
                // The sorter may remove a finished segment, which has no writer any more.
                let file = segment.writer()?;
                held(&segment.path(), file.identity())
            })?;
        Some(format!(
            "{found} in {}: the directory was deleted or replaced, or another volume is mounted \
             there; new records would be lost",
            self.disk.location()
        ))
    }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}
