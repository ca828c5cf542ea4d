//! Encryption at rest: the keys of a store, and where they lie.
//!
//! ```text
//! encryption_key_file, encryption_key_command ─▶ wrapping keys (kek.rs)
//!                                                    │ wrap
//! keys/ring, keys/ring-2 (ring.rs, file.rs) ◀────────┘──▶ data keys ─▶ bodies of records (the engine asks)
//!   └▶ keys/ring in the bucket of a replica (shared.rs) ─▶ stand-bys, the next owner, restores
//! ```
//!
//! | file | purpose |
//! |---|---|
//! | `kek.rs` | the wrapping keys: file, command, form |
//! | `file.rs` | the ring as text: numbers, owners, wrapped keys; two copies on the disk |
//! | `ring.rs` | the ring of a running daemon: the engine's `BodyCipher` |
//! | `shared.rs` | the ring of a store with a replica, which the bucket has, too |
//! | `commands.rs` | `wald key` |
//!
//! The engine knows neither files nor wrapping keys. Someone who has only the ring, or only a wrapping key,
//! reads no record.

pub(crate) mod commands;
mod file;
mod kek;
mod ring;
#[cfg(feature = "object")]
pub(crate) mod shared;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use wald_storage::{Cipher, Disk, LogEngine, LogId};
use zeroize::Zeroizing;

use crate::audit::AuditLog;
use crate::config::Config;
use crate::metrics::ReloadMetrics;
use crate::reload::{Fault, FileKind, Reload, ReloadedFiles, Reloader, digest};
use crate::serve::Exit;
pub(crate) use file::RingFile;
use ring::KeksRefused;
pub(crate) use ring::{KeyRing, Shredding, TenantOf};

/// The key ring for a command that opens the store of a directory offline. It keeps the scope of the ring. `None`: records are
/// stored plain.
///
/// # Errors
/// If a key or the ring is missing, wrong or damaged. Nothing was changed.
pub(crate) fn start_offline(
    config: &Config,
    disk: &Arc<dyn Disk>,
    tenants: TenantOf,
) -> Result<Option<Arc<KeyRing>>, Exit> {
    let keys = made(config, || Ok(Arc::clone(disk)), tenants)?;
    let keys = keys.map(|ring| Arc::new(ring.keeping_scope()));
    check(&**disk, keys.as_deref())?;
    Ok(keys)
}

/// The key ring that the settings ask for. It is not read yet. `disk` opens the data directory, if the settings ask for
/// encryption. `None`: records are stored plain.
///
/// # Errors
/// If a wrapping key is missing or wrong, or the directory cannot be opened.
pub(crate) fn ring(
    config: &Config,
    disk: impl FnOnce() -> Result<Arc<dyn Disk>, Exit>,
    tenants: TenantOf,
) -> Result<Option<Arc<KeyRing>>, Exit> {
    Ok(made(config, disk, tenants)?.map(Arc::new))
}

fn made(
    config: &Config,
    disk: impl FnOnce() -> Result<Arc<dyn Disk>, Exit>,
    tenants: TenantOf,
) -> Result<Option<KeyRing>, Exit> {
    let keks = kek::Keks::of(config).map_err(|why| Exit::new(Exit::CONFIG, why))?;
    let Some(keks) = keks else {
        return Ok(None);
    };
    let ring = KeyRing::new(disk()?, config.encryption_scope, keks, tenants);
    Ok(Some(ring))
}

/// Reads the ring of the directory.
///
/// # Errors
/// If the ring or a wrapping key is missing, wrong or damaged, or if the store is encrypted and there are no keys.
pub(crate) fn check(disk: &dyn Disk, keys: Option<&KeyRing>) -> Result<(), Exit> {
    let wrong = |why: String| Exit::new(Exit::CONFIG, why);
    match keys {
        // The engine does this again once it has the lock. This time nothing was touched.
        Some(keys) => keys.read().map_err(wrong),
        None => match file::is_encrypted(disk) {
            Ok(true) => Err(wrong(without_keys(&disk.location()))),
            Ok(false) => Ok(()),
            Err(why) => Err(Exit::new(Exit::IO, why)),
        },
    }
}

/// The refusal of a plain start on an encrypted store.
pub(crate) fn without_keys(place: &str) -> String {
    format!(
        "{place}: the records of this store are encrypted; set encryption_key_file or encryption_key_command"
    )
}

/// Pause between two looks at the work of [`keep_up`].
const LOOK: Duration = Duration::from_secs(1);

/// Pause after work that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// Deleted logs whose keys are destroyed here, and perhaps not in the bucket yet.
pub(crate) type DestroyedLogs = Vec<(LogId, String)>;

/// Destroys the keys of deleted logs that could not be destroyed at once, and rotates the data keys when `wald key rotate` asks
/// for it. `destroyed`: logs whose keys the start has destroyed. Ends with the process.
pub(crate) async fn keep_up(
    keys: Arc<KeyRing>,
    engine: Arc<dyn LogEngine>,
    audit: Option<Arc<AuditLog>>,
    mut destroyed: DestroyedLogs,
) {
    // The new keys are in force, and the command has no answer yet.
    let mut has_rotated = false;
    loop {
        let done = tokio::task::spawn_blocking({
            let (keys, engine) = (Arc::clone(&keys), Arc::clone(&engine));
            move || {
                let destroyed = destroy_again(&keys);
                (destroyed, rotate_when_asked(&keys, &*engine, has_rotated))
            }
        });
        // Otherwise the runtime ends.
        let Ok((now, rotated)) = done.await else {
            return;
        };
        has_rotated = rotated == Some(true);
        let mut is_well = now.is_some() && rotated.is_some();
        destroyed.extend(now.unwrap_or_default());
        is_well &= end_shreddings(&keys, audit.as_deref(), &mut destroyed).await;
        if has_rotated {
            let answered = answer_rotation(&keys).await;
            has_rotated = !answered;
            is_well &= answered;
        }
        tokio::time::sleep(if is_well { LOOK } else { AFTER_FAILURE }).await;
    }
}

/// Destroys what could not be destroyed before. `None`: it failed.
fn destroy_again(keys: &KeyRing) -> Option<DestroyedLogs> {
    match keys.destroy_again() {
        Ok(destroyed) => {
            for (log_id, log) in &destroyed {
                tracing::warn!(log, %log_id, "the keys of this deleted log are destroyed now: an attempt before failed");
            }
            Some(destroyed)
        }
        Err(error) => {
            tracing::error!(%error, "the keys of deleted logs cannot be destroyed; it is tried again");
            None
        }
    }
}

/// Records the erasure of these logs, once the bucket has none of their keys, either. The ring names them until then, so the
/// next start does it if this process ends. Returns false if the bucket does not have the ring yet.
async fn end_shreddings(
    keys: &Arc<KeyRing>,
    audit: Option<&AuditLog>,
    destroyed: &mut DestroyedLogs,
) -> bool {
    if destroyed.is_empty() {
        return true;
    }
    if let Err(error) = keys.is_stored().await {
        tracing::error!(%error, "the keys of deleted logs are destroyed here, and the bucket still has them");
        return false;
    }
    let logs = std::mem::take(destroyed);
    if let Some(audit) = audit {
        for (log_id, log) in &logs {
            record_shredding(audit, *log_id, log);
        }
    }
    let keys = Arc::clone(keys);
    let ended = tokio::task::spawn_blocking(move || keys.all_ended(&logs)).await;
    if let Ok(Err(error)) = ended {
        tracing::warn!(%error, "keys of deleted logs are destroyed; the next start removes the names of the logs from the key ring");
    }
    true
}

/// Writes the end of a deletion to the audit log whose call had no answer about the keys.
fn record_shredding(audit: &AuditLog, log_id: LogId, log: &str) {
    let details = json!({ "log": log, "log_id": log_id.get(), "shredded": true });
    audit.event("shred", details, Ok(()));
}

/// Whether a rotation is asked for. Then its keys are in force: with `has_rotated` since an earlier call. `None`: it failed.
fn rotate_when_asked(keys: &KeyRing, engine: &dyn LogEngine, has_rotated: bool) -> Option<bool> {
    if !commands::is_asked(keys.disk()) {
        return Some(false);
    }
    if has_rotated {
        return Some(true);
    }
    match keys.rotate(|| commands::end_of(&engine.segments())) {
        Ok(()) => {
            tracing::info!(
                keys = keys.len(),
                "new records have new data keys from now on"
            );
            Some(true)
        }
        Err(error) => {
            tracing::error!(%error, "the data keys cannot be rotated; it is tried again");
            None
        }
    }
}

/// Answers the command that asked for a rotation, once a lost machine takes no key away. Returns false if it failed.
async fn answer_rotation(keys: &Arc<KeyRing>) -> bool {
    if let Err(error) = keys.is_stored().await {
        tracing::error!(%error, "the new data keys are in force, and the bucket does not have them");
        return false;
    }
    let keys = Arc::clone(keys);
    let answered = tokio::task::spawn_blocking(move || commands::answered(keys.disk()));
    match answered.await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::error!(%error, "the rotation of the data keys has no answer; it is tried again");
            false
        }
        // The runtime ends.
        Err(_) => false,
    }
}

/// `encryption_key_file` of a running daemon.
pub(crate) struct KekFile {
    path: PathBuf,
    keys: Arc<KeyRing>,
}

impl KekFile {
    /// Takes the keys in this text, which is the content of the file.
    fn take(&self, text: &[u8]) -> Result<(), KeksRefused> {
        let source = format!("{}: {}", kek::FILE, self.path.display());
        // The fault names the file.
        let keks = kek::Keks::parse(source.clone(), text);
        let keks = keks.map_err(|why| why.replacen(&format!("{source}: "), "", 1));
        self.keys.take(keks.map_err(KeksRefused::Unusable)?)
    }

    fn fault(&self, refused: &KeksRefused) -> Fault {
        Fault::new(kek::FILE, &self.path, refused)
    }
}

impl ReloadedFiles for KekFile {
    const KIND: FileKind = FileKind::EncryptionKey;
    /// Empty: the keys of the start are in force, and the file has changed since.
    type Contents = Zeroizing<Vec<u8>>;

    fn has_files(text: &Self::Contents) -> bool {
        !text.is_empty()
    }

    fn read(&self) -> Result<Self::Contents, Fault> {
        kek::read_text(&self.path)
    }

    fn digests(&self, contents: &Self::Contents) -> Vec<(Cow<'static, str>, String)> {
        let in_force = Some(contents).filter(|text| Self::has_files(text));
        let digests = in_force.map(|text| (kek::FILE.into(), digest(text)));
        digests.into_iter().collect()
    }

    fn put_in_force(
        &mut self,
        text: Self::Contents,
        in_force: &mut Self::Contents,
    ) -> Result<(), Fault> {
        self.take(&text).map_err(|refused| self.fault(&refused))?;
        *in_force = text;
        Ok(())
    }
}

/// Reads `encryption_key_file` again while the daemon runs. `None`: the settings name none.
///
/// # Errors
/// If the file cannot be used now, although it could when the store was opened.
pub(crate) fn key_file(
    config: &Config,
    keys: &Arc<KeyRing>,
    metrics: &ReloadMetrics,
    audit: Option<&Arc<AuditLog>>,
) -> Result<Option<Box<dyn Reload>>, Exit> {
    if config.encryption_key_file.is_empty() {
        return Ok(None);
    }
    let begin = || {
        let file = KekFile {
            path: PathBuf::from(&config.encryption_key_file),
            keys: Arc::clone(keys),
        };
        let text = file.read()?;
        // It may have changed while the store was opened.
        match file.take(&text) {
            Ok(()) => Ok((file, text)),
            // The keys of the start stay in force, which have opened the ring. The next read finds the text changed, and tries
            // it again.
            Err(KeksRefused::NotStored) => Ok((file, Zeroizing::default())),
            Err(refused) => Err(file.fault(&refused)),
        }
    };
    let mut reloader = Reloader::start(metrics, begin)
        .map_err(|fault| Exit::new(Exit::CONFIG, fault.to_string()))?;
    if let Some(audit) = audit {
        reloader.record(audit);
    }
    Ok(Some(Box::new(reloader)))
}

/// The keys with which an offline command reads records. `None`: the settings name no wrapping key.
///
/// # Errors
/// In a sentence, if a key or the ring is missing, wrong or damaged.
pub(crate) fn to_read(config: &Config, disk: &Arc<dyn Disk>) -> Result<Option<Cipher>, String> {
    let Some(keks) = kek::Keks::of(config)? else {
        return Ok(None);
    };
    let none = Box::new(|_: &str| None);
    let ring = KeyRing::new(Arc::clone(disk), config.encryption_scope, keks, none);
    ring.read()?;
    Ok(Some(cipher(&Arc::new(ring))))
}

/// The ring, as the engine takes it.
pub(crate) fn cipher(ring: &Arc<KeyRing>) -> Cipher {
    Cipher(Arc::clone(ring) as _)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use wald_storage::{BodyCipher as _, LogsExist, Position, SimDisk};

    use super::*;
    use crate::config::{EncryptionScope, Layers};
    use crate::metrics::Metrics;

    #[test]
    fn key_file_that_changed_waits_for_the_bucket_and_ends_no_start() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let [old, new] = ["7", "8"].map(|digit| digit.repeat(64));
        let parse = |text: &str| kek::Keks::parse("keys".to_owned(), text.as_bytes()).unwrap();
        let disk = Arc::new(SimDisk::new());
        let keys = KeyRing::new(disk, EncryptionScope::Log, parse(&old), Box::new(|_| None));
        keys.begin(Position::ZERO).unwrap();
        let stores = |keys: &KeyRing| {
            let generation = *keys.generation.borrow();
            keys.stored.send_replace(Some(generation));
        };
        stores(&keys);
        let keys = Arc::new(keys);
        let mut config = Layers::default().resolve().unwrap().config;
        config.encryption_key_file = path.display().to_string();
        let metrics = Metrics::new().unwrap();
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        };
        let starts = || key_file(&config, &keys, &metrics.reloads, None);
        // A key that opens nothing ends the start.
        write(&new);
        assert!(starts().is_err_and(|exit| exit.message.contains("does not have")));
        write(&format!("{old}\n{new}\n"));
        let mut file = starts().unwrap().unwrap();
        let newest = || parse(&new).are_of(&keys.keks());
        // The bucket takes its time, and a read meanwhile changes nothing.
        write(&new);
        file.reload();
        assert!(!newest());
        stores(&keys);
        file.reload();
        assert!(newest());
    }

    #[tokio::test(start_paused = true)]
    async fn erasure_is_recorded_once_the_bucket_has_lost_the_keys() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit");
        let mut config = Layers::default().resolve().unwrap().config;
        config.audit_log = path.display().to_string();
        let audit = AuditLog::start(&config, &Metrics::new().unwrap())
            .unwrap()
            .unwrap();
        let lines = || {
            audit.finish();
            std::fs::read_to_string(&path).unwrap_or_default()
        };
        let keks = kek::Keks::parse("keys".to_owned(), "7".repeat(64).as_bytes()).unwrap();
        let disk = Arc::new(SimDisk::new());
        let keys = KeyRing::new(disk, EncryptionScope::Log, keks, Box::new(|_| None));
        keys.begin(Position::ZERO).unwrap();
        let log = LogId::new(1);
        keys.prepare(&[(log, "gone")], LogsExist::Next).unwrap();
        // The bucket has the ring of now, and takes no other one.
        keys.stored.send_replace(Some(*keys.generation.borrow()));
        let _begun = keys.shred(log, "gone").unwrap();
        let mut destroyed = keys.end_shredding(|_, _| Some(false)).unwrap();
        assert_eq!(destroyed, [(log, "gone".to_owned())]);
        let keys = Arc::new(keys);
        assert!(!end_shreddings(&keys, Some(&audit), &mut destroyed).await);
        assert!(!lines().contains("shredded"), "{}", lines());
        // Another start would know it.
        assert_eq!(keys.unended("gone", None).len(), 1);
        keys.stored.send_replace(Some(*keys.generation.borrow()));
        assert!(end_shreddings(&keys, Some(&audit), &mut destroyed).await);
        assert!(lines().contains("\"shredded\":true"), "{}", lines());
        assert_eq!(keys.unended("gone", None).len(), 0);
    }
}
