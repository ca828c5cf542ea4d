//! State of a simulated disk, and its pending faults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use super::BLOCK;
use super::calls::{CallKind, CutPoint, DiskCall, Filter, Lie, Trace};
use super::inode::Inode;
use super::names::NameChange;

const SECTOR: u64 = 512;

#[derive(Default)]
pub(super) struct SimState {
    pub(super) files: HashMap<u64, Inode>,
    pub(super) next_inode: u64,
    pub(super) names: BTreeMap<String, u64>,
    /// Directories that were created. They survive power cuts.
    pub(super) directories: BTreeSet<String>,
    pub(super) durable_names: BTreeMap<String, u64>,
    pub(super) unsynced_names: Vec<NameChange>,
    /// Number, path and holder of the lock.
    pub(super) locked: Option<(u64, String, String)>,
    pub(super) next_lock: u64,
    /// Number of changing calls so far.
    pub(super) calls: u64,
    pub(super) crash_at: Option<u64>,
    /// Cuts the power this number of changing calls after the `nth` call that the filter chooses.
    pub(super) crash_when: Option<(Filter, u64, u64)>,
    pub(super) crashed: bool,
    pub(super) cut: Option<CutPoint>,
    /// Source of choices, for survival of data and short writes. Each power cut resets it.
    pub(super) random: u64,
    /// Source of the engine's random bytes. It is separate: the same salt twice would prove nothing.
    pub(super) drawn: u64,
    /// Seed from which copies of the disk draw.
    pub(super) copied: u64,
    pub(super) faults: Faults,
    pub(super) syncs: u64,
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) read_bytes: u64,
    pub(super) full: bool,
    /// Maximum number of bytes of all files together.
    pub(super) capacity: Option<u64>,
    pub(super) hides_capacity: bool,
    /// Free blocks, if writes copy.
    pub(super) copies: Option<Copies>,
    /// Whether no file can be read around the page cache.
    pub(super) cached_only: bool,
    pub(super) out_of_descriptors: bool,
    pub(super) trace: Option<Trace>,
    pub(super) lies: Vec<Lie>,
}

/// Blocks of a disk on which writes copy.
pub(super) struct Copies {
    pub(super) free: usize,
    /// Blocks that are free after the next flush.
    pub(super) pending: usize,
}

/// Pending faults, each with the number of the call that fails.
#[derive(Default)]
pub(super) struct Faults {
    /// Filter of the calls, number of these calls until one fails, and number of the system's error.
    pub(super) calls: Vec<(Filter, u64, i32)>,
    /// Filters of calls that all fail, and numbers of the system's errors.
    pub(super) kinds: Vec<(Filter, i32)>,
    /// While set, calls are not counted, and none fails.
    pub(super) held: bool,
    pub(super) syncs: Vec<u64>,
    pub(super) writes: Vec<WriteFailure>,
    /// Writes that the device loses (`false`) or puts elsewhere (`true`).
    pub(super) lies: Vec<(u64, bool)>,
    /// Number of short writes in 100 writes.
    pub(super) short_writes: u64,
}

pub(super) struct WriteFailure {
    /// Number of the write.
    pub(super) at: u64,
    pub(super) kind: io::ErrorKind,
    /// Bytes that a short write writes before the failure.
    pub(super) part: usize,
}

/// SplitMix64: good enough for choices, and equal on every machine.
pub(super) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub(super) fn power_is_off() -> io::Error {
    io::Error::other("the power is off")
}

impl SimState {
    /// Bytes of all files with a name, in whole blocks.
    pub(super) fn allocated(&self) -> u64 {
        let files = self
            .names
            .values()
            .filter_map(|inode| self.files.get(inode));
        files
            .map(|file| file.bytes.len().next_multiple_of(BLOCK) as u64)
            .sum()
    }

    pub(super) fn random(&mut self) -> u64 {
        next_random(&mut self.random)
    }

    /// Counts and records one call; `Ok(true)`: the power is cut during the call.
    ///
    /// # Errors
    /// If the power is off, or if the call must fail.
    pub(super) fn enter(&mut self, call: &DiskCall<'_>) -> io::Result<bool> {
        if self.crashed {
            return Err(power_is_off());
        }
        if let Some(trace) = &mut self.trace {
            trace.add(call);
        }
        if call.kind.changes() {
            self.calls += 1;
            self.look_ahead(call);
            if self.crash_at == Some(self.calls) {
                self.crashed = true;
                self.cut = Some(self.cut_point(call));
                return Ok(true);
            }
        }
        self.fail(call)?;
        Ok(false)
    }

    /// Fails a call if a pending fault requires it.
    fn fail(&mut self, call: &DiskCall<'_>) -> io::Result<()> {
        if self.out_of_descriptors && call.kind.takes_descriptor() {
            return Err(rustix::io::Errno::MFILE.into());
        }
        if self.faults.held {
            return Ok(());
        }
        let kind = self.faults.kinds.iter().find(|(filter, _)| filter(call));
        let mut failed = kind.map_or(Ok(()), |(_, error)| {
            Err(io::Error::from_raw_os_error(*error))
        });
        self.faults.calls.retain_mut(|(filter, nth, error)| {
            *nth -= u64::from(filter(call));
            if *nth == 0 {
                failed = Err(io::Error::from_raw_os_error(*error));
            }
            *nth > 0
        });
        failed
    }

    /// Sets the moment of the power cut, if that moment depends on this call.
    fn look_ahead(&mut self, call: &DiskCall<'_>) {
        if let Some((filter, nth, after)) = &mut self.crash_when
            && filter(call)
        {
            *nth = nth.saturating_sub(1);
            if *nth == 0 {
                self.crash_at = Some(self.calls + *after);
                self.crash_when = None;
            }
        }
    }

    /// Counts a call that read a file.
    pub(super) fn count_read(&mut self, bytes: usize) {
        self.reads += 1;
        self.read_bytes += bytes as u64;
    }

    fn cut_point(&self, call: &DiskCall<'_>) -> CutPoint {
        let mut writes = Vec::new();
        let mut names = Vec::new();
        match call.kind {
            CallKind::Write => writes.push((call.offset, call.bytes.to_vec())),
            CallKind::Sync => {
                let inode = self.names.get(call.path);
                if let Some(inode) = inode.and_then(|inode| self.files.get(inode)) {
                    for (offset, length) in &inode.unflushed {
                        let end = (offset + length).min(inode.bytes.len());
                        let bytes = inode.bytes.get(*offset..end).unwrap_or(&[]);
                        writes.push((*offset as u64, bytes.to_vec()));
                    }
                }
            }
            CallKind::SyncDirectory => {
                let changes = self.unsynced_names.iter();
                let these = changes.filter(|change| change.touches(call.path));
                names.extend(these.map(NameChange::told));
            }
            CallKind::Create => names.push((None, Some(call.path.to_owned()))),
            _ => names.push((Some(call.path.to_owned()), call.to.map(str::to_owned))),
        }
        CutPoint {
            kind: call.kind,
            path: call.path.to_owned(),
            writes,
            names,
        }
    }

    /// Returns the part of a write that succeeds now, or its error.
    pub(super) fn write_failure<'a>(&mut self, bytes: &'a [u8]) -> io::Result<&'a [u8]> {
        self.writes += 1;
        let this = self.writes;
        let Some(failure) = self.faults.writes.iter_mut().find(|f| f.at == this) else {
            let short = self.faults.short_writes;
            if short > 0 && bytes.len() > 1 && self.random() % 100 < short {
                let part = self.random() % (bytes.len() as u64 - 1) + 1;
                return Ok(&bytes[..usize::try_from(part).unwrap_or(1)]);
            }
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

    /// Takes the blocks of a write, if writes copy. Returns the part of the write that has blocks.
    pub(super) fn take_blocks<'a>(
        &mut self,
        inode: u64,
        offset: usize,
        bytes: &'a [u8],
    ) -> io::Result<&'a [u8]> {
        let allocated = self.inode(inode).bytes.len().div_ceil(BLOCK);
        let Some(copies) = self.copies.as_mut().filter(|_| !bytes.is_empty()) else {
            return Ok(bytes);
        };
        let first = offset / BLOCK;
        let last = (offset + bytes.len())
            .div_ceil(BLOCK)
            .min(first + copies.free);
        if last == first {
            return Err(io::ErrorKind::StorageFull.into());
        }
        copies.free -= last - first;
        copies.pending += last.min(allocated).saturating_sub(first);
        Ok(&bytes[..bytes.len().min(last * BLOCK - offset)])
    }

    /// Frees blocks of a file after the next flush.
    pub(super) fn give_blocks(&mut self, blocks: usize) {
        if let Some(copies) = &mut self.copies {
            copies.pending += blocks;
        }
    }

    /// Frees the old blocks after a flush.
    pub(super) fn free_old_blocks(&mut self) {
        if let Some(copies) = &mut self.copies {
            copies.free += std::mem::take(&mut copies.pending);
        }
    }

    /// Puts the bytes before a write that will be lost on the device: a system may write them back at
    /// any time.
    pub(super) fn write_back_before_lie(&mut self, inode: u64) {
        if self.faults.lies.iter().any(|(at, _)| *at == self.writes) {
            self.inode(inode).sync();
        }
    }

    /// Loses the last write, if that was planned.
    pub(super) fn lie(&mut self, inode: u64, offset: usize, length: usize) {
        let this = self.writes;
        let planned = self.faults.lies.iter().find(|(at, _)| *at == this);
        let Some(elsewhere) = planned.map(|(_, elsewhere)| *elsewhere) else {
            return;
        };
        let file = self.inode(inode);
        let path = file.path.clone();
        let (from, bytes) = file.lose(offset, length);
        let mut lie = Lie {
            path,
            sectors: (from as u64, bytes.len() as u64),
            write: this,
            landed: None,
        };
        if elsewhere {
            lie.landed = self.land(&bytes);
        }
        self.lies.push(lie);
    }

    /// Puts bytes meant for another place at a random place on the device.
    fn land(&mut self, bytes: &[u8]) -> Option<(String, u64)> {
        let files: Vec<(String, u64, u64)> = self
            .names
            .iter()
            .map(|(path, inode)| (path, inode, self.files[inode].device.len() as u64))
            .filter(|(_, _, size)| *size > 0)
            .map(|(path, inode, size)| (path.clone(), *inode, size))
            .collect();
        let chosen = self.random() % (files.len() as u64).max(1);
        let (path, inode, size) = files.get(usize::try_from(chosen).ok()?)?.clone();
        let sector = self.random() % size.div_ceil(SECTOR);
        let offset = usize::try_from(sector * SECTOR).ok()?;
        self.inode(inode).hit(offset, bytes);
        Some((path, sector * SECTOR))
    }

    pub(super) fn inode(&mut self, inode: u64) -> &mut Inode {
        self.files.entry(inode).or_default()
    }

    pub(super) fn change_name(&mut self, change: NameChange, stops: bool) -> io::Result<()> {
        let gone = match &change {
            NameChange {
                set: Some((path, _)),
                ..
            } => self.names.get(path),
            NameChange { removed, .. } => removed.as_ref().and_then(|path| self.names.get(path)),
        };
        if let Some(gone) = gone.copied() {
            let blocks = self.inode(gone).bytes.len().div_ceil(BLOCK);
            self.give_blocks(blocks);
        }
        change.apply(&mut self.names);
        if let Some((path, inode)) = &change.set {
            self.inode(*inode).path.clone_from(path);
        }
        self.unsynced_names.push(change);
        if stops {
            return Err(io::Error::other("the power went during a change of names"));
        }
        Ok(())
    }

    /// Cuts the power and restores it.
    pub(super) fn crash(&mut self, seed: u64) {
        self.random = seed;
        let kept = self.unsynced_names.len() as u64 + 1;
        let kept = usize::try_from(self.random() % kept).unwrap_or(0);
        let changes = std::mem::take(&mut self.unsynced_names);
        let mut names = std::mem::take(&mut self.durable_names);
        changes
            .iter()
            .take(kept)
            .for_each(|change| change.apply(&mut names));
        // One choice for all files: nothing, everything, or sector by sector.
        let manner = self.random() % 4;
        let mut inodes: Vec<u64> = self.files.keys().copied().collect();
        inodes.sort_unstable();
        for inode in inodes {
            let mut seed = self.random();
            let keep_size = seed & 1 == 1;
            let survives = || match manner {
                0 => false,
                1 => true,
                _ => coin(&mut seed),
            };
            self.inode(inode).crash(keep_size, survives);
        }
        let alive: BTreeSet<u64> = names.values().copied().collect();
        self.files.retain(|inode, _| alive.contains(inode));
        for (path, inode) in &names {
            self.inode(*inode).path.clone_from(path);
        }
        self.names.clone_from(&names);
        self.durable_names = names;
        self.free_old_blocks();
        self.crashed = false;
        self.crash_at = None;
        self.crash_when = None;
        self.cut = None;
        self.faults = Faults::default();
        self.locked = None;
    }
}

pub(super) fn coin(seed: &mut u64) -> bool {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*seed >> 33) & 1 == 1
}
