//! A disk in memory that behaves as badly as a real one may.
//!
//! **Power cuts.** After a [`SimDisk::crash`], a seed decides which unflushed writes survive: sector by
//! sector (512 bytes), in any order, and also beyond holes. Names created, moved or removed since the
//! last flush of their directory survive as a prefix of these changes. [`SimDisk::crash_after`] and
//! [`SimDisk::crash_when`] cut the power in the middle of any call, so that a test can cut it inside a
//! roll or inside recovery.
//!
//! **Failing calls.** Any call can fail with any error; writes can be short or find no space. A failed
//! flush loses the bytes that it should have made durable, the cache still returns them, and the next
//! flush "succeeds". A failed flush of a directory leaves its changes pending, to survive or not: a
//! file system whose journal cannot be written stops, and does not continue as if nothing had happened.
//!
//! **Unreadable sectors.** A read that covers one fails, as on Linux: through the page cache at the
//! page that holds it, around the cache as a whole. A write to a part of such a page fails too.
//!
//! **Copy on write.** Overwrites need new space, until the next flush ([`SimDisk::set_copy_on_write`]).
//!
//! **Lies.** A write can be acknowledged, flushed, and never reach the device, or reach another place
//! of the device. The cache hides this until the power is cut.
//!
//! All random choices come from seeds, including the engine's random bytes: with [`SimDisk::seeded`]
//! the same calls return the same bytes, and [`SimDisk::trace`] shows whether two runs made the same
//! calls.

mod calls;
mod inode;
mod names;
mod state;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use self::calls::Trace;
pub use self::calls::{CallKind, CutPoint, DiskCall, Filter, Lie};
use self::inode::Inode;
use self::names::{NameChange, parent};
use self::state::{Copies, SimState, WriteFailure, coin, next_random, power_is_off};
use super::{Disk, DiskFile, DiskLock, FileIdentity, FileSystem, Unreadable};

/// Unit of allocation of a file, in bytes.
const BLOCK: usize = 4096;

/// A disk in memory. Clones are the same disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<SimState>>, Arc<Unreadable>, Arc<OpenFileCount>);

impl Default for SimDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl SimDisk {
    /// An empty disk. The engine's random bytes differ for each disk.
    pub fn new() -> Self {
        let mut seed = [0; 8];
        // Without randomness two disks are alike. Only tests of foreign files would notice.
        let _drawn = getrandom::fill(&mut seed);
        Self::seeded(u64::from_le_bytes(seed))
    }

    /// An empty disk. With the same number as `seed`, the same calls return the same results.
    pub fn seeded(seed: u64) -> Self {
        Self::of(SimState {
            drawn: seed,
            copied: !seed,
            ..SimState::default()
        })
    }

    /// Cuts the power during the `calls`-th changing call from now. That call and all later calls fail
    /// until [`SimDisk::crash`].
    pub fn crash_after(&self, calls: u64) {
        let mut state = self.0.lock();
        state.crash_at = Some(state.calls + calls);
        state.crash_when = None;
    }

    /// Cuts the power later than the `nth` call that the filter chooses. `after` is the number of
    /// changing calls between the two (0: during that call).
    pub fn crash_when(&self, filter: Filter, nth: u64, after: u64) {
        let mut state = self.0.lock();
        state.crash_at = None;
        state.crash_when = Some((filter, nth, after));
    }

    /// Changing calls made so far.
    pub fn calls(&self) -> u64 {
        self.0.lock().calls
    }

    /// Whether the power is cut.
    pub fn is_crashed(&self) -> bool {
        self.0.lock().crashed
    }

    /// The call during which the power was cut, until the power is back.
    pub fn cut_point(&self) -> Option<CutPoint> {
        self.0.lock().cut.clone()
    }

    /// Cuts the power and restores it. The number `seed` decides which unflushed data survives.
    /// Pending faults are dropped.
    pub fn crash(&self, seed: u64) {
        self.0.lock().crash(seed);
    }

    /// Lets the `nth` call from now that the filter chooses (1: the next) fail once, with this error
    /// number of the system.
    pub fn fail_call(&self, filter: Filter, nth: u64, system_error: i32) {
        let mut state = self.0.lock();
        state.faults.calls.push((filter, nth.max(1), system_error));
    }

    /// Lets each call that the filter chooses fail from now on, with this error number of the system.
    pub fn fail_all(&self, filter: Filter, system_error: i32) {
        let mut state = self.0.lock();
        state.faults.kinds.push((filter, system_error));
    }

    /// While `held`, calls are not counted for [`SimDisk::fail_call`], and none fails by it.
    pub fn hold_failures(&self, held: bool) {
        self.0.lock().faults.held = held;
    }

    /// Lets the `nth` flush from now (1: the next) fail once. The bytes that it should have flushed are
    /// lost, as on Linux.
    pub fn fail_sync(&self, nth: u64) {
        let mut state = self.0.lock();
        let at = state.syncs + nth;
        state.faults.syncs.push(at);
    }

    /// Lets the `nth` write from now (1: the next) fail once. If `part` > 0, that write instead writes
    /// only `part` bytes, and the write after it fails.
    pub fn fail_write(&self, nth: u64, kind: io::ErrorKind, part: usize) {
        let mut state = self.0.lock();
        let at = state.writes + nth;
        state.faults.writes.push(WriteFailure { at, kind, part });
    }

    /// Makes `of_100` of 100 writes write only some of their bytes.
    pub fn set_short_writes(&self, of_100: u64) {
        self.0.lock().faults.short_writes = of_100;
    }

    /// Makes the device lose the `nth` write from now, or put it `elsewhere`, without an error. The
    /// number `seed` decides the place.
    pub fn lie_about_write(&self, nth: u64, elsewhere: bool, seed: u64) {
        let mut state = self.0.lock();
        let at = state.writes + nth;
        state.random = seed;
        state.faults.lies.push((at, elsewhere));
    }

    /// The lies of the device so far.
    pub fn lies(&self) -> Vec<Lie> {
        self.0.lock().lies.clone()
    }

    /// Number of faults that are still pending.
    pub fn faults_left(&self) -> usize {
        let state = self.0.lock();
        let calls = state.faults.calls.len();
        let syncs = &state.faults.syncs;
        let syncs = syncs.iter().filter(|at| **at > state.syncs).count();
        let writes = &state.faults.writes;
        let writes = writes.iter().filter(|f| f.at > state.writes).count();
        calls + syncs + writes + usize::from(state.crash_at.is_some_and(|at| at > state.calls))
    }

    /// Cancels all pending faults.
    pub fn forget_faults(&self) {
        let mut state = self.0.lock();
        state.faults = Default::default();
        state.crash_at = None;
        state.crash_when = None;
    }

    /// Writes made so far.
    pub fn writes(&self) -> u64 {
        self.0.lock().writes
    }

    /// Number of calls that read a file so far, and of the bytes they read.
    pub fn reads(&self) -> (u64, u64) {
        let state = self.0.lock();
        (state.reads, state.read_bytes)
    }

    /// Whether files can grow.
    pub fn set_full(&self, full: bool) {
        self.0.lock().full = full;
    }

    /// Limits the bytes of all files together, counted in blocks.
    pub fn set_capacity(&self, bytes: u64) {
        self.0.lock().capacity = Some(bytes);
    }

    /// Whether the disk reports more free space than writes find, as with a quota.
    pub fn hide_capacity(&self, hidden: bool) {
        self.0.lock().hides_capacity = hidden;
    }

    /// Makes each write take new blocks, even over old ones. The old blocks are free after the next
    /// flush of any file or directory. `free_bytes` are free now.
    pub fn set_copy_on_write(&self, free_bytes: usize) {
        self.0.lock().copies = Some(Copies {
            free: free_bytes / BLOCK,
            pending: 0,
        });
    }

    /// Makes files unreadable around the page cache.
    pub fn set_cached_only(&self) {
        self.0.lock().cached_only = true;
    }

    /// Whether the process has no file descriptor left: calls that need one fail with EMFILE.
    pub fn set_out_of_descriptors(&self, out: bool) {
        self.0.lock().out_of_descriptors = out;
    }

    /// Records a hash of all calls from now on, and also a list in words if `listed`.
    pub fn trace_calls(&self, listed: bool) {
        self.0.lock().trace = Some(match listed {
            true => Trace::listed(),
            false => Trace::default(),
        });
    }

    /// A hash of all calls since [`SimDisk::trace_calls`], and the list if there is one.
    pub fn trace(&self) -> (u64, Vec<String>) {
        self.0.lock().trace.clone().unwrap_or_default().told()
    }

    /// Returns a checksum of all data on the disk, in the cache and on the device.
    pub fn fingerprint(&self) -> u64 {
        let state = self.0.lock();
        let mut hasher = DefaultHasher::new();
        state.names.hash(&mut hasher);
        state.durable_names.hash(&mut hasher);
        for inode in state.names.values() {
            let Inode { bytes, device, .. } = &state.files[inode];
            (bytes, device).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Returns the contents of a file now, or `None` if the file does not exist.
    pub fn contents(&self, path: &str) -> Option<Vec<u8>> {
        let state = self.0.lock();
        let inode = state.names.get(path)?;
        state.files.get(inode).map(|inode| inode.bytes.clone())
    }

    /// Puts bytes in a file durably, as a fault at rest would. Creates the file if necessary.
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
        state.files.insert(inode, Inode::settled(bytes, path));
    }

    /// Flips bits of a byte in the page cache. The device has the right byte.
    ///
    /// # Panics
    /// If the file or the byte does not exist.
    pub fn flip_cached(&self, path: &str, at: usize, bits: u8) {
        let mut state = self.0.lock();
        let inode = state.names.get(path).copied().expect("a file of that name");
        state.inode(inode).bytes[at] ^= bits;
    }

    /// Makes these bytes of a file unreadable on the device. A write to a whole page makes that page
    /// readable.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn set_unreadable(&self, path: &str, bytes: Range<usize>) {
        let mut state = self.0.lock();
        let inode = state.names.get(path).copied().expect("a file of that name");
        state.inode(inode).unreadable.push(bytes);
    }

    /// Returns a separate disk with the same contents, all of them durable. The random bytes of the
    /// copy differ, as they would from the same device on two days.
    pub fn copy(&self) -> Self {
        let mut state = self.0.lock();
        let drawn = next_random(&mut state.copied);
        let mut copy = SimState {
            next_inode: state.next_inode,
            names: state.names.clone(),
            directories: state.directories.clone(),
            durable_names: state.names.clone(),
            capacity: state.capacity,
            hides_capacity: state.hides_capacity,
            drawn,
            copied: !drawn,
            ..SimState::default()
        };
        for (inode, file) in &state.files {
            let mut settled = Inode::settled(file.bytes.clone(), &file.path);
            settled.unreadable.clone_from(&file.unreadable);
            copy.files.insert(*inode, settled);
        }
        Self::of(copy)
    }

    /// Returns a separate disk in exactly the same state, unflushed writes included.
    pub fn copy_with_unflushed(&self) -> Self {
        let mut state = self.0.lock();
        let drawn = next_random(&mut state.copied);
        Self::of(SimState {
            files: state.files.clone(),
            next_inode: state.next_inode,
            names: state.names.clone(),
            directories: state.directories.clone(),
            durable_names: state.durable_names.clone(),
            unsynced_names: state.unsynced_names.clone(),
            capacity: state.capacity,
            hides_capacity: state.hides_capacity,
            drawn,
            copied: !drawn,
            ..SimState::default()
        })
    }

    fn of(state: SimState) -> Self {
        Self(Arc::new(Mutex::new(state)), Arc::default(), Arc::default())
    }

    /// A file that is open until it is dropped.
    fn opened(&self, inode: u64) -> Arc<SimFile> {
        let now = self.2.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.2.most.fetch_max(now, Ordering::SeqCst);
        Arc::new(SimFile {
            disk: self.clone(),
            inode,
        })
    }

    /// Maximum number of files that were open at the same time since the last call, and the number of
    /// files that are open now.
    pub fn most_open_files(&self) -> (usize, usize) {
        let now = self.2.now.load(Ordering::SeqCst);
        (self.2.most.swap(now, Ordering::SeqCst), now)
    }
}

/// Number of open files.
#[derive(Debug, Default)]
struct OpenFileCount {
    now: AtomicUsize,
    most: AtomicUsize,
}

struct SimLock {
    disk: SimDisk,
    number: u64,
}

impl DiskLock for SimLock {
    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(lock_identity(self.number))
    }
}

/// Identity of the locked file. The file has no inode, because nothing is written to it.
fn lock_identity(number: u64) -> FileIdentity {
    FileIdentity {
        device: 1,
        inode: number,
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.disk.0.lock();
        if state
            .locked
            .as_ref()
            .is_some_and(|(number, ..)| *number == self.number)
        {
            state.locked = None;
        }
    }
}

impl Disk for SimDisk {
    fn location(&self) -> String {
        "memory".to_owned()
    }

    fn lock(&self, path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::Lock, path))?;
        if let Some((_, _, holder)) = &state.locked {
            return Ok(Err(holder.clone()));
        }
        state.next_lock += 1;
        let number = state.next_lock;
        state.locked = Some((number, path.to_owned(), holder.to_owned()));
        Ok(Ok(Box::new(SimLock {
            disk: self.clone(),
            number,
        })))
    }

    fn lock_shared(&self, path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::Lock, path))?;
        Ok(match &state.locked {
            Some((_, _, holder)) => Err(holder.clone()),
            None => Ok(None),
        })
    }

    fn create_directory(&self, path: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::CreateDirectory, path))?;
        let above = parent(path);
        if !above.is_empty() && !state.directories.contains(above) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.directories.insert(path.to_owned());
        Ok(())
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::List, directory))?;
        let paths = state.names.keys();
        let mut there = paths.filter(|path| parent(path) == directory).peekable();
        // As on a real disk. Files that a test puts there create their directory.
        let is_there = directory.is_empty() || state.directories.contains(directory);
        if there.peek().is_none() && !is_there {
            return Err(io::ErrorKind::NotFound.into());
        }
        there
            .filter_map(|path| path.rsplit('/').next())
            .for_each(each);
        Ok(())
    }

    fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.0.lock();
        let stops = state.enter(&DiskCall::of(CallKind::Create, path))?;
        if state.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if state.full || state.copies.as_ref().is_some_and(|copies| copies.free == 0) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.next_inode += 1;
        let inode = state.next_inode;
        state.files.insert(inode, Inode::default());
        let change = NameChange {
            set: Some((path.to_owned(), inode)),
            removed: None,
        };
        state.change_name(change, stops)?;
        Ok(self.opened(inode))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::Open, path))?;
        let inode = *state.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.opened(inode))
    }

    fn read_direct(&self, path: &str, from: u64, bytes: u64) -> io::Result<Option<Bytes>> {
        let mut state = self.0.lock();
        state.enter(&DiskCall {
            offset: from,
            length: bytes,
            ..DiskCall::of(CallKind::ReadFromDevice, path)
        })?;
        let inode = *state.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        if state.cached_only {
            return Ok(None);
        }
        let found = Bytes::from(state.inode(inode).written_back());
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(found.len());
        let range = place(from)..place(from.saturating_add(bytes));
        state.inode(inode).check_readable(range.clone())?;
        state.count_read(range.len());
        Ok(Some(found.slice(range)))
    }

    fn unreadable(&self) -> &Unreadable {
        &self.1
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        let stops = state.enter(&DiskCall {
            to: Some(to),
            ..DiskCall::of(CallKind::Rename, from)
        })?;
        let inode = *state.names.get(from).ok_or(io::ErrorKind::NotFound)?;
        if state.copies.as_ref().is_some_and(|copies| copies.free == 0) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.1.forget(from);
        self.1.forget(to);
        let change = NameChange {
            set: Some((to.to_owned(), inode)),
            removed: Some(from.to_owned()),
        };
        state.change_name(change, stops)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        let stops = state.enter(&DiskCall::of(CallKind::Remove, path))?;
        if !state.names.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.1.forget(path);
        let change = NameChange {
            set: None,
            removed: Some(path.to_owned()),
        };
        state.change_name(change, stops)
    }

    fn sync_directory(&self, directory: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.enter(&DiskCall::of(CallKind::SyncDirectory, directory))? {
            return Err(io::Error::other("the power went during a directory flush"));
        }
        // As in a journaling file system, a flushed change includes all earlier changes.
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
        state.free_old_blocks();
        Ok(())
    }

    fn identity(&self, path: &str) -> io::Result<FileIdentity> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::Identity, path))?;
        if let Some((number, locked, _)) = &state.locked
            && locked == path
        {
            return Ok(lock_identity(*number));
        }
        let inode = state.names.get(path).copied();
        let inode = inode.ok_or(io::ErrorKind::NotFound)?;
        Ok(FileIdentity { device: 0, inode })
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::FreeBytes, ""))?;
        let free = |capacity: u64| capacity.saturating_sub(state.allocated());
        let copies = state.copies.as_ref();
        let copies = copies.map(|copies| (copies.free * BLOCK) as u64);
        Ok(match state.full {
            true => Some(0),
            false if state.hides_capacity => Some(u64::MAX >> 8),
            false => state.capacity.map(free).or(copies),
        })
    }

    fn file_system(&self) -> FileSystem {
        FileSystem {
            name: "memory".to_owned(),
            volatile: true,
            caveats: vec!["the data directory is in memory".to_owned()],
        }
    }

    fn draw(&self, bytes: &mut [u8]) -> io::Result<()> {
        let mut state = self.0.lock();
        state.enter(&DiskCall::of(CallKind::Draw, ""))?;
        for part in bytes.chunks_mut(8) {
            let drawn = next_random(&mut state.drawn).to_le_bytes();
            part.copy_from_slice(&drawn[..part.len()]);
        }
        Ok(())
    }
}

struct SimFile {
    disk: SimDisk,
    inode: u64,
}

impl Drop for SimFile {
    fn drop(&mut self) {
        self.disk.2.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl SimFile {
    /// Enters a call on this file.
    fn enter(&self, state: &mut SimState, call: &DiskCall<'_>) -> io::Result<bool> {
        let path = std::mem::take(&mut state.inode(self.inode).path);
        let entered = state.enter(&DiskCall {
            path: &path,
            ..*call
        });
        state.inode(self.inode).path = path;
        entered
    }
}

impl DiskFile for SimFile {
    fn identity(&self) -> io::Result<FileIdentity> {
        let inode = self.inode;
        Ok(FileIdentity { device: 0, inode })
    }

    fn size(&self) -> io::Result<u64> {
        let mut state = self.disk.0.lock();
        self.enter(&mut state, &DiskCall::of(CallKind::Size, ""))?;
        Ok(state.inode(self.inode).bytes.len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.0.lock();
        let call = DiskCall {
            offset,
            length: buffer.len() as u64,
            ..DiskCall::of(CallKind::Read, "")
        };
        self.enter(&mut state, &call)?;
        let read = state.inode(self.inode).read_at(buffer, offset)?;
        state.count_read(read);
        Ok(read)
    }

    /// Everything except an unreadable stretch is in memory.
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.0.lock();
        if state.crashed {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let read = state.inode(self.inode).read_at(buffer, offset);
        read.map_err(|_| io::ErrorKind::WouldBlock.into())
    }

    fn note_unreadable(&self, bytes: Range<u64>) {
        let path = self.disk.0.lock().inode(self.inode).path.clone();
        self.disk.1.note(&path, bytes);
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.0.lock();
        let call = DiskCall {
            offset,
            bytes,
            ..DiskCall::of(CallKind::Write, "")
        };
        let stops = self.enter(&mut state, &call)?;
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let bytes = state.write_failure(bytes)?;
        let allocated = state.inode(self.inode).bytes.len().next_multiple_of(BLOCK);
        let grows = (offset + bytes.len()).saturating_sub(allocated);
        let grows = grows.next_multiple_of(BLOCK) as u64;
        let fits = |capacity| state.allocated() + grows <= capacity;
        if grows > 0 && (state.full || !state.capacity.is_none_or(fits)) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let bytes = state.take_blocks(self.inode, offset, bytes)?;
        state
            .inode(self.inode)
            .check_writable(offset..offset + bytes.len())?;
        if stops {
            let part = usize::try_from(state.random() % (bytes.len() as u64 + 1)).unwrap_or(0);
            state.inode(self.inode).write(&bytes[..part], offset);
            return Err(io::Error::other("the power went during a write"));
        }
        state.write_back_before_lie(self.inode);
        state.inode(self.inode).write(bytes, offset);
        state.lie(self.inode, offset, bytes.len());
        Ok(bytes.len())
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        let call = DiskCall {
            offset: bytes,
            ..DiskCall::of(CallKind::SetSize, "")
        };
        if self.enter(&mut state, &call)? {
            return Err(io::Error::other("the power went during a change of size"));
        }
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        let before = state.inode(self.inode).bytes.len().div_ceil(BLOCK);
        state.give_blocks(before.saturating_sub(size.div_ceil(BLOCK)));
        state.inode(self.inode).resize(size);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        let entered = self.enter(&mut state, &DiskCall::of(CallKind::Sync, ""));
        if state.crashed {
            return Err(power_is_off());
        }
        state.syncs += 1;
        let this = state.syncs;
        let failed = state.faults.syncs.contains(&this);
        if let Err(error) = entered {
            // Some of the bytes may have reached the device.
            let mut seed = state.random();
            state.inode(self.inode).fail_sync(|| coin(&mut seed));
            return Err(error);
        }
        if failed {
            state.inode(self.inode).fail_sync(|| false);
            return Err(io::Error::other("a flush failed"));
        }
        state.inode(self.inode).sync();
        state.free_old_blocks();
        Ok(())
    }
}
