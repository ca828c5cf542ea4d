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
use crate::config::Config;

/// Reads a ring from the bucket.
fn decode(ring: &[u8]) -> Result<RingFile, String> {
    RingFile::decode(ring).map_err(|why| {
        format!(
            "it {why}; remove the object if a data directory of the store has the newest ring: its node writes it again"
        )
    })
}

/// The term of a ring from the bucket.
///
/// # Errors
/// If it is damaged.
pub(crate) fn term_of(ring: &[u8]) -> Result<u64, String> {
    decode(ring).map(|ring| ring.term)
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
    pub(crate) fn show(&self, ring: &[u8]) -> Result<(), String> {
        let ring = decode(ring)?;
        let _changes = self.change();
        let mut opened = self.open(&ring)?;
        // Only its owner wraps the keys again.
        (opened.file, opened.mend) = (Some(ring), None);
        self.set(opened);
        Ok(())
    }

    /// As [`KeyRing::show`]. If a wrapping key is missing, the settings may give it now: the owner may have a new one, and this
    /// node, too.
    ///
    /// # Errors
    /// As [`KeyRing::show`].
    pub(crate) fn show_newest(&self, ring: &[u8], config: &Config) -> Result<(), String> {
        let Err(why) = self.show(ring) else {
            return Ok(());
        };
        match self.read_keks_for(&decode(ring)?, config)? {
            true => self.show(ring),
            false => Err(why),
        }
    }

    /// Gives the directory the ring with which its store must be opened, before it is opened.
    ///
    /// # Errors
    /// In a sentence, if the rings are of two stores, the directory has a plain store, or a ring cannot be used or
    /// written.
    pub(crate) fn settle(&self, place: &str, ring: &[u8], has_store: bool) -> Result<(), String> {
        let bucket = decode(ring).map_err(|why| format!("{place}/keys/ring: {why}"))?;
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
    pub(crate) fn next_owner(&self, ring: &[u8], term: u64) -> Result<String, String> {
        let next = decode(ring)?.for_owner(term);
        let next = next.map_err(|why| format!("it {why}"))?;
        self.open(&next)?;
        Ok(next.encode())
    }

    /// Makes the ring the one of the owner of this term, and makes it durable. `found`: the ring in the bucket.
    ///
    /// # Errors
    /// In a sentence, if the bucket has a ring that this one does not follow, or if it cannot be written.
    pub(crate) fn claim(&self, term: u64, found: Option<&[u8]>) -> Result<(), String> {
        let found = found.map(decode).transpose()?;
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
        *self.refusal() = None;
        self.stored.send_replace(Some(generation));
    }

    /// Notes why the bucket does not take the ring.
    pub(crate) fn note_refused(&self, why: String) {
        let mut refusal = self.refusal();
        if refusal.as_ref() != Some(&why) {
            tracing::error!(
                reason = why,
                "the key ring in the bucket cannot be replaced; it is tried again"
            );
            *refusal = Some(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use wald_storage::{BodyCipher as _, LogId, LogsExist, Position, SimDisk};

    use super::*;
    use crate::config::{EncryptionScope, Layers};
    use crate::encryption::commands;
    use crate::encryption::kek::Keks;

    const PLACE: &str = "s3://b";
    const KEY: &str = "0707070707070707070707070707070707070707070707070707070707070707";

    fn ring(disk: &SimDisk) -> KeyRing {
        let keks = Keks::parse("keys".to_owned(), KEY.as_bytes()).unwrap();
        let none = Box::new(|_: &str| None);
        KeyRing::new(Arc::new(disk.clone()), EncryptionScope::Log, keks, none)
    }

    /// An owner of the first term, and its ring as the bucket has it.
    fn owner() -> (SimDisk, KeyRing, String) {
        let disk = SimDisk::new();
        let keys = opened(&disk);
        keys.claim(1, None).unwrap();
        let text = keys.text().1;
        (disk, keys, text)
    }

    fn opened(disk: &SimDisk) -> KeyRing {
        let keys = ring(disk);
        keys.load().unwrap();
        keys.begin(Position::ZERO).unwrap();
        keys
    }

    fn file(text: &str) -> RingFile {
        RingFile::decode(text.as_bytes()).unwrap()
    }

    /// The ring with which a directory starts beside the bucket's.
    fn settled(disk: &SimDisk, bucket: &str) -> Result<RingFile, String> {
        ring(disk).settle(PLACE, bucket.as_bytes(), true)?;
        let found = file::find(disk)?;
        Ok(found.map(|found| found.ring).unwrap())
    }

    fn make_keys(keys: &KeyRing, logs: std::ops::Range<u64>) {
        for id in logs {
            keys.prepare(&[(LogId::new(id), "log")], LogsExist::Next)
                .unwrap();
        }
    }

    #[test]
    fn numbers_of_two_owners_never_meet_and_rise_with_their_terms() {
        let (_disk, keys, bucket) = owner();
        // The first owner gives numbers that the bucket does not see.
        make_keys(&keys, 1..200);
        let unseen = file(&keys.text().1);
        let mut before = file(&bucket);
        let mut all: Vec<RingFile> = vec![unseen.clone()];
        for term in [5, 6, 9] {
            let disk = SimDisk::new();
            let next = ring(&disk).next_owner(before.encode().as_bytes(), term);
            put(&disk, next.unwrap().as_bytes(), false).unwrap();
            let keys = opened(&disk);
            keys.claim(term, Some(before.encode().as_bytes())).unwrap();
            make_keys(&keys, 1000 * term..1000 * term + 70);
            let now = file(&keys.text().1);
            assert!(
                before
                    .keys
                    .keys()
                    .all(|number| now.keys.contains_key(number))
            );
            let new: Vec<u64> = now
                .keys
                .keys()
                .copied()
                .filter(|number| !before.keys.contains_key(number))
                .collect();
            assert!(
                new.iter()
                    .all(|number| *number > before.highest && now.has_made(*number))
            );
            for other in &all {
                assert!(new.iter().all(|number| !other.keys.contains_key(number)));
            }
            assert_eq!((now.term, now.numbered_in), (term, term));
            // A ring that was read again is the same one.
            assert_eq!(file(&now.encode()), now);
            all.push(now.clone());
            before = now;
        }
        // Numbers that only the first owner gave are of no key of the last one.
        let lost = unseen
            .keys
            .keys()
            .filter(|number| !before.keys.contains_key(number));
        assert!(lost.clone().count() > 64 && lost.clone().all(|number| !before.has_made(*number)));
        let last = RingFile {
            highest: u64::MAX - 1,
            ..before
        };
        assert!(last.for_owner(10).is_err());
    }

    #[test]
    fn start_has_the_newer_ring_of_directory_and_bucket() {
        let (disk, keys, bucket) = owner();
        let own = file(&bucket);
        assert_eq!(settled(&disk, &bucket).unwrap(), own);
        // The directory is ahead: the bucket was away.
        let yesterday = disk.copy();
        make_keys(&keys, 1..2);
        let newer = keys.text().1;
        assert_eq!(settled(&disk, &bucket).unwrap(), file(&newer));
        // The directory was put back from a copy.
        assert_eq!(settled(&yesterday, &newer).unwrap(), file(&newer));
        // Both copies are lost, or damaged.
        for path in ["keys/ring", "keys/ring-2"] {
            disk.replace(path, b"damaged".to_vec());
        }
        assert!(
            settled(&disk, &bucket).is_err(),
            "the bucket's is older than the note"
        );
        assert_eq!(settled(&disk, &newer).unwrap(), file(&newer));
        // Another owner has written the ring, and this one has keys that it lacks.
        let other = ring(&disk).next_owner(bucket.as_bytes(), 4).unwrap();
        assert_eq!(settled(&disk, &other).unwrap(), file(&newer));
        let refused = opened(&disk).claim(5, Some(other.as_bytes()));
        assert!(refused.unwrap_err().contains("another node"));
        // Without such keys the newer ring is enough.
        let (disk, _, bucket) = owner();
        let other = ring(&disk).next_owner(bucket.as_bytes(), 4).unwrap();
        assert_eq!(settled(&disk, &other).unwrap(), file(&other));
        opened(&disk).claim(5, Some(other.as_bytes())).unwrap();
    }

    #[test]
    fn rings_of_other_stores_and_plain_stores_are_refused_unchanged() {
        let (disk, ..) = owner();
        let (_, _, foreign) = owner();
        let before = disk.contents("keys/ring");
        assert!(
            settled(&disk, &foreign)
                .unwrap_err()
                .contains("of another store")
        );
        let refused = opened(&disk).claim(2, Some(foreign.as_bytes()));
        assert!(refused.unwrap_err().contains("of another store"));
        assert!(
            settled(&disk, "no ring")
                .unwrap_err()
                .contains("s3://b/keys/ring")
        );
        assert_eq!(disk.contents("keys/ring"), before);
        let plain = SimDisk::new();
        assert!(settled(&plain, &foreign).unwrap_err().contains("is plain"));
        assert_eq!(plain.contents("keys/ring"), None);
        ring(&plain)
            .settle(PLACE, foreign.as_bytes(), false)
            .unwrap();
    }

    #[test]
    fn older_ring_that_an_operator_puts_back_replaces_the_bucket_s() {
        let (disk, keys, _) = owner();
        let mut older = file(&keys.text().1);
        make_keys(&keys, 1..2);
        let bucket = keys.text().1;
        older.replaces = true;
        file::write(&disk, &older).unwrap();
        let now = settled(&disk, &bucket).unwrap();
        assert_eq!(now.keys, older.keys);
        assert!(now.generation > file(&bucket).generation && now.highest == file(&bucket).highest);
        let keys = opened(&disk);
        keys.claim(2, Some(bucket.as_bytes())).unwrap();
        // Only once.
        assert!(!file(&keys.text().1).replaces);
    }

    #[test]
    fn older_ring_counts_the_numbers_of_owners_that_it_never_saw() {
        let (_disk, keys, bucket) = owner();
        let export = file(&bucket);
        make_keys(&keys, 1..2);
        let unseen = file(&keys.text().1);
        let taken_over = unseen.for_owner(7).unwrap();
        let lost = [unseen.highest, taken_over.highest + 1];
        assert!(lost.iter().all(|number| !export.has_made(*number)));
        // The bucket is lost, too.
        let disk = SimDisk::new();
        file::write(&disk, &taken_over).unwrap();
        commands::import(&disk, Path::new("copy"), export, None, true).unwrap();
        let keys = opened(&disk);
        assert!(lost.iter().all(|number| keys.has_made(*number)));
        keys.claim(1, None).unwrap();
        make_keys(&keys, 2..3);
        let new = keys.newest(LogId::new(2)).unwrap().number();
        assert!(new > lost[1]);
        // Rings of other stores do not pass for this one.
        let (_, other, _) = owner();
        make_keys(&other, 2..3);
        let foreign = other.newest(LogId::new(2)).unwrap().number();
        assert!(!keys.has_made(foreign));
        let all_given = RingFile {
            highest: u64::MAX - 1,
            ..taken_over
        };
        let refused = commands::import(&disk, Path::new("copy"), all_given, None, true);
        assert!(refused.unwrap_err().message.contains("all of its numbers"));
    }

    #[test]
    fn stand_by_has_the_keys_of_the_bucket_and_loses_destroyed_ones() {
        let (_, keys, _) = owner();
        make_keys(&keys, 1..3);
        let standing = ring(&SimDisk::new());
        standing.show(keys.text().1.as_bytes()).unwrap();
        let number = keys.newest(LogId::new(1)).unwrap().number();
        assert!(standing.by_number(number).is_some());
        let begun = keys.shred(LogId::new(1), "log").unwrap();
        keys.destroy(&begun).unwrap();
        assert_eq!(keys.unended("log", None).len(), 1);
        assert_eq!(keys.unended("log", Some(LogId::new(u64::MAX))).len(), 0);
        standing.show(keys.text().1.as_bytes()).unwrap();
        assert!(standing.by_number(number).is_none());
        keys.ended(&begun).unwrap();
        assert_eq!(keys.unended("log", None).len(), 0);
        // A damaged ring takes nothing away.
        let other = keys.newest(LogId::new(2)).unwrap().number();
        assert!(standing.show(b"damaged").is_err());
        assert!(standing.by_number(other).is_some());
    }

    #[test]
    fn wrapping_key_is_in_force_once_the_bucket_has_the_ring() {
        let (disk, keys, text) = owner();
        let new = KEY.replace('7', "8");
        let parse = |lines: &str| Keks::parse("keys".to_owned(), lines.as_bytes()).unwrap();
        let both = format!("{KEY}\n{new}\n");
        keys.note_stored(file(&text).generation);
        for early in [&both, &new] {
            let error = keys.take(parse(early)).unwrap_err().to_string();
            assert!(
                error.contains("the bucket does not have the key ring yet"),
                "{error}"
            );
        }
        keys.note_stored(keys.text().0);
        keys.take(parse(&both)).unwrap();
        keys.take(parse(&new)).unwrap();
        drop(keys);
        // The ring in the directory needs only the new key.
        let keys = KeyRing::new(
            Arc::new(disk),
            EncryptionScope::Log,
            parse(&new),
            Box::new(|_: &str| None),
        );
        keys.load().unwrap();
    }

    #[test]
    fn ring_of_one_node_reads_as_before() {
        let text = opened(&SimDisk::new()).text().1;
        assert!(text.contains("\"wald_key_ring\": 1") && !text.contains("term"));
        assert_eq!(file(&text).term, 0);
    }

    #[test]
    fn command_runs_again_only_for_a_missing_wrapping_key() {
        let directory = tempfile::tempdir().unwrap();
        let (script, runs) = (directory.path().join("key"), directory.path().join("runs"));
        let new = KEY.replace('7', "8");
        let text = format!("echo run >> {}\necho {new}\n", runs.display());
        std::fs::write(&script, text).unwrap();
        let mut config = Layers::default().resolve().unwrap().config;
        config.encryption_key_command = format!("sh {}", script.display());
        let count = || {
            std::fs::read_to_string(&runs)
                .unwrap_or_default()
                .lines()
                .count()
        };

        let (_disk, keys, before) = owner();
        let both = format!("{KEY}\n{new}\n");
        let parse = |lines: &str| Keks::parse("keys".to_owned(), lines.as_bytes()).unwrap();
        keys.note_stored(u64::MAX);
        keys.take(parse(&both)).unwrap();
        let after = keys.text().1;
        let standing = ring(&SimDisk::new());
        // The ring is damaged, or a key in it was changed: the command is no help.
        let mut changed = file(&before);
        let key = changed.keys.values_mut().next().unwrap();
        Arc::make_mut(key).wrapped.bytes[20] ^= 1;
        for bad in ["damaged", &changed.encode()] {
            standing.show_newest(bad.as_bytes(), &config).unwrap_err();
        }
        assert_eq!(count(), 0);
        standing.show_newest(after.as_bytes(), &config).unwrap();
        assert_eq!(count(), 1);
        // Now the earlier wrapping key is missing, and the command does not give it.
        for _ in 0..3 {
            standing
                .show_newest(before.as_bytes(), &config)
                .unwrap_err();
        }
        assert_eq!(count(), 1);
    }
}
