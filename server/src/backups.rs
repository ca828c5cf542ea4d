//! `wald restore`, and `wald verify` on a directory or bucket of backups: checks the backups that
//! `walctl backup` wrote, and makes a store of one. `wald backup-key`: the keys of their signatures.

#[cfg(feature = "object")]
pub(crate) mod bucket;
mod key_command;
pub(crate) mod keys;
mod restore;
mod verify;

use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write};
use std::path::Path;
use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};
use indicatif::{ProgressBar, ProgressStyle};
use wald_proto::backup::{LARGEST_MANIFEST, MANIFEST_SUFFIX, MANIFESTS, OF_A_STORE};
use wald_storage::{
    BackupManifest, BackupView, Disk, OpenError, Position, RealDisk, RecoveryEpoch, RestoreError,
    Timestamp, records_in_words,
};

use crate::config::Config;
use crate::convert;
use crate::offline::{DATA_LOSS, FAILED, IN_USE, say, written};
use crate::reload::Fault;
use crate::serve::Exit;

use self::keys::TrustedKeys;
pub(crate) use key_command::{command as key_command, run as run_key_command};
pub(crate) use restore::{command as restore_command, restore};
pub(crate) use verify::verify;
#[cfg(feature = "object")]
pub(crate) use verify::verify_replica;

/// Exit codes as in walctl, in addition to the codes of all offline commands.
pub(crate) const USAGE: u8 = 2;
const NOT_FOUND: u8 = 3;

/// One backup of a directory.
pub(crate) struct StoredBackup {
    id: String,
    manifest: BackupManifest,
}

impl StoredBackup {
    /// The key that sorts the backups of a directory, as in `walctl`.
    fn order(&self) -> (RecoveryEpoch, Position, Timestamp, &str) {
        let manifest = &self.manifest;
        (
            manifest.recovery_epoch,
            manifest.position,
            manifest.created,
            &self.id,
        )
    }
}

/// Whether a place holds backups, and not a store: a URL, or a directory. A store that backups
/// were written into stays a store.
pub(crate) fn is_place_of_backups(place: &Path) -> bool {
    url(place).is_some() || (!is_store(place) && place.join(MANIFESTS).is_dir())
}

fn url(place: &Path) -> Option<&str> {
    place.to_str().filter(|place| wald_bucket::is_url(place))
}

/// Whether the operator names a backup: then a replica beside it does not count.
pub(crate) fn names_backup(matches: &ArgMatches) -> bool {
    matches.value_source("backup") == Some(ValueSource::CommandLine)
}

/// The bucket, if it has the replica of a store.
#[cfg(feature = "object")]
fn replica_at(place: &Path, config: &Config) -> Result<Option<Arc<bucket::Remote>>, Exit> {
    let Some(url) = url(place) else {
        return Ok(None);
    };
    let remote = bucket::Remote::open(url, config)?;
    let found = wald_bucket::ReplicaCopy::store_of(&remote.bucket);
    let found = remote.runtime.block_on(found);
    let found = found.map_err(|error| restore::unfetched(&error.into()))?;
    Ok(found.map(|_| remote))
}

/// The place of backups, opened to read it.
pub(crate) struct BackupShelf {
    content: Arc<dyn Disk>,
    trusted: TrustedKeys,
}

impl BackupShelf {
    pub(crate) fn open(place: &Path, config: &Config) -> Result<Self, Exit> {
        let content = match url(place) {
            #[cfg(feature = "object")]
            Some(url) => Arc::new(bucket::BucketDisk::new(bucket::Remote::open(url, config)?)),
            #[cfg(not(feature = "object"))]
            Some(url) => {
                return Err(Exit::new(
                    USAGE,
                    format!("{url}: {}", wald_bucket::NOT_BUILT),
                ));
            }
            None => open_directory(place)?,
        };
        let trusted = TrustedKeys::of(config).map_err(|fault| unusable(&fault))?;
        Ok(Self { content, trusted })
    }

    /// A path or a URL, for messages.
    fn location(&self) -> String {
        self.content.location()
    }
}

fn open_directory(directory: &Path) -> Result<Arc<dyn Disk>, Exit> {
    if !is_place_of_backups(directory) {
        let manifests = directory.join(MANIFESTS);
        let what = match (is_store(directory), manifests.metadata()) {
            (true, Ok(found)) if found.is_dir() => {
                "is a store; move its backups/ and files/ to a directory of their own"
            }
            (_, Err(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                let text = format!("cannot read {}: {error}", manifests.display());
                return Err(Exit::new(FAILED, text));
            }
            _ => "is no directory of backups",
        };
        return Err(Exit::new(FAILED, format!("{} {what}", directory.display())));
    }
    let content = RealDisk::open_read_only(directory).map_err(|error| open_failed(&error))?;
    Ok(content)
}

fn is_store(directory: &Path) -> bool {
    OF_A_STORE.iter().any(|name| directory.join(name).exists())
}

pub(crate) fn backup_argument() -> Arg {
    Arg::new("backup")
        .long("backup")
        .value_name("ID")
        .help("Backup in the directory or bucket; `walctl backup list` names them")
        .default_value("latest")
}

pub(crate) fn json_argument() -> Arg {
    Arg::new("output")
        .long("output")
        .short('o')
        .value_name("FORM")
        .help("Form of the output on stdout")
        .default_value("text")
        .value_parser(["text", "json"])
}

pub(crate) fn wants_json(matches: &ArgMatches) -> bool {
    matches
        .try_get_one::<String>("output")
        .ok()
        .flatten()
        .is_some_and(|form| form == "json")
}

/// The exit for a file of a setting that cannot be used.
pub(crate) fn unusable(fault: &Fault) -> Exit {
    Exit::new(Exit::CONFIG, fault.to_string())
}

pub(crate) fn trust_argument() -> Arg {
    Arg::new("trust")
        .long("trust")
        .value_name("KEY")
        .action(ArgAction::Append)
        .help(
            "Refuse a backup without the signature of this key: a file with a public key in PEM, or its 64 digits. Give the \
             option once for each key [default: the setting backup_trust]",
        )
}

/// The settings, with the keys of `--trust` if any are given.
///
/// # Errors
/// If a key is empty: a script with an empty variable would then trust every backup. If it has a comma, which separates keys
/// in the setting.
pub(crate) fn with_trust(config: &Config, matches: &ArgMatches) -> Result<Config, Exit> {
    let mut config = config.clone();
    if let Ok(Some(keys)) = matches.try_get_many::<String>("trust") {
        let keys: Vec<&str> = keys.map(String::as_str).collect();
        for key in &keys {
            let why = match key {
                key if key.trim().is_empty() => "the key is empty",
                key if key.contains(',') => "it takes one key, and no path with a comma",
                _ => continue,
            };
            let text = format!(
                "--trust {key:?}: {why}; give each key with an option of its own, as a file or as 64 digits"
            );
            return Err(Exit::new(USAGE, text));
        }
        config.backup_trust = keys.join(",");
    }
    Ok(config)
}

/// Reads the manifest of one backup: that with the id, or the latest that can be read. With trusted keys none is passed over,
/// since an older backup would then take the place of one that was changed.
fn choose(shelf: &BackupShelf, id: &str) -> Result<StoredBackup, Exit> {
    let content = &shelf.content;
    let names = content.list(MANIFESTS).map_err(|error| {
        let text = format!("{}/{MANIFESTS}: {error}", shelf.location());
        Exit::new(FAILED, text)
    })?;
    let mut kept = Vec::new();
    let mut passed_over = None;
    for name in names {
        let Some(found) = name.strip_suffix(MANIFEST_SUFFIX) else {
            continue;
        };
        if id != "latest" && id != found {
            continue;
        }
        match read(&**content, &format!("{MANIFESTS}/{name}"), found) {
            Ok(found) => kept.push(found),
            Err(bad) if id == "latest" && !shelf.trusted.asks() => {
                say(&format!(
                    "warning: {}; it is passed over: remove it if that backup is not needed",
                    bad.message
                ));
                passed_over = Some(bad);
            }
            Err(bad) => return Err(bad),
        }
    }
    // Positions of two stores have no order, and a key may sign for several stores.
    let stores: BTreeSet<u128> = kept.iter().map(|kept| kept.manifest.store_id).collect();
    if stores.len() > 1 {
        let stores: Vec<String> = stores.into_iter().map(convert::uuid).collect();
        let text = format!(
            "{} has backups of several stores: {}; name one with --backup",
            shelf.location(),
            stores.join(", ")
        );
        return Err(Exit::new(USAGE, text));
    }
    // Sorts by epoch and position before time: the store's clock may have gone back.
    kept.sort_by(|a, b| a.order().cmp(&b.order()));
    let chosen = kept.pop().ok_or_else(|| {
        if let Some(bad) = passed_over {
            return bad;
        }
        let what = match id {
            "latest" => "no backup".to_owned(),
            id => format!("no backup {id:?}"),
        };
        let text = format!(
            "{} has {what}; `walctl backup list` shows its backups",
            shelf.location()
        );
        Exit::new(NOT_FOUND, text)
    })?;
    shelf.trusted.admit(&chosen.manifest).map_err(|what| {
        let (place, id) = (shelf.location(), &chosen.id);
        let text = format!(
            "{place}/{MANIFESTS}/{id}{MANIFEST_SUFFIX}: {what}; --backup names another backup"
        );
        Exit::new(DATA_LOSS, text)
    })?;
    Ok(chosen)
}

fn read(content: &dyn Disk, path: &str, id: &str) -> Result<StoredBackup, Exit> {
    let told =
        |code, what: String| Exit::new(code, format!("{}/{path}: {what}", content.location()));
    let failed = |error: std::io::Error| told(FAILED, error.to_string());
    let file = content.open(path).map_err(failed)?;
    let size = file.size().map_err(failed)?;
    if size > LARGEST_MANIFEST {
        return Err(told(DATA_LOSS, format!("{size} bytes are no manifest")));
    }
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
    let length = file.read_full_at(&mut bytes, 0).map_err(failed)?;
    bytes.truncate(length);
    let manifest = keys::read_manifest(&bytes).map_err(|what| told(DATA_LOSS, what))?;
    Ok(StoredBackup {
        id: id.to_owned(),
        manifest,
    })
}

fn view(
    shelf: &BackupShelf,
    kept: &StoredBackup,
    at: Option<Position>,
) -> Result<Arc<BackupView>, Exit> {
    let content = Arc::clone(&shelf.content);
    let view = BackupView::open(content, &kept.manifest, at).map_err(|error| failed(&error))?;
    Ok(Arc::new(view))
}

pub(crate) fn failed(error: &RestoreError) -> Exit {
    let code = match error {
        RestoreError::Manifest(_) | RestoreError::Damaged { .. } => DATA_LOSS,
        RestoreError::Beyond { .. }
        | RestoreError::Before { .. }
        | RestoreError::SeveralStores { .. } => USAGE,
        RestoreError::NothingArchived { .. } => NOT_FOUND,
        RestoreError::NotEmpty { .. } | RestoreError::Io { .. } => FAILED,
        RestoreError::Open(error) => return open_failed(error),
    };
    Exit::new(code, error.to_string())
}

pub(crate) fn open_failed(error: &OpenError) -> Exit {
    let code = match error {
        OpenError::Locked { .. } => IN_USE,
        OpenError::Damaged(_) | OpenError::UnreadEnd { .. } => DATA_LOSS,
        OpenError::Config(_)
        | OpenError::Keys(_)
        | OpenError::NotAStore { .. }
        | OpenError::NoStore { .. }
        | OpenError::Version { .. }
        | OpenError::TooNew { .. }
        | OpenError::Io { .. } => FAILED,
    };
    Exit::new(code, error.to_string())
}

/// Reports on stderr the files of the store that do not verify.
fn tell_damage(manifest: &BackupManifest) {
    for damage in &manifest.damage {
        let place = match (&damage.records, damage.to) {
            (Some((log, from, to)), _) => {
                format!("{} of log {log:?}", records_in_words(*from, *to))
            }
            (None, Some(to)) => format!("positions {} to {to}", damage.from),
            (None, None) => format!("position {}", damage.from),
        };
        say(&format!("the store was damaged when it was saved: {place}"));
    }
}

/// A progress bar with rate and time left, on a terminal.
pub(crate) fn bar(bytes: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "{msg} {wide_bar} {percent:>3}%  {binary_bytes}/{binary_total_bytes}  \
         {binary_bytes_per_sec}  {eta} left",
    );
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Prints a line. A reader that closed the pipe has read enough, so that is no error.
fn print(line: &str) -> Result<(), Exit> {
    let mut out = std::io::stdout().lock();
    written(writeln!(out, "{line}").and_then(|()| out.flush()))
}
