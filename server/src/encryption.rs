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

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use wald_storage::{Cipher, Disk, LogEngine};

use crate::config::Config;
use crate::serve::Exit;
pub(crate) use ring::{KeyRing, Shredding, TenantOf};

/// The key ring that the settings ask for. `None`: records are stored plain.
///
/// # Errors
/// If a key or the ring is missing, wrong or damaged. Nothing was changed.
pub(crate) fn start(
    config: &Config,
    disk: &Arc<dyn Disk>,
    tenants: TenantOf,
) -> Result<Option<Arc<KeyRing>>, Exit> {
    let keys = ring(config, || Ok(Arc::clone(disk)), tenants)?;
    check(&**disk, keys.as_deref())?;
    Ok(keys)
}

/// As [`start`], and reads no ring yet. `disk` opens the data directory, if the settings ask for encryption.
///
/// # Errors
/// If a wrapping key is missing or wrong, or the directory cannot be opened.
pub(crate) fn ring(
    config: &Config,
    disk: impl FnOnce() -> Result<Arc<dyn Disk>, Exit>,
    tenants: TenantOf,
) -> Result<Option<Arc<KeyRing>>, Exit> {
    let keks = kek::Keks::of(config).map_err(|why| Exit::new(Exit::CONFIG, why))?;
    let Some(keks) = keks else {
        return Ok(None);
    };
    let ring = KeyRing::new(disk()?, config.encryption_scope, keks, tenants);
    Ok(Some(Arc::new(ring)))
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

/// Pause between two looks whether somebody asks for a rotation.
const LOOK: Duration = Duration::from_secs(1);

/// Rotates the data keys when `wald key rotate` asks for it. Ends with the process.
pub(crate) async fn rotate_when_asked(keys: Arc<KeyRing>, engine: Arc<dyn LogEngine>) {
    let mut ticks = tokio::time::interval(LOOK);
    // The new keys are in force, and the bucket has not taken them yet.
    let mut has_rotated = false;
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (keys, engine) = (Arc::clone(&keys), Arc::clone(&engine));
        let ring = Arc::clone(&keys);
        let rotated = tokio::task::spawn_blocking(move || {
            if !commands::is_asked(keys.disk()) {
                return Ok(false);
            }
            if !has_rotated {
                keys.rotate(|| commands::end_of(&engine.segments()))?;
                tracing::info!(
                    keys = keys.len(),
                    "new records have new data keys from now on"
                );
            }
            Ok::<_, std::io::Error>(true)
        });
        match rotated.await {
            Ok(Ok(is_asked)) => has_rotated = is_asked,
            Ok(Err(error)) => {
                tracing::error!(%error, "the data keys cannot be rotated; it is tried again")
            }
            // The runtime ends.
            Err(_) => return,
        }
        if !has_rotated {
            continue;
        }
        // The command hears it once a lost machine takes no key away.
        if let Err(error) = ring.is_stored().await {
            tracing::error!(%error, "the new data keys are in force, and the bucket does not have them");
            continue;
        }
        let answered = tokio::task::spawn_blocking(move || commands::answered(ring.disk()));
        match answered.await {
            Ok(Ok(())) => has_rotated = false,
            Ok(Err(error)) => {
                tracing::error!(%error, "the rotation of the data keys has no answer; it is tried again")
            }
            Err(_) => return,
        }
    }
}

/// The ring, as the engine takes it.
pub(crate) fn cipher(ring: &Arc<KeyRing>) -> Cipher {
    Cipher(Arc::clone(ring) as _)
}
