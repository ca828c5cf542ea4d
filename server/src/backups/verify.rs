//! `wald verify` on a directory or bucket of backups, or on the replica in a bucket: checks all content against its digest,
//! then runs the checks of a start. Nothing is restored.

use std::path::Path;

use indicatif::{HumanBytes, HumanCount};
use serde_json::json;
use wald_storage::StorageConfig;

use super::keys::{signature, signed_in_words};
#[cfg(feature = "object")]
use super::restore::unfetched;
use super::{BackupShelf, DATA_LOSS, bar, choose, failed, print, tell_damage, view};
use crate::config::Config;
use crate::offline::say;
#[cfg(feature = "object")]
use crate::replica::fetch::{Fetch, FetchError};
use crate::serve::Exit;

/// Verifies one backup. Returns the exit code: 5 if anything in it is bad.
pub(crate) fn verify(place: &Path, config: &Config, id: &str, json: bool) -> Result<u8, Exit> {
    let shelf = BackupShelf::open(place, config)?;
    let kept = choose(&shelf, id)?;
    let view = view(&shelf, &kept, None)?;
    let bar = bar(view.bytes());
    bar.set_message("verifying");
    let check = view.verify(&StorageConfig::default(), &mut |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let check = check.map_err(|error| failed(&error))?;
    tell_damage(&kept.manifest);
    for (path, what) in &check.bad_files {
        say(&format!("{path}: {what}"));
    }
    if !check.bad_files.is_empty() {
        say(&format!(
            "while the store is there, delete each files/... named above from {}: the next \
             backup sends it again; as long as it is there, every backup counts on it",
            shelf.location()
        ));
    }
    let report = check.report.as_ref();
    for finding in report.iter().flat_map(|report| &report.findings) {
        say(&finding.to_string());
    }
    let whole = check.bad_files.is_empty()
        && kept.manifest.damage.is_empty()
        && report.is_some_and(|report| report.findings.is_empty() && report.damage.is_empty());
    let (logs, records) = report.map_or((0, 0), |report| (report.logs, report.records));
    let line = match json {
        true => json!({
            "backup": kept.id,
            "position": kept.manifest.position.get(),
            "files": check.files,
            "checked_bytes": check.bytes,
            "logs": report.map(|report| report.logs),
            "records": report.map(|report| report.records),
            "bad_files": check.bad_files,
            "damage": kept.manifest.damage.len(),
            "whole": whole,
            "signature": signature(&kept.manifest, &shelf.trusted),
        })
        .to_string(),
        false => format!(
            "backup {}, position {}: {} files, {} checked, {} records of {} logs: {}{}",
            kept.id,
            kept.manifest.position,
            check.files,
            HumanBytes(check.bytes),
            HumanCount(records),
            HumanCount(logs),
            match (whole, check.bad_files.len()) {
                (true, _) => "nothing is wrong".to_owned(),
                (false, 0) => "it has the damage that the store had".to_owned(),
                (false, bad) => format!("{bad} files are bad; delete them and take another backup"),
            },
            signed_in_words(&kept.manifest, &shelf.trusted),
        ),
    };
    print(&line)?;
    Ok(if whole { 0 } else { DATA_LOSS })
}

/// Verifies the replica in a bucket. Returns the exit code: 5 if anything in it is bad. `None` if the bucket has none.
#[cfg(feature = "object")]
pub(crate) fn verify_replica(
    place: &Path,
    config: &Config,
    json: bool,
) -> Result<Option<u8>, Exit> {
    let Some(remote) = super::replica_at(place, config)? else {
        return Ok(None);
    };
    let place = remote.bucket.place().to_owned();
    let unread = |error: FetchError| unfetched(&error);
    let mut fetch = Fetch::begin(&remote, config, None).map_err(unread)?;
    let bar = bar(fetch.bytes());
    bar.set_message("verifying");
    let progress = &mut |bytes| bar.inc(bytes);
    let repeats = &mut |_: &FetchError| bar.reset();
    let check = fetch.verify(progress, repeats);
    bar.finish_and_clear();
    let check = check.map_err(unread)?;
    let damage = fetch.manifest().map_or(0, |manifest| {
        tell_damage(manifest);
        manifest.damage.len()
    });
    for (path, object, what) in &check.bad_files {
        say(&format!("{path} ({object}): {what}"));
    }
    if !check.bad_files.is_empty() {
        say(&format!(
            "while the store is there, delete each object named above from {place} and restart the daemon: it sends \
             the content again with its next manifest"
        ));
    }
    if let Err(what) = &check.rows {
        say(what);
    }
    let report = check.report.as_ref();
    for finding in report.iter().flat_map(|report| &report.findings) {
        say(&finding.to_string());
    }
    let rows = check.rows.as_ref().ok();
    let sound = report.is_none_or(|report| report.findings.is_empty() && report.damage.is_empty());
    let whole = check.bad_files.is_empty() && rows.is_some() && damage == 0 && sound;
    let (logs, records) = report.map_or((0, 0), |report| (report.logs, report.records));
    let line = match json {
        true => json!({
            "replica": place,
            "position": rows.map(|rows| rows.position.get()),
            "files": check.files,
            "checked_bytes": check.bytes,
            "row_bytes": rows.map(|rows| rows.bytes),
            "logs": report.map(|report| report.logs),
            "records": report.map(|report| report.records),
            "bad_files": check.bad_files,
            "damage": damage,
            "whole": whole,
            "signature": fetch.manifest().map(|manifest| signature(manifest, &remote.trusted)),
        })
        .to_string(),
        false => format!(
            "replica {place}, position {}: {} files, {} checked, {} records of {} logs; {}: {}{}",
            rows.map_or("unknown".to_owned(), |rows| rows.position.to_string()),
            check.files,
            HumanBytes(check.bytes),
            HumanCount(records),
            HumanCount(logs),
            match fetch.is_without_rows() {
                true => "the rows behind them were not read, because no key signs them".to_owned(),
                false => {
                    let bytes = rows.map_or(0, |rows| rows.bytes);
                    format!("behind them {} of rows", HumanBytes(bytes))
                }
            },
            match (whole, check.bad_files.len()) {
                (true, _) => "nothing is wrong".to_owned(),
                (false, 0) if rows.is_none() => "rows are missing or damaged".to_owned(),
                (false, 0) => "it has the damage that the store had".to_owned(),
                (false, bad) => format!("{bad} files are bad"),
            },
            (fetch.manifest()).map_or_else(String::new, |manifest| signed_in_words(
                manifest,
                &remote.trusted
            )),
        ),
    };
    print(&line)?;
    Ok(Some(if whole { 0 } else { DATA_LOSS }))
}
