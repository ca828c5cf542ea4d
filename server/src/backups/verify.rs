//! `wald verify` on a directory or bucket of backups: checks all content against its digest, then
//! runs the checks of a start. Nothing is restored.

use std::path::Path;

use indicatif::{HumanBytes, HumanCount};
use serde_json::json;
use wald_storage::StorageConfig;

use super::{BackupShelf, DATA_LOSS, bar, choose, failed, print, tell_damage, view};
use crate::config::Config;
use crate::offline::escaped;
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
        eprintln!("wald: {}: {}", escaped(path), escaped(&what.to_string()));
    }
    if !check.bad_files.is_empty() {
        eprintln!(
            "wald: while the store is there, delete each files/... named above from {}: the next \
             backup sends it again; as long as it is there, every backup counts on it",
            shelf.location()
        );
    }
    let report = check.report.as_ref();
    for finding in report.iter().flat_map(|report| &report.findings) {
        eprintln!("wald: {}", escaped(&finding.to_string()));
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
        })
        .to_string(),
        false => format!(
            "backup {}, position {}: {} files, {} checked, {} records of {} logs: {}",
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
        ),
    };
    print(&line)?;
    Ok(if whole { 0 } else { DATA_LOSS })
}
