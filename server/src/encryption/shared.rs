//! The key ring of a store with a replica. The bucket has the ring, too: `keys/ring`, the same text as the copies here.
//!
//! | rings | the node has |
//! |---|---|
//! | equal terms | the one with the higher generation: the bucket's, if the directory was put back from a copy |
//! | the bucket's term is higher | the bucket's, if it has all keys of the directory's; else the claim is refused |
//! | the directory's term is higher | the directory's: this node has claimed the store, and did not write the bucket's yet |
//! | an operator has put back an older one | that one, with a higher generation |
//!
//! An owner writes each change here first, and then to the bucket, so that the bucket never has a key that its owner lacks.

use std::io;

use tokio::sync::watch;
use wald_storage::Disk;

use super::file::{self, RingFile};
use super::ring::KeyRing;

/// Reads a ring from the bucket.
fn decode(place: &str, ring: &[u8]) -> Result<RingFile, String> {
    RingFile::decode(ring).map_err(|why| {
        format!(
            "{place}/keys/ring {why}; remove the object if a data directory of the store has the newest ring: its node writes it again"
        )
    })
}

/// The term of a ring from the bucket.
///
/// # Errors
/// If it is damaged.
pub(crate) fn term_of(place: &str, ring: &[u8]) -> Result<u64, String> {
    decode(place, ring).map(|ring| ring.term)
}

/// Writes a ring from the bucket into the directory of a store that has none, or into one that gets its store next.
///
/// # Errors
/// If the ring is damaged, or cannot be written.
pub(crate) fn put(disk: &dyn Disk, ring: &[u8], gets_store_next: bool) -> io::Result<()> {
    let ring =
        RingFile::decode(ring).map_err(|why| io::Error::other(format!("the key ring {why}")))?;
    match gets_store_next {
        true => file::write_copies(disk, &ring),
        false => file::write(disk, &ring),
    }
}

/// Whether the bucket's ring takes the place of the directory's.
fn is_replaced(own: &RingFile, bucket: &RingFile) -> bool {
    let has_all = || own.keys.keys().all(|number| bucket.has_made(*number));
    match own.term.cmp(&bucket.term) {
        std::cmp::Ordering::Less => has_all(),
        std::cmp::Ordering::Greater => false,
        // A copy that was imported has a generation that the bucket's may have, too.
        std::cmp::Ordering::Equal => own.generation <= bucket.generation && own != bucket,
    }
}

impl KeyRing {
    /// Opens the keys of the bucket's ring in memory, for a node that does not own the store.
    ///
    /// # Errors
    /// In a sentence, if the ring is damaged, or a wrapping key is missing. The keys before stay.
    pub(crate) fn show(&self, place: &str, ring: &[u8]) -> Result<(), String> {
        let ring = decode(place, ring)?;
        let _changes = self.change();
        let mut opened = self.open(&ring, &format!("{place}/keys/ring"))?;
        // Only its owner wraps the keys again.
        (opened.file, opened.mend) = (Some(ring), None);
        self.set(opened);
        Ok(())
    }

    /// Gives the directory the ring with which its store must be opened, before it is opened.
    ///
    /// # Errors
    /// In a sentence, if the rings are of two stores, the directory has a plain store, or a ring cannot be used or
    /// written.
    pub(crate) fn settle(&self, place: &str, ring: &[u8], has_store: bool) -> Result<(), String> {
        let bucket = decode(place, ring)?;
        let disk = self.disk();
        let write = |ring: &RingFile| {
            file::write(disk, ring).map_err(|error| format!("writing the key ring: {error}"))
        };
        let found = match file::find(disk) {
            Ok(found) => found,
            Err(why) => {
                let noted = file::noted(disk)?;
                let is_newest = |(id, generation): &(String, u64)| {
                    *id == bucket.id && *generation <= bucket.generation
                };
                return match noted.as_ref().is_some_and(is_newest) {
                    true => {
                        tracing::warn!(
                            reason = why,
                            place,
                            "the key ring is taken from the bucket"
                        );
                        write(&bucket)
                    }
                    false => Err(why),
                };
            }
        };
        let Some(mut own) = found.map(|found| found.ring) else {
            return match has_store {
                false => Ok(()),
                true => Err(format!(
                    "{place} has the key ring of an encrypted store, and the store in {} is plain: another node has encrypted it \
                     since; start with an empty directory",
                    disk.location()
                )),
            };
        };
        if own.id != bucket.id {
            return Err(format!(
                "{}/keys/ring is the key ring of another store than {place}/keys/ring",
                disk.location()
            ));
        }
        if own.replaces {
            own.note_numbers(&bucket);
            own.term = own.term.max(bucket.term);
            own.generation = own.generation.max(bucket.generation) + 1;
            return write(&own);
        }
        if is_replaced(&own, &bucket) {
            tracing::warn!(
                place,
                own = own.generation,
                bucket = bucket.generation,
                "the key ring of the bucket is newer than the one of the directory, and replaces it"
            );
            return write(&bucket);
        }
        Ok(())
    }

    /// The text of the ring with which the owner of a later term begins, who has it from the bucket.
    ///
    /// # Errors
    /// In a sentence, if the ring cannot be used.
    pub(crate) fn next_owner(&self, place: &str, ring: &[u8], term: u64) -> Result<String, String> {
        let place_of_ring = format!("{place}/keys/ring");
        let next = decode(place, ring)?.for_owner(term);
        let next = next.map_err(|why| format!("{place_of_ring} {why}"))?;
        self.open(&next, &place_of_ring)?;
        Ok(next.encode())
    }

    /// Makes the ring the one of the owner of this term, and makes it durable. `found`: the ring in the bucket.
    ///
    /// # Errors
    /// In a sentence, if the bucket has a ring that this one does not follow, or if it cannot be written.
    pub(crate) fn claim(&self, place: &str, term: u64, found: Option<&[u8]>) -> Result<(), String> {
        let found = found.map(|ring| decode(place, ring)).transpose()?;
        let mut changes = self.change();
        let state = self.state().clone_of();
        let Some(mut file) = state.file.clone() else {
            return Err("the directory of the store has no key ring".to_owned());
        };
        if let Some(found) = &found {
            if found.id != file.id {
                return Err("it is the key ring of another store".to_owned());
            }
            if (found.term, found.generation) > (file.term, file.generation) && *found != file {
                return Err(format!(
                    "it has generation {} of term {}, and the ring of the directory has generation {} of term {}: another node \
                     has written it since; start with an empty directory, or again if no other node owns the store",
                    found.generation, found.term, file.generation, file.term
                ));
            }
            changes.attempted = changes.attempted.max(found.generation);
        }
        file.term = term;
        file.replaces = false;
        self.stored.send_if_modified(|stored| {
            stored.get_or_insert(0);
            false
        });
        self.write(&mut changes, state, file)
            .map_err(|error| format!("writing the key ring of the directory: {error}"))
    }

    /// The ring as it is now, and its generation.
    pub(crate) fn text(&self) -> (u64, String) {
        let state = self.state();
        let file = state.file.as_ref();
        file.map_or_else(
            || (0, String::new()),
            |file| (file.generation, file.encode()),
        )
    }

    /// The generation of the ring in force.
    pub(crate) fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Notes that the bucket has the ring of this generation.
    pub(crate) fn note_stored(&self, generation: u64) {
        self.stored.send_replace(Some(generation));
    }
}
