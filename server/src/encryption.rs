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

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use wald_storage::{Cipher, Disk, LogEngine};

use crate::config::Config;
use crate::serve::Exit;
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

/// Pause between two looks whether somebody asks for a rotation.
const LOOK: Duration = Duration::from_secs(1);

/// Rotates the data keys when `wald key rotate` asks for it. Ends with the process.
pub(crate) async fn rotate_when_asked(keys: Arc<KeyRing>, engine: Arc<dyn LogEngine>) {
    let mut ticks = tokio::time::interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (keys, engine) = (Arc::clone(&keys), Arc::clone(&engine));
        let rotated = tokio::task::spawn_blocking(move || {
            if !commands::is_asked(keys.disk()) {
                return Ok(());
            }
            keys.rotate(|| commands::end_of(&engine.segments()))?;
            tracing::info!(
                keys = keys.len(),
                "new records have new data keys from now on"
            );
            commands::answered(keys.disk())
        });
        match rotated.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(%error, "the data keys cannot be rotated; it is tried again")
            }
            // The runtime ends.
            Err(_) => return,
        }
    }
}

/// The ring, as the engine takes it.
pub(crate) fn cipher(ring: &Arc<KeyRing>) -> Cipher {
    Cipher(Arc::clone(ring) as _)
}
