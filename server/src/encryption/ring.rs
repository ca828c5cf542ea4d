//! The key ring of a running daemon.
//!
//! Rule: a key is on the device, in both copies, before a body is encrypted with it. A key that was destroyed is in
//! neither copy before anyone hears of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;
#[cfg(feature = "object")]
use std::time::Instant;

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use tokio::sync::watch;
use wald_storage::{BodyCipher, BodyKey, Disk, LogId, LogsExist, NONCE_BYTES, Position, TAG_BYTES};
use zeroize::Zeroizing;

use super::file::{self, COUNTER_BITS, FoundRing, KeyOwner, RingFile, RingKey};
use super::kek::{KEY_BYTES, Keks, data_key, fill};
#[cfg(feature = "object")]
use crate::config::Config;
use crate::config::{EncryptionScope, SettingValue as _};
#[cfg(any(test, feature = "known-bad"))]
use crate::known_bad;
use crate::status::ShredError;

/// Number of logs whose keys are made together: each write of the ring flushes two files.
const KEYS_AHEAD: u64 = 64;

/// Longest time that a call waits until the bucket has the ring.
const BUCKET_WAIT: Duration = Duration::from_secs(10);

/// Minimum pause between two runs of `encryption_key_command` for the ring of another node: a key management service may hang, or
/// ask money for each call.
#[cfg(feature = "object")]
const COMMAND_PAUSE: Duration = Duration::from_secs(300);

/// Stands for the position at which the next start goes on.
pub(super) const AT_NEXT_START: Position = Position::new(u64::MAX);

/// The tenant of a log's name.
pub(crate) type TenantOf = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// A data key in memory.
struct DataKey {
    number: u64,
    key: LessSafeKey,
    #[cfg(any(test, feature = "known-bad"))]
    bytes: Zeroizing<[u8; KEY_BYTES]>,
}

impl BodyKey for DataKey {
    fn number(&self) -> u64 {
        self.number
    }

    fn seal(&self, bound: &[u8], body: &mut [u8]) -> ([u8; NONCE_BYTES], [u8; TAG_BYTES]) {
        let mut nonce = [0; NONCE_BYTES];
        fill(&mut nonce);
        #[cfg(any(test, feature = "known-bad"))]
        known_bad::spoil_nonce(&mut nonce, &*self.bytes);
        let sealing = Nonce::assume_unique_for_key(nonce);
        let tag = self
            .key
            .seal_in_place_separate_tag(sealing, Aad::from(bound), body)
            .expect("a body is shorter than 64 GiB");
        let mut bytes = [0; TAG_BYTES];
        bytes.copy_from_slice(tag.as_ref());
        (nonce, bytes)
    }

    fn open(&self, nonce: &[u8; NONCE_BYTES], bound: &[u8], body: &mut [u8]) -> bool {
        let nonce = Nonce::assume_unique_for_key(*nonce);
        (self.key)
            .open_in_place(nonce, Aad::from(bound), body)
            .is_ok()
    }
}

/// The keys in memory, and the ring that is on the device.
#[derive(Default)]
pub(super) struct KeysInForce {
    /// `None`: the store has no ring yet.
    pub(super) file: Option<RingFile>,
    keys: HashMap<u64, Arc<DataKey>>,
    newest: HashMap<KeyOwner, Arc<DataKey>>,
    /// The tenants of logs, as far as tenants have keys.
    tenants: HashMap<LogId, KeyOwner>,
    /// Whether a copy must be written again, or keys be wrapped again: why.
    pub(super) mend: Option<String>,
    /// Number of walks over all keys in search of the keys of one owner.
    #[cfg(test)]
    walks: usize,
}

/// Facts about changes, the failed ones included.
#[derive(Debug, Default)]
pub(super) struct RingChanges {
    /// The highest generation that a copy may have: a write that failed may have reached one of them.
    pub(super) attempted: u64,
    /// Whether a rotation has made its keys, and not noted yet where the journal begins to have them.
    is_rotating: bool,
    /// Deleted logs whose keys could not be destroyed yet.
    undestroyed: BTreeSet<LogId>,
    /// Whether the log of the server has an error about a full ring.
    is_full: bool,
}

/// A log whose keys are destroyed once it is deleted.
#[derive(Debug)]
#[must_use = "the keys stay until `KeyRing::destroy`"]
pub(crate) struct Shredding(LogId);

impl Shredding {
    pub(crate) fn id(&self) -> LogId {
        self.0
    }
}

/// The key ring of a store.
pub(crate) struct KeyRing {
    disk: Arc<dyn Disk>,
    /// The scope of the settings.
    scope: EncryptionScope,
    /// Whether a ring that is there keeps its scope: the settings of an offline command may lack the daemon's.
    keeps_scope: bool,
    keks: RwLock<Keks>,
    tenants: TenantOf,
    state: RwLock<KeysInForce>,
    /// Held while the ring is changed and written.
    changing: Mutex<RingChanges>,
    /// Held by the one call that erases a log.
    pub(crate) erasing: tokio::sync::Mutex<()>,
    /// Generation of the ring in force; 0 before the first one.
    pub(super) generation: watch::Sender<u64>,
    /// Generation of the ring in the bucket; `None` without a replica.
    pub(super) stored: watch::Sender<Option<u64>>,
    /// Why the ring in the bucket cannot be replaced now.
    refusal: Mutex<Option<String>>,
    /// Time of the last read of the wrapping keys that the ring of another node asked for.
    #[cfg(feature = "object")]
    keks_read: Mutex<Option<Instant>>,
}

/// Wrapping keys that are not in force.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeksRefused {
    /// They are wrong, or the ring cannot be written.
    #[error("{0}")]
    Unusable(String),
    /// The bucket does not have the ring yet that the new key wraps.
    #[error(
        "the bucket does not have the key ring yet that the new key wraps; keep the earlier keys in the file until this fault is gone"
    )]
    NotStored,
}

/// The bucket did not take the key ring in time.
#[derive(Debug, thiserror::Error)]
#[error("the bucket has not taken the key ring within {} s: {why}", BUCKET_WAIT.as_secs())]
pub(crate) struct RingNotStored {
    why: String,
}

impl std::fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyRing")
            .field("keks", &*self.keks())
            .finish()
    }
}

impl KeyRing {
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        scope: EncryptionScope,
        keks: Keks,
        tenants: TenantOf,
    ) -> Self {
        Self {
            disk,
            scope,
            keeps_scope: false,
            keks: RwLock::new(keks),
            tenants,
            state: RwLock::default(),
            changing: Mutex::default(),
            erasing: tokio::sync::Mutex::default(),
            generation: watch::Sender::new(0),
            stored: watch::Sender::new(None),
            refusal: Mutex::default(),
            #[cfg(feature = "object")]
            keks_read: Mutex::default(),
        }
    }

    /// The ring for an offline command: the scope of the ring takes precedence over the settings.
    pub(super) fn keeping_scope(mut self) -> Self {
        self.keeps_scope = true;
        self
    }

    /// The scope in force with these keys.
    fn scope_of(&self, state: &KeysInForce) -> EncryptionScope {
        match &state.file {
            Some(file) if self.keeps_scope => file.scope,
            _ => self.scope,
        }
    }

    pub(super) fn refusal(&self) -> MutexGuard<'_, Option<String>> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> RwLockReadGuard<'_, KeysInForce> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keks(&self) -> RwLockReadGuard<'_, Keks> {
        self.keks.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self) -> MutexGuard<'_, RingChanges> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, state: KeysInForce) {
        let generation = state.file.as_ref().map_or(0, |file| file.generation);
        let mut in_force = self.state.write().unwrap_or_else(PoisonError::into_inner);
        // Bodies get a key of this ring once the lock is free. A shipper that has read such a body finds its generation here.
        self.generation.send_replace(generation);
        *in_force = state;
    }

    /// Reads the ring, and opens all of its keys. Changes nothing on the disk.
    ///
    /// # Errors
    /// In a sentence.
    pub(super) fn read(&self) -> Result<(), String> {
        let _changes = self.change();
        let Some(FoundRing { ring, mend }) = file::find(&*self.disk)? else {
            self.set(KeysInForce::default());
            return Ok(());
        };
        let place = format!("{}/keys/ring", self.disk.location());
        let opened = self.open(&ring);
        let mut state = opened.map_err(|why| format!("{place}: {why}"))?;
        state.mend = mend.or(state.mend);
        self.set(state);
        Ok(())
    }

    /// Opens all keys of a ring.
    pub(super) fn open(&self, ring: &RingFile) -> Result<KeysInForce, String> {
        let mut state = KeysInForce::default();
        let enter = |number: u64, owner: &KeyOwner, secret: &[u8; KEY_BYTES]| {
            state.enter(number, owner.clone(), secret);
        };
        let file = self.keks().wrap_anew(ring, enter)?;
        if file != *ring {
            state.mend = Some("its keys are wrapped with the newest key".to_owned());
        }
        state.file = Some(file);
        Ok(state)
    }

    /// Takes these wrapping keys in the place of the earlier ones, once both copies are wrapped with the newest of them. After
    /// an error the earlier ones stay, and the copies may be wrapped with either.
    ///
    /// # Errors
    /// `Unusable` if a data key does not open with one of them, or if the ring cannot be written; `NotStored` if the bucket
    /// does not have it yet: an earlier key opens the bucket's ring until then.
    pub(super) fn take(&self, keks: Keks) -> Result<(), KeksRefused> {
        let has_others = !keks.are_of(&self.keks());
        let mut changes = self.change();
        let state = self.state().clone_of();
        if let Some(ring) = &state.file {
            let wrapped = keks.wrap_anew(ring, |_, _, _| ());
            let file = wrapped.map_err(KeksRefused::Unusable)?;
            if file != *ring {
                let written = self.write(&mut changes, state, file);
                written.map_err(|error| {
                    KeksRefused::Unusable(format!("the key ring cannot be written: {error}"))
                })?;
            }
        }
        let is_stored = self
            .stored
            .borrow()
            .is_none_or(|stored| stored >= *self.generation.borrow());
        if has_others && !is_stored {
            return Err(KeksRefused::NotStored);
        }
        *self.keks.write().unwrap_or_else(PoisonError::into_inner) = keks;
        Ok(())
    }

    /// Takes the wrapping keys that the settings give now, if this ring of another node needs one that is missing. The ring stays
    /// as it is: only its owner wraps the keys again. A command runs at most once in [`COMMAND_PAUSE`]. Returns whether the keys
    /// were read.
    ///
    /// # Errors
    /// In a sentence, if they cannot be read.
    #[cfg(feature = "object")]
    pub(super) fn read_keks_for(&self, ring: &RingFile, config: &Config) -> Result<bool, String> {
        let has = |keks: &Keks| ring.keys.values().all(|key| keks.has(&key.wrapped.kek));
        if has(&self.keks()) {
            return Ok(false);
        }
        if !config.encryption_key_command.is_empty() {
            let mut read = self
                .keks_read
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if read.is_some_and(|read| read.elapsed() < COMMAND_PAUSE) {
                return Ok(false);
            }
            *read = Some(Instant::now());
        }
        if let Some(keks) = Keks::of(config)? {
            *self.keks.write().unwrap_or_else(PoisonError::into_inner) = keks;
        }
        Ok(true)
    }

    /// Makes keys for these owners, which have none or get newer ones. `renewed`: only these and newer keys count as
    /// new from now on.
    fn add(
        &self,
        changes: &mut RingChanges,
        mut state: KeysInForce,
        owners: &[(KeyOwner, bool)],
        renewed: Option<Position>,
    ) -> io::Result<()> {
        if let Err(error) = file::has_room(&*self.disk) {
            if !std::mem::replace(&mut changes.is_full, true) {
                tracing::error!(%error, "new logs get no keys, so they are refused");
            }
            return Err(error);
        }
        let mut file = state.file.take().unwrap_or_else(|| new_file(self.scope));
        let first = file.highest + 1;
        if file.keys_left() < owners.len() as u64 {
            return Err(file::full(
                "the key ring has given all of its numbers of keys; copy the records into a new store".to_owned(),
            ));
        }
        for (owner, covers_all) in owners {
            file.highest += 1;
            let mut bytes = Zeroizing::new([0; KEY_BYTES]);
            fill(&mut *bytes);
            let wrapped = self.keks().wrap(&bytes, &file.about(file.highest, owner));
            let key = RingKey {
                owner: owner.clone(),
                covers_all: *covers_all,
                wrapped,
            };
            file.keys.insert(file.highest, Arc::new(key));
            state.enter(file.highest, owner.clone(), &bytes);
        }
        if let Some(position) = renewed {
            file.renewed = (first, position);
        }
        self.write(changes, state, file)
    }

    /// Writes the ring, then puts it in force.
    pub(super) fn write(
        &self,
        changes: &mut RingChanges,
        mut state: KeysInForce,
        mut file: RingFile,
    ) -> io::Result<()> {
        // Two rings of one generation would contradict each other.
        changes.attempted = changes.attempted.max(file.generation) + 1;
        file.generation = changes.attempted;
        file::write(&*self.disk, &file)?;
        state.file = Some(file);
        state.mend = None;
        self.set(state);
        Ok(())
    }

    fn owner_of(&self, scope: EncryptionScope, id: LogId, name: &str) -> KeyOwner {
        match scope {
            EncryptionScope::Store => KeyOwner::Store,
            EncryptionScope::Log => KeyOwner::Log(id),
            EncryptionScope::Tenant => {
                (self.tenants)(name).map_or(KeyOwner::Store, KeyOwner::Tenant)
            }
        }
    }

    /// Makes a new key for each owner that has one. `end`: a position beyond all records that have an older key. A call
    /// after one that failed ends that rotation, and makes no key twice.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub(crate) fn rotate(&self, end: impl Fn() -> Position) -> io::Result<()> {
        let mut changes = self.change();
        if !changes.is_rotating {
            let mut owners: BTreeMap<KeyOwner, bool> = BTreeMap::new();
            match &self.state().file {
                Some(file) => {
                    for key in file.keys.values() {
                        // An owner keeps the word of its first key.
                        owners.entry(key.owner.clone()).or_insert(key.covers_all);
                    }
                }
                None => return Ok(()),
            }
            let owners: Vec<(KeyOwner, bool)> = owners.into_iter().collect();
            // Frames get older keys until the new ones are in force, so the position comes later.
            let state = self.state().clone_of();
            self.add(&mut changes, state, &owners, Some(AT_NEXT_START))?;
            changes.is_rotating = true;
        }
        // From here on no frame gets an older key. Frames that have one lie before this position.
        let state = self.state().clone_of();
        let mut file = state.file.clone().unwrap_or_else(|| new_file(self.scope));
        file.renewed.1 = end();
        self.write(&mut changes, state, file)?;
        changes.is_rotating = false;
        Ok(())
    }

    /// Begins to destroy the keys of a log. If the process ends now, the next start finds out whether the log was
    /// deleted.
    ///
    /// # Errors
    /// If logs have no keys of their own now, or if this log had records while it had none.
    pub(crate) fn shred(&self, id: LogId, name: &str) -> Result<Shredding, ShredError> {
        let mut changes = self.change();
        let state = self.state().clone_of();
        let Some(mut file) = state.file.clone() else {
            return Err(ShredError::NoOwnKey(
                "the store is not encrypted".to_owned(),
            ));
        };
        if self.scope_of(&state) != EncryptionScope::Log {
            return Err(ShredError::NoOwnKey(
                "new records of the log share a key with other logs: only a server with encryption_scope = log shreds, and only logs that were created since it was set"
                    .to_owned(),
            ));
        }
        let owner = KeyOwner::Log(id);
        let mut own = file
            .keys
            .values()
            .filter(|key| key.owner == owner)
            .peekable();
        if own.peek().is_none() {
            return Err(ShredError::NoOwnKey(
                "the log has no key of its own: set encryption_scope = log before a log is created that is to be shredded"
                    .to_owned(),
            ));
        }
        if !own.all(|key| key.covers_all) {
            return Err(ShredError::NoOwnKey(
                "the log was there before encryption_scope = log was set, so copies of its records are plain or under another key".to_owned(),
            ));
        }
        file.shredding.insert(id, name.to_owned());
        self.write(&mut changes, state, file)?;
        Ok(Shredding(id))
    }

    /// Keeps the keys of a log that was not deleted.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub(crate) fn keep(&self, log: &Shredding) -> io::Result<()> {
        let mut changes = self.change();
        let state = self.state().clone_of();
        let mut file = state.file.clone().unwrap_or_else(|| new_file(self.scope));
        file.shredding.remove(&log.0);
        self.write(&mut changes, state, file)
    }

    /// Destroys the keys of a log that is deleted: in both copies, and in memory. With a replica the ring still names
    /// the log: [`KeyRing::ended`] removes it once the bucket has this ring.
    ///
    /// # Errors
    /// If the ring cannot be written. [`KeyRing::destroy_again`] tries it again, and so does the next start.
    pub(crate) fn destroy(&self, log: &Shredding) -> io::Result<()> {
        let mut changes = self.change();
        let destroyed = self.destroy_all(&mut changes, &[log.0], self.is_shared());
        if destroyed.is_err() {
            changes.undestroyed.insert(log.0);
        }
        destroyed
    }

    /// Destroys the keys that [`KeyRing::destroy`] could not destroy. Returns the names of their logs.
    ///
    /// # Errors
    /// If the ring cannot be written: they are tried again next time.
    pub(crate) fn destroy_again(&self) -> io::Result<Vec<(LogId, String)>> {
        let mut changes = self.change();
        if changes.undestroyed.is_empty() {
            return Ok(Vec::new());
        }
        let logs: Vec<LogId> = changes.undestroyed.iter().copied().collect();
        let names = self
            .state()
            .file
            .as_ref()
            .map(|file| file.shredding.clone());
        let names = names.unwrap_or_default();
        self.destroy_all(&mut changes, &logs, self.is_shared())?;
        changes.undestroyed.clear();
        let name = |id| (id, names.get(&id).cloned().unwrap_or_default());
        Ok(logs.into_iter().map(name).collect())
    }

    fn destroy_all(
        &self,
        changes: &mut RingChanges,
        logs: &[LogId],
        stay_named: bool,
    ) -> io::Result<()> {
        let mut state = self.state().clone_of();
        for log in logs {
            state.forget(&KeyOwner::Log(*log));
        }
        let mut file = state.file.take().unwrap_or_else(|| new_file(self.scope));
        for log in logs.iter().filter(|_| !stay_named) {
            file.shredding.remove(log);
        }
        self.write(changes, state, file)
    }

    /// Notes that the bucket has no keys of a deleted log any more.
    ///
    /// # Errors
    /// If the ring cannot be written. The next start does it.
    pub(crate) fn ended(&self, log: &Shredding) -> io::Result<()> {
        let is_named = {
            let state = self.state();
            let file = state.file.as_ref();
            file.is_some_and(|file| file.shredding.contains_key(&log.0))
        };
        match is_named {
            // Without keys it is the same change.
            true => self.keep(log),
            false => Ok(()),
        }
    }

    /// As [`KeyRing::ended`], for several logs.
    ///
    /// # Errors
    /// As [`KeyRing::ended`].
    pub(crate) fn all_ended(&self, logs: &[(LogId, String)]) -> io::Result<()> {
        (logs.iter()).try_for_each(|(log, _)| self.ended(&Shredding(*log)))
    }

    /// Logs of this name, or this one of them, whose keys are to be destroyed: calls that were cut off. The caller must make
    /// sure that they are deleted.
    pub(crate) fn unended(&self, name: &str, id: Option<LogId>) -> Vec<Shredding> {
        let state = self.state();
        let Some(file) = &state.file else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for (pending, log) in &file.shredding {
            if log == name && id.is_none_or(|id| id == *pending) {
                found.push(Shredding(*pending));
            }
        }
        found
    }

    /// Whether the bucket has the ring, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.stored.borrow().is_some()
    }

    /// Waits until the bucket has the ring as it is now. Returns at once without a replica.
    ///
    /// # Errors
    /// If the bucket does not take it in time.
    pub(crate) async fn is_stored(&self) -> Result<(), RingNotStored> {
        let generation = *self.generation.borrow();
        let mut stored = self.stored.subscribe();
        let stores = stored.wait_for(|stored| stored.is_none_or(|stored| stored >= generation));
        match tokio::time::timeout(BUCKET_WAIT, stores).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                let no_answer =
                    "look at its state with `walctl info`, and try again once it answers";
                let why = self.refusal().clone();
                Err(RingNotStored {
                    why: why.unwrap_or_else(|| no_answer.to_owned()),
                })
            }
        }
    }

    /// Ends what an earlier process began: the keys of logs that it deleted are destroyed. `exists`: whether a log
    /// exists; `None`: it cannot be said now, and the next start decides. Returns the names of the logs whose keys were destroyed.
    /// With a replica the ring still names them, as after [`KeyRing::destroy`].
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub(crate) fn end_shredding(
        &self,
        exists: impl Fn(LogId, &str) -> Option<bool>,
    ) -> io::Result<Vec<(LogId, String)>> {
        let mut changes = self.change();
        let pending = match &self.state().file {
            Some(file) if !file.shredding.is_empty() => file.shredding.clone(),
            _ => return Ok(Vec::new()),
        };
        let (mut kept, mut gone) = (Vec::new(), Vec::new());
        for (id, name) in pending {
            match exists(id, &name) {
                Some(true) => kept.push((id, name)),
                Some(false) => gone.push((id, name)),
                None => {}
            }
        }
        if !kept.is_empty() {
            let state = self.state().clone_of();
            let mut file = state.file.clone().unwrap_or_else(|| new_file(self.scope));
            for (id, _) in &kept {
                file.shredding.remove(id);
            }
            self.write(&mut changes, state, file)?;
        }
        if !gone.is_empty() {
            let ids: Vec<LogId> = gone.iter().map(|(id, _)| *id).collect();
            self.destroy_all(&mut changes, &ids, self.is_shared())?;
        }
        Ok(gone)
    }

    /// The disk of the store.
    pub(super) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Number of data keys.
    pub(crate) fn len(&self) -> usize {
        self.state().keys.len()
    }
}

/// Whether a key that an owner gets now encrypts all of its records: only a log's own key does, from its creation on.
fn covers_all(owner: &KeyOwner, exist: LogsExist) -> bool {
    matches!(owner, KeyOwner::Log(_)) && exist == LogsExist::Next
}

fn new_file(scope: EncryptionScope) -> RingFile {
    let mut id = [0; 16];
    fill(&mut id);
    let mut tag = [0; 4];
    while tag == [0; 4] {
        fill(&mut tag);
        // Half of the tags are above it, for later owners of a replica.
        tag[3] >>= 1;
    }
    let none = u64::from(u32::from_le_bytes(tag)) << COUNTER_BITS;
    RingFile {
        id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
        generation: 0,
        scope,
        highest: none,
        renewed: (none + 1, Position::ZERO),
        keys: BTreeMap::new(),
        shredding: BTreeMap::new(),
        term: 0,
        numbered_in: 0,
        earlier: Vec::new(),
        replaces: false,
    }
}

impl KeysInForce {
    fn enter(&mut self, number: u64, owner: KeyOwner, bytes: &[u8; KEY_BYTES]) {
        let key = Arc::new(DataKey {
            number,
            key: data_key(bytes),
            #[cfg(any(test, feature = "known-bad"))]
            bytes: Zeroizing::new(*bytes),
        });
        self.keys.insert(number, Arc::clone(&key));
        let newest = self.newest.entry(owner).or_insert_with(|| Arc::clone(&key));
        if newest.number < number {
            *newest = key;
        }
    }

    /// Whether an owner has no key; with `covers_all`, whether it has none that covers all of its records.
    fn lacks(&self, owner: &KeyOwner, covers_all: bool) -> bool {
        let newest = self.newest.get(owner).map(|key| key.number);
        let key = newest.and_then(|number| self.file.as_ref()?.keys.get(&number));
        key.is_none_or(|key| covers_all && !key.covers_all)
    }

    /// Removes the keys of an owner, here and from the ring.
    fn forget(&mut self, owner: &KeyOwner) {
        // Most owners have none, and the ring may be large.
        let has_keys = self.newest.contains_key(owner);
        let Some(file) = self.file.as_mut().filter(|_| has_keys) else {
            return;
        };
        #[cfg(test)]
        {
            self.walks += 1;
        }
        let keys = &mut self.keys;
        file.keys.retain(|number, key| {
            if key.owner == *owner {
                keys.remove(number);
            }
            key.owner != *owner
        });
        self.newest.remove(owner);
    }

    /// A copy, to be changed and put in force as a whole.
    pub(super) fn clone_of(&self) -> Self {
        Self {
            file: self.file.clone(),
            keys: self.keys.clone(),
            newest: self.newest.clone(),
            tenants: self.tenants.clone(),
            mend: self.mend.clone(),
            #[cfg(test)]
            walks: self.walks,
        }
    }
}

impl BodyCipher for KeyRing {
    fn newest(&self, log: LogId) -> Option<Arc<dyn BodyKey>> {
        let state = self.state();
        let key = match self.scope_of(&state) {
            EncryptionScope::Store => state.newest.get(&KeyOwner::Store),
            EncryptionScope::Log => state.newest.get(&KeyOwner::Log(log)),
            EncryptionScope::Tenant => {
                (state.tenants.get(&log)).and_then(|tenant| state.newest.get(tenant))
            }
        };
        key.map(|key| Arc::clone(key) as _)
    }

    fn by_number(&self, number: u64) -> Option<Arc<dyn BodyKey>> {
        let state = self.state();
        state.keys.get(&number).map(|key| Arc::clone(key) as _)
    }

    fn highest(&self) -> u64 {
        self.state().file.as_ref().map_or(0, |file| file.highest)
    }

    fn has_made(&self, number: u64) -> bool {
        let state = self.state();
        state
            .file
            .as_ref()
            .is_some_and(|file| file.has_made(number))
    }

    fn load(&self) -> Result<(), String> {
        self.read()
    }

    fn begin(&self, end: Position) -> io::Result<()> {
        let mut changes = self.change();
        let state = self.state().clone_of();
        if state.file.is_none() {
            let first = [(KeyOwner::Store, false)];
            self.add(&mut changes, state, &first, Some(end))?;
            tracing::info!(
                "encryption is on: new records are encrypted, and the sorter encrypts earlier ones"
            );
            return Ok(());
        }
        let Some(mut file) = state.file.clone() else {
            return Ok(());
        };
        let mut is_changed = false;
        let scope = self.scope_of(&state);
        if file.scope != scope {
            if file.keys.values().any(|key| key.covers_all) {
                tracing::warn!(
                    before = file.scope.show(),
                    now = scope.show(),
                    "encryption_scope has changed: no log that exists now can be erased by its keys any more"
                );
            }
            // From now on frames and the sorter give other keys to the records of logs that have their own.
            file.uncover();
            file.scope = scope;
            is_changed = true;
        }
        if file.renewed.1 == AT_NEXT_START {
            file.renewed.1 = end;
            is_changed = true;
        }
        if let Some(why) = &state.mend {
            tracing::warn!(reason = why, "the key ring is written again");
            is_changed = true;
        }
        match is_changed {
            true => self.write(&mut changes, state, file),
            false => Ok(()),
        }
    }

    fn prepare(&self, logs: &[(LogId, &str)], exist: LogsExist) -> io::Result<()> {
        {
            // The committer waits for this call, and most calls need no key: they neither wait for a change nor copy the ring.
            let state = self.state();
            let scope = self.scope_of(&state);
            // `begin` makes the ring with this key; only a ring of another hand lacks it.
            let has_keys = match scope {
                EncryptionScope::Store => {
                    state.file.is_none() || !state.lacks(&KeyOwner::Store, false)
                }
                EncryptionScope::Tenant | EncryptionScope::Log => logs.iter().all(|(id, name)| {
                    let owner = self.owner_of(scope, *id, name);
                    let is_known =
                        scope != EncryptionScope::Tenant || state.tenants.get(id) == Some(&owner);
                    is_known && !state.lacks(&owner, covers_all(&owner, exist))
                }),
            };
            if has_keys {
                return Ok(());
            }
        }
        let mut changes = self.change();
        let mut state = self.state().clone_of();
        let scope = self.scope_of(&state);
        let mut owners: BTreeMap<KeyOwner, bool> = BTreeMap::new();
        for (id, name) in logs {
            let owner = self.owner_of(scope, *id, name);
            if scope == EncryptionScope::Tenant {
                state.tenants.insert(*id, owner.clone());
            }
            let covers_all = covers_all(&owner, exist);
            if state.lacks(&owner, covers_all) {
                owners.insert(owner, covers_all);
            }
        }
        if let Some((KeyOwner::Log(last), true)) = owners
            .last_key_value()
            .map(|(owner, all)| (owner.clone(), *all))
        {
            // The logs that are created next have the next numbers.
            for ahead in 1..KEYS_AHEAD {
                let owner = KeyOwner::Log(LogId::new(last.get() + ahead));
                if state.lacks(&owner, true) {
                    owners.insert(owner, true);
                }
            }
        }
        if owners.is_empty() {
            if scope == EncryptionScope::Tenant {
                self.set(state);
            }
            return Ok(());
        }
        for (owner, covers_all) in &owners {
            if *covers_all {
                // Keys of a log that is not there: they were made ahead, before the scope was another one.
                state.forget(owner);
            }
        }
        let owners: Vec<(KeyOwner, bool)> = owners.into_iter().collect();
        self.add(&mut changes, state, &owners, None)
    }

    fn renewed(&self) -> (u64, Position) {
        let state = self.state();
        state
            .file
            .as_ref()
            .map_or((0, Position::ZERO), |file| file.renewed)
    }
}

#[cfg(test)]
mod tests;
