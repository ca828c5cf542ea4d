//! A disk in memory that behaves as badly as a real one may at a power cut.
//!
//! What was written and not flushed survives a [`SimDisk::crash`] sector by sector
//! (512 bytes) as a seed decides, in any order, beyond holes. Names made, moved or
//! removed since their directory was flushed survive as a prefix of what was done.
//! [`SimDisk::crash_after`] stops the world in the middle of any call, so that a
//! test can cut the power inside a roll or inside recovery.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

use super::{Disk, DiskFile, DiskLock, FileSystem};

const SECTOR: usize = 512;
/// What a file is allocated in.
const BLOCK: usize = 4096;

/// A disk in memory. Clones are the same disk.
#[derive(Clone, Default)]
pub struct SimDisk(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    files: HashMap<u64, Inode>,
    next_inode: u64,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    unsynced_names: Vec<NameChange>,
    locked: Option<(u64, String)>,
    next_lock: u64,
    calls: u64,
    crash_at: Option<u64>,
    crashed: bool,
    random: u64,
    sync_failures: Vec<u64>,
    syncs: u64,
    write_failures: Vec<WriteFailure>,
    writes: u64,
    full: bool,
}

#[derive(Default)]
struct Inode {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
}

struct WriteFailure {
    /// Which write.
    at: u64,
    kind: io::ErrorKind,
    /// So much of it is written before, as a short write.
    part: usize,
}

#[derive(Clone)]
struct NameChange {
    /// New place of the name and what it names; `None` = only removed.
    set: Option<(String, u64)>,
    removed: Option<String>,
}

impl NameChange {
    fn touches(&self, directory: &str) -> bool {
        let within = |path: &String| parent(path) == directory;
        self.set.as_ref().is_some_and(|(path, _)| within(path))
            || self.removed.as_ref().is_some_and(within)
    }

    fn apply(&self, names: &mut BTreeMap<String, u64>) {
        if let Some(path) = &self.removed {
            names.remove(path);
        }
        if let Some((path, inode)) = &self.set {
            names.insert(path.clone(), *inode);
        }
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

impl State {
    /// SplitMix64: enough for choosing what survives, and the same on every machine.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Counts one changing call; `Ok(true)` = the power goes during it.
    fn call(&mut self) -> io::Result<bool> {
        if self.crashed {
            return Err(io::Error::other("the power is off"));
        }
        self.calls += 1;
        if self.crash_at == Some(self.calls) {
            self.crashed = true;
            return Ok(true);
        }
        Ok(false)
    }

    fn alive(&self) -> io::Result<()> {
        if self.crashed {
            return Err(io::Error::other("the power is off"));
        }
        Ok(())
    }

    /// How much of a write gets through now, or why nothing does.
    fn write_failure<'a>(&mut self, bytes: &'a [u8]) -> io::Result<&'a [u8]> {
        self.writes += 1;
        let this = self.writes;
        let Some(failure) = self.write_failures.iter_mut().find(|f| f.at == this) else {
            return Ok(bytes);
        };
        let part = failure.part.min(bytes.len().saturating_sub(1));
        if part == 0 {
            return Err(failure.kind.into());
        }
        failure.part = 0;
        failure.at += 1;
        Ok(&bytes[..part])
    }

    fn inode(&mut self, inode: u64) -> &mut Inode {
        self.files.entry(inode).or_default()
    }

    fn change_name(&mut self, change: NameChange) -> io::Result<()> {
        let stops = self.call()?;
        change.apply(&mut self.names);
        self.unsynced_names.push(change);
        if stops {
            return Err(io::Error::other("the power went during a change of names"));
        }
        Ok(())
    }
}

impl Inode {
    fn write(&mut self, bytes: &[u8], offset: usize) {
        let end = offset + bytes.len();
        if self.bytes.len() < end {
            let from = self.bytes.len();
            self.bytes.resize(end, 0);
            self.mark(from, end);
        }
        self.bytes[offset..end].copy_from_slice(bytes);
        self.mark(offset, end);
    }

    fn mark(&mut self, from: usize, to: usize) {
        if from < to {
            self.dirty.extend(from / SECTOR..=(to - 1) / SECTOR);
        }
    }

    fn sync(&mut self) {
        self.durable.resize(self.bytes.len(), 0);
        for sector in std::mem::take(&mut self.dirty) {
            let from = sector * SECTOR;
            let to = (from + SECTOR).min(self.bytes.len());
            if from < to {
                self.durable[from..to].copy_from_slice(&self.bytes[from..to]);
            }
        }
    }

    /// `survives` decides for each unflushed sector.
    fn crash(&mut self, keep_size: bool, mut survives: impl FnMut() -> bool) {
        let size = if keep_size {
            self.bytes.len()
        } else {
            self.durable.len()
        };
        let mut after = self.durable.clone();
        after.resize(size, 0);
        for sector in std::mem::take(&mut self.dirty) {
            let from = sector * SECTOR;
            let to = (from + SECTOR).min(size).min(self.bytes.len());
            if survives() && from < to {
                after[from..to].copy_from_slice(&self.bytes[from..to]);
            }
        }
        self.bytes.clone_from(&after);
        self.durable = after;
    }
}

impl SimDisk {
    /// An empty disk.
    pub fn new() -> Self {
        Self::default()
    }

    /// The power goes during the `calls`-th changing call from now; that call and all
    /// later ones fail until [`SimDisk::crash`].
    pub fn crash_after(&self, calls: u64) {
        let mut state = self.0.lock();
        state.crash_at = Some(state.calls + calls);
    }

    /// Changing calls made so far.
    pub fn calls(&self) -> u64 {
        self.0.lock().calls
    }

    /// Whether the power went.
    pub fn is_crashed(&self) -> bool {
        self.0.lock().crashed
    }

    /// Cuts the power and brings it back: of what was not flushed, `seed` decides what
    /// survives.
    pub fn crash(&self, seed: u64) {
        let mut state = self.0.lock();
        state.random = seed;
        let kept = state.unsynced_names.len() as u64 + 1;
        let kept = usize::try_from(state.random() % kept).unwrap_or(0);
        let changes = std::mem::take(&mut state.unsynced_names);
        let mut names = std::mem::take(&mut state.durable_names);
        changes
            .iter()
            .take(kept)
            .for_each(|change| change.apply(&mut names));
        // One choice for all files: nothing, everything, or sector by sector.
        let manner = state.random() % 4;
        let mut inodes: Vec<u64> = state.files.keys().copied().collect();
        inodes.sort_unstable();
        for inode in inodes {
            let mut seed = state.random();
            let keep_size = seed & 1 == 1;
            let survives = || match manner {
                0 => false,
                1 => true,
                _ => {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) & 1 == 1
                }
            };
            state.inode(inode).crash(keep_size, survives);
        }
        let alive: BTreeSet<u64> = names.values().copied().collect();
        state.files.retain(|inode, _| alive.contains(inode));
        state.names = names.clone();
        state.durable_names = names;
        state.crashed = false;
        state.crash_at = None;
        state.write_failures.clear();
        state.locked = None;
    }

    /// The `nth` flush from now fails once (1 = the next), and with it what it should
    /// have flushed is gone, as on Linux.
    pub fn fail_sync(&self, nth: u64) {
        let mut state = self.0.lock();
        let at = state.syncs + nth;
        state.sync_failures.push(at);
    }

    /// The `nth` write from now (1 = the next) fails once, after `part` of its bytes were
    /// written: these are a short write, and the next write is the one that fails.
    pub fn fail_write(&self, nth: u64, kind: io::ErrorKind, part: usize) {
        let mut state = self.0.lock();
        let at = state.writes + nth;
        state.write_failures.push(WriteFailure { at, kind, part });
    }

    /// Writes made so far.
    pub fn writes(&self) -> u64 {
        self.0.lock().writes
    }

    /// Whether files can grow.
    pub fn set_full(&self, full: bool) {
        self.0.lock().full = full;
    }

    /// What a file holds now, or `None` if there is none.
    pub fn contents(&self, path: &str) -> Option<Vec<u8>> {
        let state = self.0.lock();
        let inode = state.names.get(path)?;
        state.files.get(inode).map(|inode| inode.bytes.clone())
    }

    /// Puts bytes in a file, durably, as a fault at rest would; creates it if need be.
    pub fn replace(&self, path: &str, bytes: Vec<u8>) {
        let mut state = self.0.lock();
        let inode = match state.names.get(path) {
            Some(inode) => *inode,
            None => {
                state.next_inode += 1;
                let inode = state.next_inode;
                state.names.insert(path.to_owned(), inode);
                state.durable_names.insert(path.to_owned(), inode);
                inode
            }
        };
        let file = state.inode(inode);
        file.durable.clone_from(&bytes);
        file.bytes = bytes;
        file.dirty.clear();
    }

    /// A disk of its own with the same contents, everything on it durable.
    pub fn copy(&self) -> Self {
        let state = self.0.lock();
        let mut copy = State {
            next_inode: state.next_inode,
            names: state.names.clone(),
            durable_names: state.names.clone(),
            ..State::default()
        };
        for (inode, file) in &state.files {
            let bytes = file.bytes.clone();
            let durable = bytes.clone();
            copy.files.insert(
                *inode,
                Inode {
                    bytes,
                    durable,
                    dirty: BTreeSet::new(),
                },
            );
        }
        Self(Arc::new(Mutex::new(copy)))
    }
}

#[cfg(test)]
impl SimDisk {
    /// A disk of its own in the very same state, unflushed writes included.
    pub(crate) fn copy_with_unflushed(&self) -> Self {
        let state = self.0.lock();
        let mut copy = State {
            next_inode: state.next_inode,
            names: state.names.clone(),
            durable_names: state.durable_names.clone(),
            unsynced_names: state.unsynced_names.clone(),
            ..State::default()
        };
        for (inode, file) in &state.files {
            let Inode {
                bytes,
                durable,
                dirty,
            } = file;
            let (bytes, durable, dirty) = (bytes.clone(), durable.clone(), dirty.clone());
            copy.files.insert(
                *inode,
                Inode {
                    bytes,
                    durable,
                    dirty,
                },
            );
        }
        Self(Arc::new(Mutex::new(copy)))
    }
}

struct SimLock {
    disk: SimDisk,
    number: u64,
}

impl DiskLock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.disk.0.lock();
        if state
            .locked
            .as_ref()
            .is_some_and(|(number, _)| *number == self.number)
        {
            state.locked = None;
        }
    }
}

impl Disk for SimDisk {
    fn location(&self) -> String {
        "memory".to_owned()
    }

    fn lock(&self, _path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        let mut state = self.0.lock();
        state.alive()?;
        if let Some((_, holder)) = &state.locked {
            return Ok(Err(holder.clone()));
        }
        state.next_lock += 1;
        let number = state.next_lock;
        state.locked = Some((number, holder.to_owned()));
        Ok(Ok(Box::new(SimLock {
            disk: self.clone(),
            number,
        })))
    }

    fn lock_shared(&self, _path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        let state = self.0.lock();
        state.alive()?;
        Ok(match &state.locked {
            Some((_, holder)) => Err(holder.clone()),
            None => Ok(None),
        })
    }

    fn create_directory(&self, _path: &str) -> io::Result<()> {
        self.0.lock().alive()
    }

    fn list(&self, directory: &str) -> io::Result<Vec<String>> {
        let state = self.0.lock();
        state.alive()?;
        Ok(state
            .names
            .keys()
            .filter(|path| parent(path) == directory)
            .filter_map(|path| path.rsplit('/').next().map(str::to_owned))
            .collect())
    }

    fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.0.lock();
        state.alive()?;
        if state.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if state.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.next_inode += 1;
        let inode = state.next_inode;
        state.files.insert(inode, Inode::default());
        state.change_name(NameChange {
            set: Some((path.to_owned(), inode)),
            removed: None,
        })?;
        Ok(Arc::new(SimFile {
            disk: self.clone(),
            inode,
        }))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let state = self.0.lock();
        state.alive()?;
        let inode = *state.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(SimFile {
            disk: self.clone(),
            inode,
        }))
    }

    fn read_from_device(&self, path: &str, bytes: u64) -> io::Result<Option<Bytes>> {
        let mut state = self.0.lock();
        state.alive()?;
        let inode = *state.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        let inode = state.inode(inode);
        // As on Linux, what is dirty is written back first; what is clean is what the
        // device has, whatever the cache says.
        let mut found = inode.durable.clone();
        found.resize(inode.bytes.len(), 0);
        for sector in &inode.dirty {
            let to = (sector * SECTOR + SECTOR).min(found.len());
            let range = (sector * SECTOR).min(to)..to;
            found[range.clone()].copy_from_slice(&inode.bytes[range]);
        }
        found.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(Some(found.into()))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        state.alive()?;
        let inode = *state.names.get(from).ok_or(io::ErrorKind::NotFound)?;
        state.change_name(NameChange {
            set: Some((to.to_owned(), inode)),
            removed: Some(from.to_owned()),
        })
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        state.alive()?;
        if !state.names.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.change_name(NameChange {
            set: None,
            removed: Some(path.to_owned()),
        })
    }

    fn sync_directory(&self, directory: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.call()? {
            return Err(io::Error::other("the power went during a directory flush"));
        }
        // As in a journaling file system, a change comes with all that came before it.
        let last = state
            .unsynced_names
            .iter()
            .rposition(|change| change.touches(directory));
        let flushed: Vec<_> = state
            .unsynced_names
            .drain(..last.map_or(0, |l| l + 1))
            .collect();
        flushed
            .iter()
            .for_each(|change| change.apply(&mut state.durable_names));
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(self.0.lock().full.then_some(0))
    }

    fn file_system(&self) -> FileSystem {
        FileSystem {
            name: "memory".to_owned(),
            volatile: true,
            warning: Some("the data directory is in memory".to_owned()),
        }
    }
}

struct SimFile {
    disk: SimDisk,
    inode: u64,
}

impl DiskFile for SimFile {
    fn size(&self) -> io::Result<u64> {
        let mut state = self.disk.0.lock();
        state.alive()?;
        Ok(state.inode(self.inode).bytes.len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.0.lock();
        state.alive()?;
        let bytes = &state.inode(self.inode).bytes;
        let offset = usize::try_from(offset)
            .map_err(io::Error::other)?
            .min(bytes.len());
        let count = buffer.len().min(bytes.len() - offset);
        buffer[..count].copy_from_slice(&bytes[offset..offset + count]);
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.0.lock();
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let stops = state.call()?;
        let bytes = state.write_failure(bytes)?;
        let allocated = state.inode(self.inode).bytes.len().next_multiple_of(BLOCK);
        if state.full && offset + bytes.len() > allocated {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if stops {
            let part = usize::try_from(state.random() % (bytes.len() as u64 + 1)).unwrap_or(0);
            state.inode(self.inode).write(&bytes[..part], offset);
            return Err(io::Error::other("the power went during a write"));
        }
        state.inode(self.inode).write(bytes, offset);
        Ok(bytes.len())
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        if state.call()? {
            return Err(io::Error::other("the power went during a change of size"));
        }
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        let inode = state.inode(self.inode);
        let before = inode.bytes.len();
        inode.bytes.resize(size, 0);
        inode.mark(before, size);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        if state.call()? {
            return Err(io::Error::other("the power went during a flush"));
        }
        state.syncs += 1;
        let this = state.syncs;
        if state.sync_failures.contains(&this) {
            // What was dirty is marked clean in the cache and never reaches the device.
            state.inode(self.inode).dirty.clear();
            return Err(io::Error::other("a flush failed"));
        }
        state.inode(self.inode).sync();
        Ok(())
    }
}
