//! The key ring of a running daemon.
//!
//! Rule: a key is on the device, in both copies, before a body is encrypted with it. A key that was destroyed is in
//! neither copy before anyone hears of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce};
use tokio::sync::watch;
use wald_storage::{BodyCipher, BodyKey, Disk, LogId, LogsExist, NONCE_BYTES, Position, TAG_BYTES};
use zeroize::Zeroizing;

use super::file::{self, COUNTER_BITS, FoundRing, KeyOwner, RingFile, RingKey};
use super::kek::{KEY_BYTES, Keks, data_key, fill};
#[cfg(feature = "object")]
use crate::config::Config;
use crate::config::EncryptionScope;
#[cfg(any(test, feature = "known-bad"))]
use crate::known_bad;
use crate::status::ShredError;

/// Number of logs whose keys are made together: each write of the ring flushes two files.
const KEYS_AHEAD: u64 = 64;

/// Longest time that a call waits until the bucket has the ring.
const BUCKET_WAIT: Duration = Duration::from_secs(10);

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
    scope: EncryptionScope,
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
}

/// The bucket did not take the key ring in time.
#[derive(Debug, thiserror::Error)]
#[error("the bucket has not taken the key ring within {} s; look at its state with `walctl info`, and try again once it answers", BUCKET_WAIT.as_secs())]
pub(crate) struct RingNotStored;

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
            keks: RwLock::new(keks),
            tenants,
            state: RwLock::default(),
            changing: Mutex::default(),
            erasing: tokio::sync::Mutex::default(),
            generation: watch::Sender::new(0),
            stored: watch::Sender::new(None),
        }
    }

    pub(super) fn state(&self) -> RwLockReadGuard<'_, KeysInForce> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn keks(&self) -> RwLockReadGuard<'_, Keks> {
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
    /// In a sentence, if a data key does not open with one of them, if the ring cannot be written, or if the bucket does
    /// not have it yet: an earlier key opens the bucket's ring until then.
    pub(super) fn take(&self, keks: Keks) -> Result<(), String> {
        let has_others = !keks.are_of(&self.keks());
        let mut changes = self.change();
        let state = self.state().clone_of();
        if let Some(ring) = &state.file {
            let file = keks.wrap_anew(ring, |_, _, _| ())?;
            if file != *ring {
                let written = self.write(&mut changes, state, file);
                written.map_err(|error| format!("the key ring cannot be written: {error}"))?;
            }
        }
        let is_stored = self
            .stored
            .borrow()
            .is_none_or(|stored| stored >= *self.generation.borrow());
        if has_others && !is_stored {
            return Err("the bucket does not have the key ring yet that the new key wraps; keep the earlier keys in the file until this fault is gone".to_owned());
        }
        *self.keks.write().unwrap_or_else(PoisonError::into_inner) = keks;
        Ok(())
    }

    /// Takes the wrapping keys that the settings give now. The ring stays as it is: only its owner wraps the keys again.
    ///
    /// # Errors
    /// In a sentence, if they cannot be read.
    #[cfg(feature = "object")]
    pub(crate) fn read_keks(&self, config: &Config) -> Result<(), String> {
        if let Some(keks) = Keks::of(config)? {
            *self.keks.write().unwrap_or_else(PoisonError::into_inner) = keks;
        }
        Ok(())
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
        let mut file = state.file.take().unwrap_or_else(|| new_file(self.scope));
        let first = file.highest + 1;
        if file.keys_left() < owners.len() as u64 {
            return Err(io::Error::other(
                "the key ring has given all of its numbers of keys; copy the records into a new store",
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
            file.keys.insert(file.highest, key);
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

    fn owner_of(&self, id: LogId, name: &str) -> KeyOwner {
        match self.scope {
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
        if self.scope != EncryptionScope::Log {
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
            Ok(Err(_)) | Err(_) => Err(RingNotStored),
        }
    }

    /// Ends what an earlier process began: the keys of logs that it deleted are destroyed. `exists`: whether a log
    /// exists; `None`: it cannot be said now, and the next start decides. Returns the names of the logs whose keys were destroyed.
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
            self.destroy_all(&mut changes, &ids, false)?;
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
        let Some(file) = &mut self.file else {
            return;
        };
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
        }
    }
}

impl BodyCipher for KeyRing {
    fn newest(&self, log: LogId) -> Option<Arc<dyn BodyKey>> {
        let state = self.state();
        let key = match self.scope {
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
        if file.scope != self.scope {
            // From now on frames and the sorter give other keys to the records of logs that have their own.
            file.uncover();
            file.scope = self.scope;
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
        if self.scope == EncryptionScope::Store {
            // `begin` makes the ring with this key; only a ring of another hand lacks it.
            let state = self.state();
            if state.file.is_none() || !state.lacks(&KeyOwner::Store, false) {
                return Ok(());
            }
        }
        let mut changes = self.change();
        let mut state = self.state().clone_of();
        let mut owners: BTreeMap<KeyOwner, bool> = BTreeMap::new();
        for (id, name) in logs {
            let owner = self.owner_of(*id, name);
            if self.scope == EncryptionScope::Tenant {
                state.tenants.insert(*id, owner.clone());
            }
            let is_own = matches!(owner, KeyOwner::Log(_));
            let covers_all = is_own && exist == LogsExist::Next;
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
            if self.scope == EncryptionScope::Tenant {
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
mod tests {
    use std::collections::HashSet;

    use rustix::io::Errno;
    use wald_storage::{DiskCall, SimDisk};

    use super::*;

    const KEY: &str = "0707070707070707070707070707070707070707070707070707070707070707";
    const OTHER: &str = "0909090909090909090909090909090909090909090909090909090909090909";

    fn ring(disk: &SimDisk, scope: EncryptionScope, keys: &str) -> KeyRing {
        let keks = Keks::parse("keys".to_owned(), keys.as_bytes()).unwrap();
        let tenants = |name: &str| name.split_once('/').map(|(tenant, _)| tenant.to_owned());
        KeyRing::new(Arc::new(disk.clone()), scope, keks, Box::new(tenants))
    }

    fn opened(disk: &SimDisk, scope: EncryptionScope, keys: &str) -> KeyRing {
        let ring = ring(disk, scope, keys);
        ring.load().unwrap();
        ring.begin(Position::ZERO).unwrap();
        ring
    }

    fn sealed(ring: &KeyRing, log: LogId) -> (u64, Vec<u8>) {
        let key = ring.newest(log).unwrap();
        let mut body = b"some records".to_vec();
        let (nonce, tag) = key.seal(b"place", &mut body);
        (key.number(), [&nonce[..], &body, &tag].concat())
    }

    fn opens(ring: &KeyRing, (number, sealed): &(u64, Vec<u8>)) -> bool {
        let Some(key) = ring.by_number(*number) else {
            return false;
        };
        let (nonce, rest) = sealed.split_first_chunk().unwrap();
        let mut body = rest.to_vec();
        key.open(nonce, b"place", &mut body) && body.starts_with(b"some records")
    }

    #[test]
    fn keys_survive_and_no_file_shows_them() {
        let disk = SimDisk::new();
        let log = LogId::new(5);
        let first = opened(&disk, EncryptionScope::Store, KEY);
        let body = sealed(&first, log);
        let again = opened(&disk, EncryptionScope::Store, KEY);
        assert!(opens(&again, &body));
        for key in again.state().keys.values() {
            for path in ["keys/ring", "keys/ring-2", "ENCRYPTED"] {
                let file = disk.contents(path).unwrap();
                let hex: String = key.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                assert!(
                    !file.windows(8).any(|part| part == &key.bytes[..8]),
                    "{path}"
                );
                assert!(
                    !String::from_utf8_lossy(&file).contains(&hex[..16]),
                    "{path}"
                );
            }
            // A part of the key in a frame is as bad.
            assert!(!body.1.windows(8).any(|part| part == &key.bytes[..8]));
        }
    }

    #[test]
    fn numbers_of_two_rings_never_meet() {
        let rings =
            [SimDisk::new(), SimDisk::new()].map(|disk| opened(&disk, EncryptionScope::Store, KEY));
        let numbers = [0, 1].map(|at| sealed(&rings[at], LogId::new(1)).0);
        for (at, number) in numbers.into_iter().enumerate() {
            assert!(rings[at].has_made(number) && !rings[1 - at].has_made(number));
            assert!(!rings[at].has_made(number + 1) && !rings[at].has_made(number - 1));
            assert!(!rings[at].has_made(0) && !rings[at].has_made(1));
        }
    }

    #[test]
    fn nonce_of_each_body_is_another_one() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Store, KEY);
        let nonces = (0..1000).map(|_| sealed(&ring, LogId::new(1)).1[..NONCE_BYTES].to_vec());
        assert_eq!(nonces.collect::<HashSet<_>>().len(), 1000);
    }

    #[test]
    fn bodies_that_were_changed_do_not_open() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Store, KEY);
        let (number, body) = sealed(&ring, LogId::new(1));
        for at in 0..body.len() {
            let mut changed = body.clone();
            changed[at] ^= 1;
            assert!(!opens(&ring, &(number, changed)), "byte {at}");
        }
    }

    #[test]
    fn ring_with_a_wrong_key_is_refused_and_stays() {
        let disk = SimDisk::new();
        opened(&disk, EncryptionScope::Store, KEY);
        let before = disk.contents("keys/ring");
        let error = ring(&disk, EncryptionScope::Store, OTHER)
            .load()
            .unwrap_err();
        assert!(
            error.contains("data key ") && error.contains("does not have"),
            "{error}"
        );
        assert_eq!(disk.contents("keys/ring"), before);
    }

    #[test]
    fn newest_wrapping_key_wraps_all_data_keys_again() {
        let disk = SimDisk::new();
        let body = sealed(&opened(&disk, EncryptionScope::Store, KEY), LogId::new(1));
        let both = format!("{KEY}\n{OTHER}\n");
        assert!(opens(&opened(&disk, EncryptionScope::Store, &both), &body));
        // The old wrapping key is no longer needed, nor any use.
        assert!(opens(&opened(&disk, EncryptionScope::Store, OTHER), &body));
        assert!(ring(&disk, EncryptionScope::Store, KEY).load().is_err());
    }

    #[test]
    fn wrapping_keys_change_while_the_ring_is_in_use() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        let log = LogId::new(1);
        ring.prepare(&[(log, "a")], LogsExist::Next).unwrap();
        let body = sealed(&ring, log);
        let keks = |text: &str| Keks::parse("keys".to_owned(), text.as_bytes()).unwrap();
        let before = disk.contents("keys/ring");
        // The earlier key would be lost.
        let error = ring.take(keks(OTHER)).unwrap_err();
        assert!(error.contains("does not have"), "{error}");
        assert_eq!(disk.contents("keys/ring"), before);
        ring.rotate(|| Position::ZERO).unwrap();
        let both = format!("{KEY}\n{OTHER}\n");
        disk.fail_call(|call| call.kind.changes(), 9, Errno::IO.raw_os_error());
        ring.take(keks(&both)).unwrap_err();
        disk.forget_faults();
        // Whatever reached the disk opens with both keys, and the next attempt ends the work.
        let copy = disk.copy();
        assert!(opens(&opened(&copy, EncryptionScope::Log, &both), &body));
        ring.take(keks(&both)).unwrap();
        let after = disk.contents("keys/ring");
        ring.take(keks(&both)).unwrap();
        assert_eq!(disk.contents("keys/ring"), after, "nothing is left to do");
        ring.take(keks(OTHER)).unwrap();
        // New data keys are wrapped with the new key.
        ring.rotate(|| Position::ZERO).unwrap();
        let late = sealed(&ring, log);
        let again = opened(&disk, EncryptionScope::Log, OTHER);
        assert!(opens(&again, &body) && opens(&again, &late));
    }

    #[test]
    fn one_damaged_copy_is_written_again_and_two_are_refused() {
        for path in ["keys/ring", "keys/ring-2"] {
            for damage in [0, 40, usize::MAX] {
                let disk = SimDisk::new();
                let body = sealed(&opened(&disk, EncryptionScope::Store, KEY), LogId::new(1));
                let whole = disk.contents(path).unwrap();
                let mut bytes = whole.clone();
                match damage {
                    0 => bytes.clear(),
                    usize::MAX => bytes.truncate(whole.len() - 3),
                    at => bytes[at] ^= 1,
                }
                disk.replace(path, bytes.clone());
                assert!(opens(&opened(&disk, EncryptionScope::Store, KEY), &body));
                assert_ne!(disk.contents(path).unwrap(), bytes);
                disk.replace("keys/ring", bytes.clone());
                disk.replace("keys/ring-2", bytes);
                let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
                assert!(error.contains("cannot be used"), "{error}");
            }
        }
    }

    #[test]
    fn damaged_note_is_written_again_if_both_copies_are_one_ring() {
        let disk = SimDisk::new();
        let first = opened(&disk, EncryptionScope::Store, KEY);
        let body = sealed(&first, LogId::new(1));
        let yesterday = disk.contents("keys/ring").unwrap();
        first.rotate(|| Position::ZERO).unwrap();
        disk.replace("ENCRYPTED", b"key ring".to_vec());
        let again = opened(&disk, EncryptionScope::Store, KEY);
        assert!(opens(&again, &body));
        assert!(file::noted(&disk).unwrap().is_some());
        // Copies that differ do not prove that one of them is the newest ring.
        disk.replace("ENCRYPTED", b"key ring".to_vec());
        disk.replace("keys/ring", yesterday);
        let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
        assert!(error.contains("ENCRYPTED is damaged"), "{error}");
    }

    #[test]
    fn rings_of_yesterday_and_of_other_stores_are_refused() {
        let disk = SimDisk::new();
        let first = opened(&disk, EncryptionScope::Store, KEY);
        let yesterday = disk.contents("keys/ring").unwrap();
        first.rotate(|| Position::ZERO).unwrap();
        let today = disk.contents("keys/ring").unwrap();
        let put = |bytes: &[u8]| {
            for path in ["keys/ring", "keys/ring-2"] {
                disk.replace(path, bytes.to_vec());
            }
        };
        put(&yesterday);
        let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
        assert!(error.contains("an older key ring"), "{error}");
        let other = SimDisk::new();
        opened(&other, EncryptionScope::Store, KEY);
        put(&other.contents("keys/ring").unwrap());
        let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
        assert!(error.contains("of another store"), "{error}");
        put(&today);
        ring(&disk, EncryptionScope::Store, KEY).load().unwrap();
        // A ring that is gone is no new store.
        let disk: Arc<dyn Disk> = Arc::new(disk);
        for path in ["keys/ring", "keys/ring-2"] {
            disk.remove(path).unwrap();
        }
        assert!(file::find(&*disk).is_err());
    }

    #[test]
    fn rotation_gives_new_bodies_a_new_key_and_opens_old_ones() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Store, KEY);
        let old = sealed(&ring, LogId::new(1));
        ring.rotate(|| Position::new(1 << 20)).unwrap();
        ring.rotate(|| Position::new(2 << 20)).unwrap();
        let new = sealed(&ring, LogId::new(1));
        assert_eq!(new.0, old.0 + 2);
        assert_eq!(ring.renewed(), (new.0, Position::new(2 << 20)));
        let again = opened(&disk, EncryptionScope::Store, KEY);
        assert!(opens(&again, &old) && opens(&again, &new));
        assert_eq!(again.renewed(), ring.renewed());
    }

    #[test]
    fn destroyed_keys_are_in_no_copy_and_open_nothing() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        let (one, two, old) = (LogId::new(1), LogId::new(2), LogId::new(1 << 41));
        ring.prepare(&[(one, "one"), (two, "two")], LogsExist::Next)
            .unwrap();
        ring.prepare(&[(old, "old")], LogsExist::Already).unwrap();
        ring.rotate(|| Position::ZERO).unwrap();
        let (of_one, of_two) = (sealed(&ring, one), sealed(&ring, two));
        assert!(ring.shred(old, "old").is_err());
        assert!(ring.shred(LogId::new(1 << 50), "none").is_err());
        let begun = ring.shred(one, "one").unwrap();
        ring.destroy(&begun).unwrap();
        assert!(!opens(&ring, &of_one) && opens(&ring, &of_two));
        assert!(ring.newest(one).is_none());
        let again = opened(&disk, EncryptionScope::Log, KEY);
        assert!(!opens(&again, &of_one) && opens(&again, &of_two));
        for path in ["keys/ring", "keys/ring-2"] {
            let text = String::from_utf8(disk.contents(path).unwrap()).unwrap();
            assert!(
                !text.contains("\"log 1\"") && text.contains("\"log 2\""),
                "{path}"
            );
        }
    }

    #[test]
    fn keys_that_a_failing_disk_kept_are_destroyed_later() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        let log = LogId::new(1);
        ring.prepare(&[(log, "gone")], LogsExist::Next).unwrap();
        let body = sealed(&ring, log);
        let begun = ring.shred(log, "gone").unwrap();
        assert_eq!(ring.destroy_again().unwrap(), []);
        let fail = || disk.fail_call(|call| call.kind.changes(), 3, Errno::IO.raw_os_error());
        fail();
        ring.destroy(&begun).unwrap_err();
        fail();
        ring.destroy_again().unwrap_err();
        assert!(opens(&ring, &body));
        // Other changes go on meanwhile, and do not take the log for one that is there.
        disk.forget_faults();
        ring.rotate(|| Position::ZERO).unwrap();
        let destroyed = ring.destroy_again().unwrap();
        assert_eq!(destroyed, [(log, "gone".to_owned())]);
        assert_eq!(ring.destroy_again().unwrap(), []);
        assert!(!opens(&ring, &body) && ring.newest(log).is_none());
        for path in ["keys/ring", "keys/ring-2"] {
            let ring = RingFile::decode(&disk.contents(path).unwrap()).unwrap();
            assert!(ring.shredding.is_empty(), "{path}");
            let mut owners = ring.keys.values().map(|key| &key.owner);
            assert!(owners.all(|owner| *owner != KeyOwner::Log(log)), "{path}");
        }
    }

    #[test]
    fn ring_without_a_key_of_the_store_gets_one_before_logs_need_it() {
        let disk = SimDisk::new();
        opened(&disk, EncryptionScope::Store, KEY);
        let bytes = disk.contents("keys/ring").unwrap();
        let mut file = RingFile::decode(&bytes).unwrap();
        file.keys.clear();
        file::write(&disk, &file).unwrap();
        let ring = opened(&disk, EncryptionScope::Store, KEY);
        let log = (LogId::new(1), "a");
        ring.prepare(&[log], LogsExist::Already).unwrap();
        let body = sealed(&ring, log.0);
        assert!(opens(&opened(&disk, EncryptionScope::Store, KEY), &body));
    }

    #[test]
    fn log_that_lived_under_another_scope_is_not_shredded() {
        let (early, between, late) = (LogId::new(1), LogId::new(2), LogId::new(3));
        for other in [EncryptionScope::Store, EncryptionScope::Tenant] {
            let disk = SimDisk::new();
            let ring = opened(&disk, EncryptionScope::Log, KEY);
            ring.prepare(&[(early, "early")], LogsExist::Next).unwrap();
            let of_early = sealed(&ring, early);
            // Without a change of the scope a restart takes nothing away.
            let ring = opened(&disk, EncryptionScope::Log, KEY);
            let begun = ring.shred(early, "early").unwrap();
            ring.keep(&begun).unwrap();
            let ring = opened(&disk, other, KEY);
            ring.prepare(&[(early, "early")], LogsExist::Already)
                .unwrap();
            ring.prepare(&[(between, "between")], LogsExist::Next)
                .unwrap();
            let of_between = sealed(&ring, between);
            assert!(matches!(
                ring.shred(early, "early"),
                Err(ShredError::NoOwnKey(_))
            ));
            let ring = opened(&disk, EncryptionScope::Log, KEY);
            ring.prepare(
                &[(early, "early"), (between, "between")],
                LogsExist::Already,
            )
            .unwrap();
            for (id, name) in [(early, "early"), (between, "between")] {
                let refused = ring.shred(id, name);
                assert!(matches!(refused, Err(ShredError::NoOwnKey(_))), "{name}");
            }
            assert!(opens(&ring, &of_early) && opens(&ring, &of_between));
            // A log of today has a key of today, although one was made ahead for its number.
            ring.prepare(&[(late, "late")], LogsExist::Next).unwrap();
            let of_late = sealed(&ring, late);
            let begun = ring.shred(late, "late").unwrap();
            ring.destroy(&begun).unwrap();
            assert!(!opens(&ring, &of_late) && opens(&ring, &of_early));
        }
    }

    #[test]
    fn interrupted_shredding_is_ended_by_the_next_start() {
        for deleted in [false, true] {
            let disk = SimDisk::new();
            let ring = opened(&disk, EncryptionScope::Log, KEY);
            let log = LogId::new(1);
            ring.prepare(&[(log, "one")], LogsExist::Next).unwrap();
            let body = sealed(&ring, log);
            let _begun = ring.shred(log, "one").unwrap();
            let again = opened(&disk, EncryptionScope::Log, KEY);
            assert!(again.end_shredding(|_, _| None).unwrap().is_empty());
            assert!(opens(&again, &body));
            let again = opened(&disk, EncryptionScope::Log, KEY);
            let ended = again.end_shredding(|_, _| Some(!deleted)).unwrap();
            assert_eq!(ended.len(), usize::from(deleted));
            assert_eq!(opens(&again, &body), !deleted);
            let last = opened(&disk, EncryptionScope::Log, KEY);
            assert!(
                last.end_shredding(|_, _| panic!("nothing is left"))
                    .unwrap()
                    .is_empty()
            );
        }
    }

    #[test]
    fn keys_are_made_ahead_and_tenants_share_theirs() {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        ring.prepare(&[(LogId::new(1), "a")], LogsExist::Next)
            .unwrap();
        let before = disk.contents("keys/ring");
        for id in 2..=KEYS_AHEAD {
            ring.prepare(&[(LogId::new(id), "b")], LogsExist::Next)
                .unwrap();
            assert!(ring.newest(LogId::new(id)).is_some());
        }
        assert_eq!(disk.contents("keys/ring"), before);
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Tenant, KEY);
        let logs = [(1, "pay/a"), (2, "pay/b"), (3, "shop/a"), (4, "alone")];
        for (id, name) in logs {
            ring.prepare(&[(LogId::new(id), name)], LogsExist::Next)
                .unwrap();
        }
        let numbers = logs.map(|(id, _)| ring.newest(LogId::new(id)).unwrap().number());
        assert_eq!(numbers[0], numbers[1]);
        assert_eq!(HashSet::from(numbers).len(), 3);
        assert!(ring.shred(LogId::new(1), "pay/a").is_err());
    }

    #[test]
    fn failed_writes_leave_a_ring_that_opens_and_retries_add_no_keys() {
        let log = LogId::new(1);
        let changes = |call: &DiskCall<'_>| call.kind.changes();
        for first in 1..100 {
            for second in [None, Some(first), Some(3), Some(8)] {
                let disk = SimDisk::new();
                let ring = opened(&disk, EncryptionScope::Store, KEY);
                let mut bodies = vec![sealed(&ring, log)];
                let mut failures = 0;
                for nth in std::iter::once(first).chain(second) {
                    disk.fail_call(changes, nth, Errno::IO.raw_os_error());
                    failures += usize::from(ring.rotate(|| Position::new(4096)).is_err());
                    bodies.push(sealed(&ring, log));
                    disk.forget_faults();
                    // The directory opens at any time.
                    let copy = disk.copy();
                    let again = opened(&copy, EncryptionScope::Store, KEY);
                    assert!(
                        bodies.iter().all(|body| opens(&again, body)),
                        "call {first}"
                    );
                }
                if failures == 0 {
                    assert!(first > 20, "a rotation has more calls");
                    return;
                }
                ring.rotate(|| Position::new(4096)).unwrap();
                bodies.push(sealed(&ring, log));
                let again = opened(&disk, EncryptionScope::Store, KEY);
                assert!(
                    bodies.iter().all(|body| opens(&again, body)),
                    "call {first}"
                );
                // The first key, and one for each rotation that was asked for and ended.
                let ended = 2 + second.map_or(0, |_| 2 - failures);
                assert!(again.len() <= ended, "call {first}: {} keys", again.len());
            }
        }
        panic!("a rotation takes fewer calls");
    }

    #[test]
    fn crash_at_any_step_of_a_change_leaves_a_ring_with_all_used_keys() {
        for calls in 0..200 {
            let disk = SimDisk::seeded(calls);
            let ring = opened(&disk, EncryptionScope::Store, KEY);
            let old = sealed(&ring, LogId::new(1));
            disk.crash_after(calls + 1);
            let is_done = ring.rotate(|| Position::new(4096)).is_ok();
            let is_cut = disk.is_crashed();
            let new = sealed(&ring, LogId::new(1));
            disk.crash(calls);
            let again = opened(&disk, EncryptionScope::Store, KEY);
            assert!(opens(&again, &old), "call {calls}");
            assert!(opens(&again, &new), "call {calls}");
            assert!(is_done || is_cut);
            if !is_cut {
                return;
            }
        }
        panic!("a rotation takes fewer calls");
    }
}
