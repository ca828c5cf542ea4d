//! `walctl backup`: the store of a server, saved to a directory of backups or to a bucket.

#[cfg(feature = "object")]
mod bucket;
mod directory;
mod place;
mod private;
mod shelf;

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use serde_json::json;
use wald_client::Client;
use wald_client::proto::{BackupManifest, Finding, backup_response::Part};

use self::shelf::{FoundBackups, KeptBackup, Shelf, hex};
use crate::args::{BackupArgs, BackupCommand, BucketArgs};
use crate::exit::{Damaged, ExitKind, Usage};
use crate::output::{Out, Output, rfc3339, say};
use crate::parse;
use crate::table::Table;

pub(crate) async fn run(client: &Client, args: BackupArgs, output: Output) -> Result<ExitKind> {
    let bucket = &args.bucket;
    match (args.command, args.dir) {
        (Some(BackupCommand::List { dir }), _) => list(&dir, bucket, output).await,
        (Some(BackupCommand::Prune { dir, keep }), _) => prune(&dir, bucket, keep, output).await,
        (None, Some(dir)) => {
            if let Some(meant) = misspelt(&dir) {
                return Err(Usage(format!(
                    "{0} is no directory, and looks like `{meant}`; write ./{0} for a new \
                     directory of that name",
                    dir.display()
                ))
                .into());
            }
            parse::warn_of_slow(args.max_bytes_per_second);
            let asked = (args.keep, args.max_bytes_per_second);
            let mut shelf = Shelf::open(&dir, bucket).await?;
            let done = backup(client, &mut shelf, asked, output).await;
            // A failure of the backup counts more than one of the release.
            let closed = shelf.close().await;
            done.and_then(|exit| closed.map(|()| exit))
        }
        (None, None) => {
            Err(Usage("the directory or bucket is missing: walctl backup DIR".to_owned()).into())
        }
    }
}

/// The command that the name of a new directory was probably meant to be.
fn misspelt(dir: &Path) -> Option<&'static str> {
    let name = dir.to_str()?;
    if name.contains('/') || dir.exists() {
        return None;
    }
    [
        ("list", "walctl backup list"),
        ("prune", "walctl backup prune"),
        ("restore", "wald restore"),
        ("verify", "wald verify"),
    ]
    .into_iter()
    .find(|(word, _)| strsim::osa_distance(name, word) <= 2)
    .map(|(_, command)| command)
}

/// The result of a backup.
struct TakenBackup {
    kept: KeptBackup,
    sent_files: u64,
    sent_bytes: u64,
    took: Duration,
    removed: Vec<String>,
    /// Older ones were to be removed, and were not.
    spared: bool,
    /// Requests to the bucket.
    bucket: Option<serde_json::Value>,
}

async fn backup(
    client: &Client,
    shelf: &mut Shelf,
    (keep, max_bytes_per_second): (Option<u64>, u64),
    output: Output,
) -> Result<ExitKind> {
    let began = Instant::now();
    let stores: HashSet<String> = shelf
        .kept()
        .await?
        .warn()
        .kept
        .into_iter()
        .map(|kept| kept.manifest.store_id)
        .collect();
    let bar = ProgressBar::no_length().with_style(style("{spinner} {msg}  {elapsed}"));
    bar.set_message("the server reads its files");
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut parts = client.backup(shelf.known(), max_bytes_per_second).await?;
    let Some(Part::ManifestFile(bytes)) = parts.next().await? else {
        bail!(
            "the server sends no manifest file: it is older than this walctl, so upgrade it first"
        );
    };
    let file = wald_proto::backup::decode(&bytes);
    let file = file.context("the server sends a manifest that cannot be read")?;
    // A backup that cannot be restored is refused.
    if let Err(what) = file.check() {
        bail!("the server sends a manifest that is none of a store: {what}");
    }
    let manifest = file.manifest;
    if let Some(other) = stores.iter().find(|store| **store != manifest.store_id) {
        bail!(
            "{} has backups of store {other}, not of {}; use a directory for each store",
            shelf.name(),
            manifest.store_id
        );
    }
    let mut intake = ContentIntake::new(shelf, &manifest).await?;
    bar.set_style(style(
        "{wide_bar} {percent:>3}%  {bytes} of {total_bytes}  {binary_bytes_per_sec}  {eta} left",
    ));
    bar.set_length(intake.expected);
    bar.reset_eta();
    while let Some(part) = parts.next().await? {
        let Part::Chunk(chunk) = part else {
            bail!("the server sends a second manifest");
        };
        intake.take(chunk.file, chunk.offset, &chunk.data).await?;
        bar.set_position(intake.received);
    }
    intake.end().await?;
    let (sent_files, sent_bytes) = (intake.files, intake.received);
    let kept = shelf.keep(bytes).await?;
    // Backups that are whole do not go for one that is not.
    let is_whole = kept.manifest.findings.is_empty();
    let (removed, _) = match keep {
        Some(keep) if is_whole => shelf.prune(keep, Some(&kept.id)).await?,
        _ => (Vec::new(), 0),
    };
    bar.finish_and_clear();
    let taken = TakenBackup {
        kept,
        sent_files,
        sent_bytes,
        took: began.elapsed(),
        removed,
        spared: keep.is_some() && !is_whole,
        bucket: shelf.requests(),
    };
    tell(&taken, output)
}

/// Content on its way in, in the order of the manifest.
struct ContentIntake<'a> {
    shelf: &'a mut Shelf,
    manifest: &'a BackupManifest,
    /// Index of the current file, and whether a part of it may be there.
    at: usize,
    receives: bool,
    files: u64,
    received: u64,
    expected: u64,
}

impl<'a> ContentIntake<'a> {
    async fn new(shelf: &'a mut Shelf, manifest: &'a BackupManifest) -> Result<Self> {
        let mut expected = 0;
        for file in &manifest.files {
            if !file.known {
                expected = u64::saturating_add(expected, file.file_bytes);
                continue;
            }
            let found = shelf.content_bytes(&file.digest);
            if found != Some(file.file_bytes) {
                if found.is_some() {
                    shelf.forget(&file.digest).await?;
                }
                bail!(
                    "the content {} of {} was cut off or removed; it is not counted on any more, run \
                     the backup again",
                    hex(&file.digest),
                    file.path
                );
            }
        }
        Ok(Self {
            shelf,
            manifest,
            at: 0,
            receives: false,
            files: 0,
            received: 0,
            expected,
        })
    }

    async fn take(&mut self, file: u32, offset: u64, data: &[u8]) -> Result<()> {
        let file = usize::try_from(file).unwrap_or(usize::MAX);
        self.go_to(file).await?;
        if !self.receives {
            bail!("the server sends content that its manifest does not have, or that is here");
        }
        self.shelf.take(offset, data).await?;
        self.received += data.len() as u64;
        Ok(())
    }

    /// Ends the files before, and begins this one.
    async fn go_to(&mut self, file: usize) -> Result<()> {
        loop {
            let here = self.manifest.files.get(self.at).filter(|f| !f.known);
            if let Some(here) = here
                && !self.receives
            {
                self.shelf.begin(&here.digest, here.file_bytes).await?;
                self.receives = true;
                self.files += 1;
            }
            if self.at >= file.min(self.manifest.files.len()) {
                return Ok(());
            }
            if std::mem::take(&mut self.receives) {
                self.shelf.end().await?;
            }
            self.at += 1;
        }
    }

    async fn end(&mut self) -> Result<()> {
        self.go_to(self.manifest.files.len()).await
    }
}

fn tell(taken: &TakenBackup, output: Output) -> Result<ExitKind> {
    let manifest = &taken.kept.manifest;
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => {
            let mut value = as_json(&taken.kept);
            value["sent_files"] = taken.sent_files.into();
            value["sent_bytes"] = taken.sent_bytes.into();
            value["seconds"] = taken.took.as_secs_f64().into();
            value["removed"] = json!(taken.removed);
            if let Some(bucket) = &taken.bucket {
                value["bucket"] = bucket.clone();
            }
            out.json(&value)?;
        }
        Output::Text | Output::Raw | Output::Delimited => {
            out.line(&format!(
                "backup {} of position {}: {} in {} files, {} of it new, in {}{}",
                taken.kept.id,
                manifest.position.unwrap_or(0),
                HumanBytes(taken.kept.bytes()),
                manifest.files.len(),
                HumanBytes(taken.sent_bytes),
                HumanDuration(taken.took),
                match &taken.kept.signed_by {
                    Some(key) => format!(", signed by {key}"),
                    None => String::new(),
                },
            ))?;
            for removed in &taken.removed {
                out.line(&format!("removed backup {removed}"))?;
            }
        }
    }
    out.flush()?;
    for finding in &manifest.findings {
        say(&format!("the store is damaged: {}", sentence(finding)));
    }
    if taken.spared {
        say(
            "no older backup was removed, since they may hold records that this one lost; `walctl \
             backup prune` removes them",
        );
    }
    Ok(match manifest.findings.is_empty() {
        true => ExitKind::Ok,
        false => ExitKind::DataLoss,
    })
}

fn sentence(finding: &Finding) -> String {
    match finding.segment_id {
        Some(segment) => format!("segment {segment:016x}: {}", finding.detail),
        None => finding.detail.clone(),
    }
}

fn as_json(kept: &KeptBackup) -> serde_json::Value {
    let manifest = &kept.manifest;
    json!({
        "id": kept.id,
        "create_time": rfc3339(kept.create_time()),
        "store_id": manifest.store_id,
        "recovery_epoch": manifest.recovery_epoch,
        "position": manifest.position,
        "files": manifest.files.len(),
        "bytes": kept.bytes(),
        "signed_by": kept.signed_by,
        "findings": manifest.findings.iter().map(sentence).collect::<Vec<_>>(),
    })
}

async fn list(dir: &Path, bucket: &BucketArgs, output: Output) -> Result<ExitKind> {
    let shelf = Shelf::look(dir, bucket).await?;
    let FoundBackups { kept: all, bad } = shelf.kept().await?.warn();
    if let Some(bad) = bad.into_iter().next().filter(|_| all.is_empty()) {
        return Err(Damaged(bad).into());
    }
    let mut out = Out::new(output);
    match output {
        Output::Json => out.json(&all.iter().map(as_json).collect::<Vec<_>>())?,
        Output::Jsonl => {
            for kept in &all {
                out.json(&as_json(kept))?;
            }
        }
        Output::Text => out.line(&table(&all))?,
        Output::Raw | Output::Delimited => {
            for kept in &all {
                out.line(&kept.id)?;
            }
        }
    }
    out.flush()?;
    Ok(match all.is_empty() {
        true => ExitKind::NotFound,
        false => ExitKind::Ok,
    })
}

fn table(all: &[KeptBackup]) -> String {
    let mut table = Table::with_header([
        "BACKUP", "TIME", "POSITION", "EPOCH", "FILES", "SIZE", "DAMAGE",
    ]);
    for kept in all {
        let manifest = &kept.manifest;
        table.row([
            kept.id.clone(),
            rfc3339(kept.create_time()),
            manifest.position.unwrap_or(0).to_string(),
            manifest.recovery_epoch.to_string(),
            manifest.files.len().to_string(),
            HumanBytes(kept.bytes()).to_string(),
            manifest.findings.len().to_string(),
        ]);
    }
    table.right(2..7);
    table.text()
}

async fn prune(dir: &Path, bucket: &BucketArgs, keep: u64, output: Output) -> Result<ExitKind> {
    // To look first: pruning makes no directory.
    drop(Shelf::look(dir, bucket).await?);
    let shelf = Shelf::open(dir, bucket).await?;
    drop(shelf.kept().await?.warn());
    let pruned = shelf.prune(keep, None).await;
    let closed = shelf.close().await;
    let (removed, freed) = pruned?;
    closed?;
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => {
            out.json(&json!({ "removed": removed, "freed_bytes": freed }))?;
        }
        Output::Text | Output::Raw | Output::Delimited => {
            for id in &removed {
                out.line(&format!("removed backup {id}"))?;
            }
            out.line(&format!("freed {}", HumanBytes(freed)))?;
        }
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
