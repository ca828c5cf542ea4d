//! Points of power cuts: the activity of the engine, derived from the call that was cut off.

use std::collections::BTreeMap;

use crate::base::bounds::LIFE_BYTES;
use crate::disk::{CallKind, CutPoint, DiskCall, Filter};
use crate::format::frame::FrameKind;

/// Phase of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Start,
    Work,
    Close,
}

/// The kinds of the frames that a write holds.
fn kinds(mut bytes: &[u8]) -> Vec<u8> {
    let mut kinds = Vec::new();
    while let Some(header) = bytes.first_chunk::<64>() {
        let of = |at: usize, count: usize| {
            let mut number = [0; 8];
            number[..count].copy_from_slice(&header[at..at + count]);
            usize::try_from(u64::from_le_bytes(number)).unwrap()
        };
        let length = (of(4, 2) * 8 + of(8, 4)).next_multiple_of(8);
        if length == 0 {
            break;
        }
        kinds.push(header[7]);
        bytes = bytes.get(length..).unwrap_or(&[]);
    }
    kinds
}

fn is_segment(path: &str) -> bool {
    path.starts_with("journal/")
}

/// The number in a segment's name, in any directory.
fn number(path: &str) -> Option<&str> {
    path.rsplit('/').next()
}

/// Purpose of a rename: `recycle` for a file of an earlier life, otherwise its directory.
fn of_name(from: Option<&str>, to: Option<&str>) -> &'static str {
    match (from, to) {
        (Some(from), Some(to)) if is_segment(from) && to.starts_with("pool/") => "recycle",
        (Some(from), Some(to)) if from.starts_with("pool/") => match number(from) == number(to) {
            true => "pool",
            false => "recycle",
        },
        (from, to) => of_path(to.or(from).unwrap_or_default()),
    }
}

fn of_path(path: &str) -> &'static str {
    match path.split_once('/') {
        Some(("pool", _)) => "pool",
        Some(("index", _)) => "index",
        Some(("checkpoint", _)) => "checkpoint",
        Some(("quarantine", _)) => "quarantine",
        Some(("sorted", _)) => "sorting",
        Some(_) => "old tail",
        None if path.starts_with("BEGUN") => "BEGUN",
        None => "FORMAT",
    }
}

/// Whether a life block is written to a file whose name has another number.
fn is_new_life(path: &str, writes: &[(u64, Vec<u8>)]) -> bool {
    writes.iter().any(|(offset, bytes)| {
        let id = bytes.get(24..32).map(|id| {
            let id = u64::from_le_bytes(id.try_into().unwrap());
            format!("{id:016x}.seg")
        });
        *offset == 0 && bytes.starts_with(b"WALDSEG\0") && id.as_deref() != number(path)
    })
}

fn of_frames(phase: Phase, kinds: &[u8]) -> &'static str {
    let has = |kind: FrameKind| kinds.contains(&(kind as u8));
    match phase {
        Phase::Start if has(FrameKind::Link) => "link",
        Phase::Close if has(FrameKind::Seal) => "last seal",
        _ if has(FrameKind::Link) || has(FrameKind::Seal) => "roll",
        _ if has(FrameKind::Deleted) => "delete",
        _ if has(FrameKind::Trim) => "trim",
        _ if has(FrameKind::Fence) => "fence",
        _ if has(FrameKind::Cursor) => "cursor",
        _ if has(FrameKind::Created) || has(FrameKind::Configured) => "settings",
        _ if has(FrameKind::Batch) => "append",
        _ if has(FrameKind::Marker) => "marker",
        _ => "flush",
    }
}

fn what(phase: Phase, point: &CutPoint) -> &'static str {
    let CutPoint {
        kind,
        path,
        writes,
        names,
    } = point;
    match kind {
        CallKind::Write | CallKind::Sync if is_segment(path) => {
            let void = |(_, bytes): &(u64, Vec<u8>)| bytes.iter().all(|byte| *byte == 0);
            if !writes.is_empty() && writes.iter().all(void) {
                return "void";
            }
            let all: Vec<u8> = writes.iter().flat_map(|(_, bytes)| kinds(bytes)).collect();
            of_frames(phase, &all)
        }
        CallKind::Write | CallKind::Sync if path.starts_with("pool/") => {
            match is_new_life(path, writes) {
                true => "recycle",
                false => "pool",
            }
        }
        CallKind::Write | CallKind::Sync | CallKind::SetSize => of_path(path),
        _ => {
            let mut told = names
                .iter()
                .map(|(from, to)| of_name(from.as_deref(), to.as_deref()));
            // The flush of a directory most likely follows the last change in it.
            told.next_back().unwrap_or("directories")
        }
    }
}

/// Number of power cuts by activity.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Histogram(BTreeMap<&'static str, [u64; 3]>);

impl Histogram {
    /// Counts a cut; without a point it fell between two calls.
    pub(crate) fn count(&mut self, phase: Phase, point: Option<&CutPoint>) {
        let what = point.map_or("between calls", |point| what(phase, point));
        self.0.entry(what).or_default()[phase as usize] += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (what, counts) in &other.0 {
            let sums = self.0.entry(what).or_default();
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum += count;
            }
        }
    }

    pub(crate) fn cuts(&self) -> u64 {
        self.0.values().flatten().sum()
    }

    /// Cuts inside recovery, roll, checkpoint, recycle and sorting.
    pub(crate) fn promised(&self) -> [u64; 5] {
        let row = |what: &str| self.0.get(what).map_or(0, |counts| counts.iter().sum());
        let starts = self.0.values().map(|counts| counts[0]).sum();
        let [roll, checkpoint] = ["roll", "checkpoint"].map(row);
        [starts, roll, checkpoint, row("recycle"), row("sorting")]
    }
}

impl std::fmt::Display for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "power cuts during   a start      work     close")?;
        for (what, [start, work, close]) in &self.0 {
            writeln!(f, "{what:<16} {start:>10}{work:>10}{close:>10}")?;
        }
        let [recovery, roll, checkpoint, recycle, sorting] = self.promised();
        write!(
            f,
            "{} cuts: {recovery} inside recovery, {roll} roll, {checkpoint} checkpoint, {recycle} recycle, {sorting} sorting",
            self.cuts()
        )
    }
}

fn rolls(call: &DiskCall<'_>) -> bool {
    call.kind == CallKind::Write
        && is_segment(call.path)
        && (call.offset == LIFE_BYTES || kinds(call.bytes).contains(&(FrameKind::Seal as u8)))
}

fn fills_pool(call: &DiskCall<'_>) -> bool {
    call.path.starts_with("pool/")
}

fn indexes(call: &DiskCall<'_>) -> bool {
    call.path.starts_with("index/")
}

fn checkpoints(call: &DiskCall<'_>) -> bool {
    call.path.starts_with("checkpoint/")
}

fn administers(call: &DiskCall<'_>) -> bool {
    let rare = [
        FrameKind::Trim,
        FrameKind::Deleted,
        FrameKind::Fence,
        FrameKind::Cursor,
    ];
    call.kind == CallKind::Write
        && is_segment(call.path)
        && kinds(call.bytes)
            .iter()
            .any(|kind| rare.iter().any(|rare| *rare as u8 == *kind))
}

fn voids(call: &DiskCall<'_>) -> bool {
    call.kind == CallKind::Write
        && is_segment(call.path)
        && call.bytes.iter().all(|byte| *byte == 0)
}

fn sorts(call: &DiskCall<'_>) -> bool {
    call.path.starts_with("sorted/")
}

/// Stretches in which power cuts come more often than by chance. The first five need segments that fill up.
pub(crate) const STRETCHES: [Filter; 7] = [
    rolls,
    fills_pool,
    indexes,
    checkpoints,
    sorts,
    administers,
    voids,
];
