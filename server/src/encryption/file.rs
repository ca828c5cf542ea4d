//! The ring as text, and its two copies on the disk.
//!
//! A copy is one JSON document and a line with its SHA-256. Both copies are written whenever the ring changes, each as
//! a new file that is flushed and renamed. `ENCRYPTED`, beside the journal, names the newest ring: a copy of
//! yesterday that is put back as `keys/` is noticed.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use wald_storage::{Disk, ENCRYPTED, ENCRYPTED_NEW, KEYS, LogId, Position};

use super::kek::{KekId, Wrapped};
use crate::config::{EncryptionScope, SettingValue as _};
use crate::reload::digest;

/// Both copies.
const COPIES: [&str; 2] = ["keys/ring", "keys/ring-2"];

/// Version of the form. A higher one is refused.
const VERSION: u64 = 2;

/// Version of a ring that no owner of a replica has written: earlier versions of Wald read it.
const WITHOUT_TERM: u64 = 1;

/// Low bits of a key's number, which count. The others are the tag of the ring, drawn at random and not 0: keys of
/// two rings have different numbers.
pub(super) const COUNTER_BITS: u32 = 32;

/// Maximum bytes of a copy. Writes and reads refuse a larger one.
#[cfg(not(test))]
const MOST_BYTES: u64 = 1 << 30;
#[cfg(test)]
const MOST_BYTES: u64 = 1 << 20;

/// Bytes of the ring that new keys leave for erasures and changes of the scope, which make it longer.
const FOR_CHANGES: u64 = MOST_BYTES / 32;

/// Whose records a data key encrypts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum KeyOwner {
    /// All logs without a key of their own, or of their tenant.
    Store,
    /// The logs of a tenant.
    Tenant(String),
    /// One log.
    Log(LogId),
}

impl KeyOwner {
    fn show(&self) -> String {
        match self {
            Self::Store => "store".to_owned(),
            Self::Tenant(name) => format!("tenant {name}"),
            Self::Log(id) => format!("log {}", id.get()),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text.split_once(' ') {
            None => (text == "store").then_some(Self::Store),
            Some(("tenant", name)) => Some(Self::Tenant(name.to_owned())),
            Some(("log", id)) => Some(Self::Log(LogId::new(id.parse().ok()?))),
            Some(_) => None,
        }
    }
}

impl std::fmt::Display for KeyOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.show())
    }
}

/// One data key in the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RingKey {
    pub(crate) owner: KeyOwner,
    /// Whether every record of the owner was encrypted with this key, or with another key of the owner. Only then
    /// the loss of its keys erases it.
    pub(crate) covers_all: bool,
    pub(super) wrapped: Wrapped,
}

/// The ring, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RingFile {
    /// Drawn at random when the ring was made.
    pub(crate) id: String,
    /// Rises with each change.
    pub(crate) generation: u64,
    /// Logs that share a data key since the last start.
    pub(crate) scope: EncryptionScope,
    /// The highest number that a key ever had.
    pub(crate) highest: u64,
    /// Keys from this number on count as new, and the journal from this position on has only such.
    pub(crate) renewed: (u64, Position),
    /// Shared, so that a copy of a large ring is cheap.
    pub(crate) keys: BTreeMap<u64, Arc<RingKey>>,
    /// Logs whose keys are destroyed as soon as their deletion is durable, and their names.
    pub(crate) shredding: BTreeMap<LogId, String>,
    /// The term of the replica's owner that wrote the ring; 0 without a replica.
    pub(crate) term: u64,
    /// The term in which the tag of its numbers began. A later owner that has the ring from the bucket begins another tag: the
    /// owner before may have given more numbers than the bucket shows.
    pub(crate) numbered_in: u64,
    /// Numbers of keys with earlier tags: the first and the last one of each tag, or of a row of tags.
    pub(crate) earlier: Vec<(u64, u64)>,
    /// Whether an operator has put back this ring although it is older than the store. It then replaces the bucket's.
    pub(crate) replaces: bool,
}

impl RingFile {
    /// The facts that are bound to a wrapped key.
    pub(super) fn about(&self, number: u64, owner: &KeyOwner) -> Vec<u8> {
        format!("wald data key\n{}\n{number}\n{owner}\n", self.id).into_bytes()
    }

    /// The first and the last number of a key with the tag of now. The first is above the last before a key was made.
    fn numbers(&self) -> (u64, u64) {
        let first = (self.highest >> COUNTER_BITS << COUNTER_BITS) + 1;
        (first, self.highest)
    }

    /// Whether a key of this ring has, or had, this number.
    pub(crate) fn has_made(&self, number: u64) -> bool {
        let mut numbers = self.earlier.iter().copied().chain([self.numbers()]);
        numbers.any(|(first, last)| (first..=last).contains(&number))
    }

    /// The ring with which the owner of a later term begins, who has it from the bucket. Its numbers have the tag of this
    /// term, which no other owner has. Tags rise with the terms, as the numbers of newer keys must.
    ///
    /// # Errors
    /// If there is no such tag.
    #[cfg(feature = "object")]
    pub(super) fn for_owner(&self, term: u64) -> Result<Self, String> {
        let tag = self.later_tag(term.saturating_sub(self.numbered_in))?;
        let mut next = self.clone();
        let (first, last) = self.numbers();
        if tag << COUNTER_BITS > last {
            if first <= last {
                next.earlier.push((first, last));
            }
            (next.highest, next.numbered_in) = (tag << COUNTER_BITS, term);
        }
        next.term = term;
        next.generation += 1;
        Ok(next)
    }

    /// Takes note that at most this number of later owners may have given numbers that this copy does not show. Records may have
    /// their keys, which are lost. No key gets one of these numbers again.
    ///
    /// # Errors
    /// If no tag is left.
    pub(super) fn pass_over(&mut self, owners: u64) -> Result<(), String> {
        let tag = self.later_tag(owners)?;
        let (first, _) = self.numbers();
        self.highest = tag << COUNTER_BITS;
        self.earlier.push((first, self.highest - 1));
        Ok(())
    }

    /// Adds the keys of another state of the same ring that this one never had. Keys that it had, and has no more, were destroyed.
    pub(super) fn add_unknown(&mut self, other: &Self) {
        let unknown = other.keys.iter();
        let unknown = unknown.filter(|(number, _)| !self.has_made(**number));
        let unknown: Vec<(u64, Arc<RingKey>)> = unknown
            .map(|(number, key)| (*number, Arc::clone(key)))
            .collect();
        self.note_numbers(other);
        if !unknown.is_empty() {
            self.keys.extend(unknown);
            // A log may have had other keys in each of them.
            self.uncover();
        }
    }

    /// Takes care that no later key gets a number that the store has already given, if this copy may be older than the store. A
    /// number that the copy does not show counts as unknown: a start refuses it, and a read names it.
    ///
    /// # Errors
    /// If no tag is left.
    pub(super) fn skip_numbers(&mut self, owners: u64) -> Result<(), String> {
        let tag = self.later_tag(owners)?;
        let (first, last) = self.numbers();
        if first <= last {
            self.earlier.push((first, last));
        }
        self.highest = tag << COUNTER_BITS;
        Ok(())
    }

    /// The tag of the owner who comes this number of owners later.
    ///
    /// # Errors
    /// If there is no such tag.
    fn later_tag(&self, owners: u64) -> Result<u64, String> {
        (self.highest >> COUNTER_BITS)
            .checked_add(owners)
            .filter(|tag| tag >> (u64::BITS - COUNTER_BITS) == 0)
            .ok_or_else(|| {
                "has given all of its numbers of keys; copy the records into a new store".to_owned()
            })
    }

    /// Takes note of all numbers that another state of the same ring has given.
    pub(super) fn note_numbers(&mut self, other: &Self) {
        let mut numbers = self.earlier.clone();
        numbers.extend(&other.earlier);
        numbers.extend([self.numbers(), other.numbers()]);
        let newest = if other.highest > self.highest {
            other
        } else {
            &*self
        };
        (self.highest, self.numbered_in) = (newest.highest, newest.numbered_in);
        let now = self.highest >> COUNTER_BITS;
        numbers.retain(|(first, last)| first <= last && first >> COUNTER_BITS != now);
        numbers.sort_unstable();
        // Of two ranges with one tag, the longer one counts.
        let mut merged: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (first, last) in numbers {
            merged.insert(first, (first, last));
        }
        self.earlier = merged.into_values().collect();
    }

    /// Numbers of keys that the ring can still give.
    pub(crate) fn keys_left(&self) -> u64 {
        (self.highest | ((1 << COUNTER_BITS) - 1)) - self.highest
    }

    /// Takes note that records of logs with keys of their own may have other keys, too.
    pub(super) fn uncover(&mut self) {
        for key in self.keys.values_mut() {
            if key.covers_all {
                Arc::make_mut(key).covers_all = false;
            }
        }
    }

    /// The text of a copy.
    pub(crate) fn encode(&self) -> String {
        let keys: Vec<Value> = (self.keys.iter())
            .map(|(number, key)| {
                json!({
                    "number": number,
                    "owner": key.owner.show(),
                    "covers_all": key.covers_all,
                    "wrapped_by": key.wrapped.kek.0,
                    "wrapped": STANDARD.encode(&key.wrapped.bytes),
                })
            })
            .collect();
        let shredding: Vec<Value> = (self.shredding.iter())
            .map(|(id, name)| json!({ "log_id": id.get(), "log": name }))
            .collect();
        let mut document = json!({
            "wald_key_ring": WITHOUT_TERM,
            "id": self.id,
            "generation": self.generation,
            "scope": self.scope.show(),
            "highest": self.highest,
            "renewed_from_key": self.renewed.0,
            "renewed_from_position": self.renewed.1.get(),
            "keys": keys,
            "shredding": shredding,
        });
        if self.term > 0 || self.replaces || !self.earlier.is_empty() {
            document["wald_key_ring"] = json!(VERSION);
            document["term"] = json!(self.term);
            document["numbered_in"] = json!(self.numbered_in);
            document["earlier"] = json!(self.earlier);
            document["replaces"] = json!(self.replaces);
        }
        let text = format!("{document:#}\n");
        let digest = digest(text.as_bytes());
        format!("{text}{digest}\n")
    }

    /// Reads a copy.
    ///
    /// # Errors
    /// With the fault, if it is damaged or of a newer version.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let damaged = || "is damaged or cut off".to_owned();
        let text = std::str::from_utf8(bytes).map_err(|_| damaged())?;
        let (document, told) = (text.strip_suffix('\n'))
            .and_then(|text| text.rsplit_once('\n'))
            .ok_or_else(damaged)?;
        let document = format!("{document}\n");
        if digest(document.as_bytes()) != told {
            return Err(damaged());
        }
        let value: Value = serde_json::from_str(&document).map_err(|_| damaged())?;
        match value["wald_key_ring"].as_u64() {
            Some(WITHOUT_TERM..=VERSION) => {}
            Some(version) => {
                return Err(format!(
                    "is of version {version}; this wald reads {VERSION}"
                ));
            }
            None => return Err("is no key ring".to_owned()),
        }
        Self::of(&value).ok_or_else(damaged)
    }

    fn of(value: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let mut keys = BTreeMap::new();
        for key in value["keys"].as_array()? {
            let number = key["number"].as_u64()?;
            let wrapped = Wrapped {
                kek: KekId(text(&key["wrapped_by"])?),
                bytes: STANDARD.decode(key["wrapped"].as_str()?).ok()?,
            };
            let key = RingKey {
                owner: KeyOwner::parse(key["owner"].as_str()?)?,
                covers_all: key["covers_all"].as_bool()?,
                wrapped,
            };
            keys.insert(number, Arc::new(key));
        }
        let mut shredding = BTreeMap::new();
        for log in value["shredding"].as_array()? {
            shredding.insert(LogId::new(log["log_id"].as_u64()?), text(&log["log"])?);
        }
        let renewed = (
            value["renewed_from_key"].as_u64()?,
            Position::new(value["renewed_from_position"].as_u64()?),
        );
        let mut earlier = Vec::new();
        // Rings of one node have no term.
        let has_term = value["wald_key_ring"].as_u64()? > WITHOUT_TERM;
        let number = |name: &str| match has_term {
            true => value[name].as_u64(),
            false => Some(0),
        };
        if has_term {
            for numbers in value["earlier"].as_array()? {
                earlier.push((numbers[0].as_u64()?, numbers[1].as_u64()?));
            }
        }
        let ring = Self {
            id: text(&value["id"])?,
            generation: value["generation"].as_u64()?,
            scope: EncryptionScope::parse(value["scope"].as_str()?).ok()?,
            highest: value["highest"].as_u64()?,
            renewed,
            keys,
            shredding,
            term: number("term")?,
            numbered_in: number("numbered_in")?,
            earlier,
            replaces: has_term && value["replaces"].as_bool()?,
        };
        let is_sound = ring.highest >> COUNTER_BITS > 0
            && ring.keys.keys().all(|number| ring.has_made(*number));
        is_sound.then_some(ring)
    }
}

/// The ring that the directory has, and whether one of its copies must be written again.
pub(crate) struct FoundRing {
    pub(crate) ring: RingFile,
    /// The fault of the other copy.
    pub(crate) mend: Option<String>,
}

fn read(disk: &dyn Disk, path: &str) -> io::Result<Option<Vec<u8>>> {
    let file = match disk.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let size = file.size()?.min(MOST_BYTES);
    let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
    let read = file.read_full_at(&mut bytes, 0)?;
    bytes.truncate(read);
    Ok(Some(bytes))
}

/// The copies in the directory that can be read.
///
/// # Errors
/// If the file system fails.
pub(super) fn readable(disk: &dyn Disk) -> io::Result<Vec<RingFile>> {
    let mut rings = Vec::new();
    for path in COPIES {
        let ring = read(disk, path)?.map(|bytes| RingFile::decode(&bytes));
        rings.extend(ring.and_then(Result::ok));
    }
    Ok(rings)
}

/// Reads both copies. `None`: the directory has no ring.
///
/// # Errors
/// In a sentence: neither copy is whole, the copies are of different rings, or the ring is older than the store.
pub(crate) fn find(disk: &dyn Disk) -> Result<Option<FoundRing>, String> {
    let place = disk.location();
    let noted = noted(disk);
    let mut good: Vec<RingFile> = Vec::new();
    let mut faults = Vec::new();
    for path in COPIES {
        let read = read(disk, path).map_err(|error| format!("{place}/{path}: {error}"))?;
        match read.map(|bytes| RingFile::decode(&bytes)) {
            Some(Ok(ring)) => good.push(ring),
            Some(Err(why)) => faults.push(format!("{place}/{path} {why}")),
            None => faults.push(format!("{place}/{path} is missing")),
        }
    }
    let note = match noted {
        Ok(note) => note,
        // Nobody puts a ring of yesterday back and damages the note by chance: two equal copies are the newest ring.
        Err(why) if good.len() == COPIES.len() && good[0] == good[1] => {
            faults.push(why);
            None
        }
        Err(why) => return Err(why),
    };
    let remedy = "put the newest copy back with `wald key import FILE`";
    if good.is_empty() {
        let all_missing = faults.iter().all(|fault| fault.ends_with("is missing"));
        return match (all_missing, note) {
            (true, None) => Ok(None),
            _ => Err(format!(
                "the key ring of the store cannot be used: {}; {remedy}",
                faults.join(", ")
            )),
        };
    }
    if let [first, second] = &*good {
        if first.id != second.id {
            return Err(format!(
                "{place}/{} and {place}/{} are rings of two stores; {remedy}",
                COPIES[0], COPIES[1]
            ));
        }
        if first.generation == second.generation && first != second {
            return Err(format!(
                "{place}/{} and {place}/{} differ, and claim to be one ring; {remedy}",
                COPIES[0], COPIES[1]
            ));
        }
        if first.generation != second.generation {
            faults.push("one copy of the key ring is older than the other".to_owned());
        }
    }
    let newest = good.into_iter().max_by_key(|ring| ring.generation);
    let Some(ring) = newest else {
        return Ok(None);
    };
    if let Some((id, generation)) = note {
        if id != ring.id {
            return Err(format!(
                "{place}/{} is the key ring of another store; {remedy}",
                COPIES[0]
            ));
        }
        if ring.generation < generation {
            return Err(format!(
                "{place}/{} is an older key ring of the store: generation {}, and the store has had {generation}; {remedy}",
                COPIES[0], ring.generation
            ));
        }
    }
    Ok(Some(FoundRing {
        ring,
        mend: faults.into_iter().next(),
    }))
}

/// Whether the directory has had a key ring.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn is_encrypted(disk: &dyn Disk) -> Result<bool, String> {
    for path in [ENCRYPTED, COPIES[0], COPIES[1]] {
        match disk.open(path) {
            Ok(_) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("{}/{path}: {error}", disk.location())),
        }
    }
    Ok(false)
}

/// The ring and its generation in `ENCRYPTED`.
pub(super) fn noted(disk: &dyn Disk) -> Result<Option<(String, u64)>, String> {
    let place = disk.location();
    let bytes = read(disk, ENCRYPTED).map_err(|error| format!("{place}/{ENCRYPTED}: {error}"))?;
    let Some(bytes) = bytes else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    let id = lines.next().and_then(|line| line.strip_prefix("key ring "));
    let generation = lines
        .next()
        .and_then(|line| line.strip_prefix("generation "));
    match (id, generation.and_then(|number| number.parse().ok())) {
        (Some(id), Some(generation)) if note(id, generation) == text => {
            Ok(Some((id.to_owned(), generation)))
        }
        _ => Err(format!(
            "{place}/{ENCRYPTED} is damaged, so nothing tells which key ring is the newest; if keys/ring is the newest copy, remove {ENCRYPTED}"
        )),
    }
}

fn note(id: &str, generation: u64) -> String {
    let text = format!("key ring {id}\ngeneration {generation}\n");
    let digest = digest(text.as_bytes());
    format!("{text}{digest}\n")
}

/// Writes both copies, then the note.
///
/// # Errors
/// If one of them is not durable. The ring that was there before may count, or the new one.
pub(crate) fn write(disk: &dyn Disk, ring: &RingFile) -> io::Result<()> {
    write_copies(disk, ring)?;
    let note = note(&ring.id, ring.generation);
    replace(disk, "", ENCRYPTED, ENCRYPTED_NEW, note.as_bytes())
}

/// Makes sure that the ring may get new keys.
///
/// # Errors
/// If it is so large that only other changes may make it longer.
pub(super) fn has_room(disk: &dyn Disk) -> io::Result<()> {
    let bytes = match disk.open(COPIES[0]).and_then(|file| file.size()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        found => found?,
    };
    match bytes <= MOST_BYTES - FOR_CHANGES {
        true => Ok(()),
        false => Err(full(format!(
            "the key ring has {bytes} bytes, and gets no new keys beyond {}: it has the keys of all logs that ever had one; copy the records into a new store",
            MOST_BYTES - FOR_CHANGES
        ))),
    }
}

/// An error that refuses a change and does not end the engine, as a lack of space.
pub(super) fn full(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, what)
}

/// Writes both copies. A directory that gets its store next must have no other file.
///
/// # Errors
/// If one of them is not durable.
pub(crate) fn write_copies(disk: &dyn Disk, ring: &RingFile) -> io::Result<()> {
    disk.create_directory(KEYS)?;
    disk.sync_directory("")?;
    let text = ring.encode();
    // No start reads a larger copy. The ring that is there stays in force.
    if text.len() as u64 > MOST_BYTES {
        return Err(full(format!(
            "the key ring would have {} bytes, of {MOST_BYTES} at most: it has the keys of all logs that ever had one; copy the records into a new store",
            text.len()
        )));
    }
    for path in COPIES {
        replace(disk, KEYS, path, &format!("{path}.new"), text.as_bytes())?;
    }
    Ok(())
}

fn replace(
    disk: &dyn Disk,
    directory: &str,
    path: &str,
    new: &str,
    bytes: &[u8],
) -> io::Result<()> {
    match disk.remove(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = disk.create(new)?;
    file.write_all_at(bytes, 0)?;
    file.sync()?;
    disk.rename(new, path)?;
    disk.sync_directory(directory)
}
