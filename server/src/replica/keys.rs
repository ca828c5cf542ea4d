//! The key ring of the store and its bucket: the ring of an owner travels there, and other nodes have it from there.

use std::sync::Arc;

use tokio::sync::watch;
use wald_bucket::{ShipError, ShippedRing, read_key_ring};

use super::{Exit, exit};
use crate::backups::bucket::Remote;
use crate::config::Config;
use crate::encryption::{self, KeyRing, shared};

/// The keys of an owner.
pub(super) struct OwnedKeys {
    pub(super) ring: Arc<KeyRing>,
}

impl ShippedRing for OwnedKeys {
    fn generation(&self) -> watch::Receiver<u64> {
        self.ring.generation()
    }

    fn ring(&self) -> (u64, bytes::Bytes) {
        let (generation, text) = self.ring.text();
        (generation, text.into())
    }

    fn claim(&self, term: u64, found: Option<&[u8]>) -> Result<(), String> {
        self.ring.claim(term, found)
    }

    fn term_of(&self, ring: &[u8]) -> Result<u64, String> {
        shared::term_of(ring)
    }

    fn note_stored(&self, generation: u64) {
        self.ring.note_stored(generation);
    }

    fn note_refused(&self, why: &ShipError) {
        self.ring.note_refused(why.to_string());
    }
}

/// Opens the keys of the bucket's ring, if it has one.
///
/// # Errors
/// `Keys` if it is damaged, a wrapping key is missing, or the ring of before is gone; others if the bucket fails.
pub(super) fn show(remote: &Remote, config: &Config, keys: &KeyRing) -> Result<(), ShipError> {
    let (bucket, runtime) = (&remote.bucket, &remote.runtime);
    let failed = |what: String| ShipError::Keys {
        place: bucket.place().to_owned(),
        what,
    };
    let Some(ring) = runtime.block_on(read_key_ring(bucket))? else {
        return match keys.len() {
            0 => Ok(()),
            _ => Err(failed(
                "the bucket has no keys/ring any more; its owner writes it again at its next start"
                    .to_owned(),
            )),
        };
    };
    keys.show_newest(&ring, config).map_err(failed)
}

/// Makes sure that this node has the keys of the bucket's store. Changes nothing.
///
/// # Errors
/// If it lacks them, or if the bucket fails.
pub(super) fn check(
    remote: &Remote,
    config: &Config,
    keys: Option<&Arc<KeyRing>>,
) -> Result<(), Exit> {
    let failed = |error: ShipError| exit(&error.into());
    if let Some(keys) = keys {
        return show(remote, config, keys).map_err(failed);
    }
    let ring = remote.runtime.block_on(read_key_ring(&remote.bucket));
    match ring.map_err(|error| failed(error.into()))? {
        Some(_) => Err(refused(remote)),
        None => Ok(()),
    }
}

/// The end of a node that has no keys, and whose store is encrypted.
pub(super) fn refused(remote: &Remote) -> Exit {
    Exit::new(
        Exit::CONFIG,
        encryption::without_keys(remote.bucket.place()),
    )
}
