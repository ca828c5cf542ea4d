//! Encryption at rest: the keys of a store, and where they lie.
//!
//! ```text
//! encryption_key_file, encryption_key_command ─▶ wrapping keys (kek.rs)
//!                                                    │ wrap
//! keys/ring, keys/ring-2 (ring.rs, file.rs) ◀────────┘──▶ data keys ─▶ bodies of records (the engine asks)
//! ```
//!
//! | file | purpose |
//! |---|---|
//! | `kek.rs` | the wrapping keys: file, command, form |
//! | `file.rs` | the ring as text: numbers, owners, wrapped keys; two copies on the disk |
//! | `ring.rs` | the ring of a running daemon: the engine's `BodyCipher` |
//! | `commands.rs` | `wald key` |
//!
//! The engine knows neither files nor wrapping keys. Someone who has only the ring, or only a wrapping key,
//! reads no record.

pub(crate) mod commands;
mod file;
mod kek;
mod ring;

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
pub(crate) use ring::{KeyRing, TenantOf};

/// The key ring that the settings ask for. `None`: records are stored plain.
///
/// # Errors
/// If a key or the ring is missing, wrong or damaged. Nothing was changed.
pub(crate) fn start(
    config: &Config,
    disk: &Arc<dyn Disk>,
    tenants: TenantOf,
) -> Result<Option<Arc<KeyRing>>, Exit> {
    let wrong = |why: String| Exit::new(Exit::CONFIG, why);
    let Some(keks) = kek::Keks::of(config).map_err(wrong)? else {
        return match file::is_encrypted(&**disk) {
            Ok(true) => Err(wrong(format!(
                "{}: the records of this store are encrypted; set encryption_key_file or encryption_key_command",
                disk.location()
            ))),
            Ok(false) => Ok(None),
            Err(why) => Err(Exit::new(Exit::IO, why)),
        };
    };
    let ring = KeyRing::new(Arc::clone(disk), config.encryption_scope, keks, tenants);
    // The engine does this again once it has the lock. This time nothing was touched.
    ring.read().map_err(wrong)?;
    Ok(Some(Arc::new(ring)))
}

/// Pause between two looks at the work of [`keep_up`].
const LOOK: Duration = Duration::from_secs(1);

/// Pause after work that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// Destroys the keys of deleted logs that could not be destroyed at once, and rotates the data keys when `wald key rotate` asks
/// for it. Ends with the process.
pub(crate) async fn keep_up(
    keys: Arc<KeyRing>,
    engine: Arc<dyn LogEngine>,
    audit: Option<Arc<AuditLog>>,
) {
    loop {
        let (keys, engine, audit) = (Arc::clone(&keys), Arc::clone(&engine), audit.clone());
        let done = tokio::task::spawn_blocking(move || {
            let destroyed = destroy_again(&keys, audit.as_deref());
            let rotated = rotate_when_asked(&keys, &*engine);
            destroyed && rotated
        });
        match done.await {
            Ok(true) => tokio::time::sleep(LOOK).await,
            Ok(false) => tokio::time::sleep(AFTER_FAILURE).await,
            // The runtime ends.
            Err(_) => return,
        }
    }
}

/// Returns false if it failed.
fn destroy_again(keys: &KeyRing, audit: Option<&AuditLog>) -> bool {
    match keys.destroy_again() {
        Ok(destroyed) => {
            for (log_id, log) in &destroyed {
                tracing::warn!(log, %log_id, "the keys of this deleted log are destroyed now: an attempt before failed");
                if let Some(audit) = audit {
                    record_shredding(audit, *log_id, log);
                }
            }
            true
        }
        Err(error) => {
            tracing::error!(%error, "the keys of deleted logs cannot be destroyed; it is tried again");
            false
        }
    }
}

/// Writes the end of a deletion to the audit log whose call had no answer about the keys.
pub(crate) fn record_shredding(audit: &AuditLog, log_id: LogId, log: &str) {
    let details = json!({ "log": log, "log_id": log_id.get(), "shredded": true });
    audit.event("shred", details, Ok(()));
}

/// Returns false if it failed.
fn rotate_when_asked(keys: &KeyRing, engine: &dyn LogEngine) -> bool {
    if !commands::is_asked(keys.disk()) {
        return true;
    }
    let rotated = keys.rotate(|| commands::end_of(&engine.segments()));
    let answered = rotated.and_then(|()| {
        tracing::info!(
            keys = keys.len(),
            "new records have new data keys from now on"
        );
        commands::answered(keys.disk())
    });
    if let Err(error) = &answered {
        tracing::error!(%error, "the data keys cannot be rotated; it is tried again");
    }
    answered.is_ok()
}

/// `encryption_key_file` of a running daemon.
pub(crate) struct KekFile {
    path: PathBuf,
    keys: Arc<KeyRing>,
}

impl KekFile {
    fn take(&self, text: &[u8]) -> Result<(), Fault> {
        let fault = |why: String| Fault::new(kek::FILE, &self.path, why);
        let source = format!("{}: {}", kek::FILE, self.path.display());
        // The fault names the file.
        let keks = kek::Keks::parse(source.clone(), text);
        let keks = keks.map_err(|why| why.replacen(&format!("{source}: "), "", 1));
        keks.and_then(|keks| self.keys.take(keks)).map_err(fault)
    }
}

impl ReloadedFiles for KekFile {
    const KIND: FileKind = FileKind::EncryptionKey;
    type Contents = Zeroizing<Vec<u8>>;

    fn read(&self) -> Result<Self::Contents, Fault> {
        kek::read_text(&self.path)
    }

    fn digests(&self, contents: &Self::Contents) -> Vec<(Cow<'static, str>, String)> {
        vec![(kek::FILE.into(), digest(contents))]
    }

    fn put_in_force(&mut self, text: &Self::Contents, _: &Self::Contents) -> Result<(), Fault> {
        self.take(text)
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
        file.take(&text)?;
        Ok((file, text))
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
