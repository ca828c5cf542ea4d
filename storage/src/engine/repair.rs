//! Accepting losses that damage caused, so that a store can continue.
//!
//! Damage is reported, and requests that it puts in doubt are refused. A log whose newest records may
//! be lost takes no appends, since they might reuse lsns. Only a person can decide that this loss is
//! final. The files are not changed. The link of the next segment declares all earlier damage accepted,
//! and readers still see the ranges as gaps. The recovery epoch rises, so that clients can notice.

use std::fmt::Write;
use std::sync::Arc;

use crate::api::config::{OnDamage, StorageConfig};
use crate::api::error::OpenError;
use crate::api::record::LogInfo;
use crate::base::clock::{Clock, SystemClock};
use crate::base::ids::records_in_words;
use crate::base::metrics::NoObserver;
use crate::disk::directory;
use crate::disk::directory::{FormatFile, REPAIRS, REPAIRS_NEW};
use crate::disk::{Disk, read_whole};
use crate::engine::{Core, Start};
use crate::recovery::{self, Loss, Purpose, RecoveryReport};
use crate::tools::verify::Offline;

/// Maximum number of entries of each kind that one acceptance writes to `REPAIRS`.
const LISTED: usize = 10_000;

/// Maximum bytes of entries before the newest one that `REPAIRS` keeps.
const EARLIER_BYTES: usize = 1 << 20;

/// Words at the start of a line that begin an entry of `REPAIRS`.
const ENTRY: &str = "loss accepted ";

/// Returns the losses of a store. Changes nothing.
///
/// # Errors
/// If a process holds the store, or if the store cannot be read.
pub fn examine(disk: &Arc<dyn Disk>, config: &StorageConfig) -> Result<Loss, OpenError> {
    let offline = Offline::open(Arc::clone(disk))?;
    let seams = (&SystemClock as &dyn Clock, &NoObserver as _);
    let found = recovery::recover_from_frames(disk, offline.store, config, seams, Purpose::Look)?;
    found.check_room()?;
    Ok(Loss {
        format: !matches!(offline.format, FormatFile::Good(_)),
        ..found.loss()
    })
}

/// Returns the logs of a store that no process holds, whose names begin with `prefix`, by name. Changes
/// nothing.
///
/// # Errors
/// If a process holds the store, or if the store cannot be read.
pub fn logs(
    disk: &Arc<dyn Disk>,
    config: &StorageConfig,
    prefix: &str,
) -> Result<Vec<LogInfo>, OpenError> {
    let offline = Offline::open(Arc::clone(disk))?;
    Ok(recovery::look(disk, offline.store, config)?.logs(prefix))
}

/// Accepts the losses of a store, and writes them to `REPAIRS`, with `by`: time and person. Afterwards
/// every log takes appends again. Returns the losses, and the report of the start that accepted them.
/// Without losses nothing is changed.
///
/// # Errors
/// As for [`examine`], or if the disk fails. A caller may repeat it.
pub fn accept_loss(
    disk: &Arc<dyn Disk>,
    config: &StorageConfig,
    clock: Arc<dyn Clock>,
    by: &str,
) -> Result<(Loss, Option<RecoveryReport>), OpenError> {
    let loss = examine(disk, config)?;
    if loss.is_empty() {
        return Ok((loss, None));
    }
    let fail = || OpenError::io(format!("writing {REPAIRS}"));
    let mut text = told(&loss, by);
    note(&**disk, &text).map_err(fail())?;
    if loss.format {
        let id = Offline::open(Arc::clone(disk))?.store_id();
        directory::write_format(&**disk, id, config.largest_body())?;
    }
    let config = StorageConfig {
        on_damage: OnDamage::Quarantine,
        ..config.clone()
    };
    let (disks, observer) = ((Arc::clone(disk), None), Arc::new(NoObserver));
    let (core, report) = Core::open_as(Start::AcceptLoss, disks, config, clock, observer)?;
    core.close_opened()?;
    text.clear();
    let epoch = report.recovery_epoch;
    let _ = writeln!(text, "  done: recovery epoch {epoch} began");
    note(&**disk, &text).map_err(fail())?;
    Ok((loss, Some(report)))
}

/// An entry of `REPAIRS`.
fn told(loss: &Loss, by: &str) -> String {
    let mut text = String::new();
    let version = env!("CARGO_PKG_VERSION");
    let _ = writeln!(text, "{ENTRY}{by}, wald {version}");
    for gap in loss.gaps.iter().take(LISTED) {
        let _ = match (&gap.log, gap.from, gap.to) {
            (Some(log), Some(from), Some(to)) => {
                let records = records_in_words(from, to);
                writeln!(text, "  lost: log {:?}, {records}", log.as_str())
            }
            _ => writeln!(text, "  lost: records that nothing attributes"),
        };
    }
    for log in loss.unproven.iter().take(LISTED) {
        let _ = writeln!(
            text,
            "  goes on although newer records may be lost: log {:?}",
            log.as_str()
        );
    }
    for log in loss.unnamed.iter().take(LISTED) {
        let _ = writeln!(
            text,
            "  has a new name: log {}, {:?}, with {} records ({} bytes)",
            log.log_id,
            log.name.as_str(),
            log.records,
            log.bytes
        );
    }
    for finding in loss.findings.iter().take(LISTED) {
        let _ = writeln!(text, "  found: {finding}");
    }
    let lists = [
        loss.gaps.len(),
        loss.unproven.len(),
        loss.unnamed.len(),
        loss.findings.len(),
    ];
    let more: usize = lists
        .iter()
        .map(|length| length.saturating_sub(LISTED))
        .sum();
    if more > 0 {
        let _ = writeln!(text, "  and {more} more");
    }
    if loss.format {
        let _ = writeln!(
            text,
            "  FORMAT written anew: the segments tell the store's id"
        );
    }
    text
}

/// Adds an entry to `REPAIRS` durably, completely or not at all. Removes the oldest entries if those
/// before the newest one exceed [`EARLIER_BYTES`].
fn note(disk: &dyn Disk, text: &str) -> std::io::Result<()> {
    let mut all = Vec::new();
    if disk.list("")?.iter().any(|name| name == REPAIRS) {
        all = read_whole(disk, REPAIRS)?;
    }
    all.extend_from_slice(text.as_bytes());
    directory::replace(disk, REPAIRS, REPAIRS_NEW, newest_entries(&all))
}

/// Returns the newest entry, and the entries before it that fit [`EARLIER_BYTES`]. The engine reads
/// none of them: links in the journal list the accepted losses.
fn newest_entries(all: &[u8]) -> &[u8] {
    let begins = |at: &usize| {
        let is_line = *at == 0 || all[*at - 1] == b'\n';
        is_line && all[*at..].starts_with(ENTRY.as_bytes())
    };
    let mut entries = (0..all.len()).rev().filter(begins);
    let Some(newest) = entries.next() else {
        return &all[all.len().saturating_sub(EARLIER_BYTES)..];
    };
    if newest <= EARLIER_BYTES {
        return all;
    }
    let fits = |at: &usize| newest - at <= EARLIER_BYTES;
    let first = entries.take_while(fits).last().unwrap_or(newest);
    &all[first..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    #[test]
    fn repairs_keep_the_newest_entry_and_a_bounded_number_of_earlier_ones() {
        let disk = SimDisk::new();
        let mut written = 0;
        for number in 0..200 {
            let list = "  lost: log \"a\", records 0 to 8\n".repeat(500);
            let text = format!("{ENTRY}by {number}\n{list}");
            note(&disk, &text).unwrap();
            let done = format!("  done: recovery epoch {number} began\n");
            note(&disk, &done).unwrap();
            written += text.len() + done.len();
            let kept = String::from_utf8(disk.contents(REPAIRS).unwrap()).unwrap();
            assert!(kept.starts_with(ENTRY) && kept.ends_with(&done));
            assert!(kept.len() <= EARLIER_BYTES + text.len() + done.len());
            let whole = kept.len() == written;
            assert_eq!(whole, written <= EARLIER_BYTES + text.len() + done.len());
        }
        // An entry that is larger than the bound stays, alone.
        let large = format!("{ENTRY}by all\n{}", "  lost\n".repeat(EARLIER_BYTES));
        note(&disk, &large).unwrap();
        let kept = disk.contents(REPAIRS).unwrap();
        assert!(kept.ends_with(large.as_bytes()) && kept.len() <= large.len() + EARLIER_BYTES);
        note(&disk, &format!("{ENTRY}again\n")).unwrap();
        assert_eq!(disk.contents(REPAIRS).unwrap(), b"loss accepted again\n");
    }
}
