//! Checks all files except segments: small files, indexes, checkpoints, and unknown files.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;

use super::segment::NextLsns;
use crate::api::finding::{Finding, FindingKind, Severity, advice};
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Lsn, Position, SegmentId};
use crate::disk::directory;
use crate::disk::directory::{BEGUN, FormatFile, LastBegun, ReadBegun};
use crate::disk::{Disk, read_whole};
use crate::format::life;
use crate::format::life::Life;
use crate::index::checkpoint;
use crate::index::run_file::WalkedRun;
use crate::index::{SealedIndex, decode_index, index_id, index_path, old_id};
use crate::journal::run;
use crate::journal::run::Run;
use crate::logs::damages;

/// Names in a directory; empty if the directory does not exist.
pub(crate) fn list(disk: &dyn Disk, directory: &str) -> io::Result<Vec<String>> {
    match disk.list(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map(|mut names| {
            names.sort_unstable();
            names
        }),
    }
}

/// Faults of FORMAT and BEGUN.
pub(crate) fn small_files(
    disk: &dyn Disk,
    format: &FormatFile,
    store_id: u128,
    segments: usize,
) -> io::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let what = match format {
        FormatFile::Good(_) => None,
        FormatFile::Missing => Some((FindingKind::Missing, "is gone")),
        FormatFile::Damaged => Some((FindingKind::Checksum, "is damaged")),
    };
    if let Some((kind, what)) = what {
        findings.push(Finding::of_file(
            kind,
            Severity::Damage,
            "FORMAT",
            format!(
                "FORMAT {what}, and the store does not open without it; by its segments this is store {store_id:032x}"
            ),
            "`wald repair --accept-loss` writes it anew from what the segments say; nothing else is missing by this",
        ));
    }
    let begun = LastBegun::read(disk)?;
    if let Some(what) = begun.good().and_then(|begun| begun.leaves_no_room()) {
        findings.push(Finding::of_file(
            FindingKind::Chain,
            Severity::Damage,
            BEGUN,
            format!(
                "{what}, so a start refuses the store: no store gets so far, so the file was altered"
            ),
            "restore a backup, or serve the store with an older version and append its records to a new store",
        ));
    }
    if let ReadBegun::Beyond(what) = &begun {
        findings.push(Finding::of_file(
            FindingKind::Chain,
            Severity::Damage,
            "BEGUN",
            format!("{what}: no store gets so far, so the file was altered; it is not used"),
            "nothing is lost by this; the next start writes it again",
        ));
    } else if begun == ReadBegun::Damaged {
        findings.push(Finding::of_file(
            FindingKind::Checksum,
            Severity::Damage,
            "BEGUN",
            "BEGUN does not match its checksum: if the newest segments were lost, a start would not notice",
            "nothing is lost by this; the next start writes it anew",
        ));
    } else if begun == ReadBegun::Missing && segments > 1 {
        findings.push(Finding::of_file(
            FindingKind::Missing,
            Severity::Damage,
            "BEGUN",
            "BEGUN is gone: if the newest segments were lost, a start would not notice",
            "nothing is lost by this; the next start writes it anew",
        ));
    }
    Ok(findings)
}

/// Unknown files, and leftovers of interrupted starts. `segments`: the segments of the journal, and runs.
/// `live`: the store is in use, so that files which are being written are no leftovers.
pub(crate) fn strays(
    disk: &dyn Disk,
    segments: &BTreeSet<SegmentId>,
    live: bool,
) -> io::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut note = |path: String, leftover: bool| {
        if leftover && live {
            return;
        }
        let (detail, advice) = match leftover {
            true => (
                format!("{path} was being written when a run ended"),
                advice::LEFTOVER,
            ),
            false => (
                format!("{path} is not one of Wald's files"),
                advice::UNOWNED,
            ),
        };
        let finding = Finding::of_file(FindingKind::Unowned, Severity::Note, path, detail, advice);
        findings.push(finding);
    };
    for name in list(disk, "")? {
        if !directory::owns(&name) {
            let leftover = directory::leaves_behind(&name);
            note(name, leftover);
        }
    }
    for directory in ["journal", "pool"] {
        for name in list(disk, directory)? {
            if life::id_of(&name).is_none() {
                note(format!("{directory}/{name}"), false);
            }
        }
    }
    let mut alone = Vec::new();
    for name in list(disk, "index")? {
        let (whole, new) = without_new(&name);
        match index_id(whole).or_else(|| old_id(whole)) {
            Some(_) if new => note(format!("index/{name}"), true),
            // A running engine may have sealed the segment just now.
            Some(id) if live || segments.contains(&id) => {}
            Some(id) => alone.push(Finding::of_file(
                FindingKind::Unowned,
                Severity::Note,
                format!("index/{name}"),
                format!("index/{name} is of segment {id}, which the store does not have"),
                advice::INDEX_ALONE,
            )),
            None => note(format!("index/{name}"), false),
        }
    }
    for name in list(disk, "checkpoint")? {
        let (whole, new) = without_new(&name);
        // The file has only the number as its name while it is written.
        let number = whole.len() == 16 && u64::from_str_radix(whole, 16).is_ok();
        let is_old = checkpoint::old_id(whole).is_some();
        if new && (number || is_old) {
            note(format!("checkpoint/{name}"), true);
        } else if !is_old && checkpoint::id_of(&name).is_none() {
            note(format!("checkpoint/{name}"), false);
        }
    }
    for name in list(disk, "quarantine")? {
        if !damages::owns(&name) {
            note(format!("quarantine/{name}"), false);
        }
    }
    for name in list(disk, "sorted")? {
        if run::new_id(&name).is_some() {
            note(format!("sorted/{name}"), true);
        } else if life::id_of(&name).is_none() {
            note(format!("sorted/{name}"), false);
        }
    }
    findings.append(&mut alone);
    Ok(findings)
}

fn without_new(name: &str) -> (&str, bool) {
    match name.strip_suffix(".new") {
        Some(whole) => (whole, true),
        None => (name, false),
    }
}

/// Faults of a run alone: its life blocks, and bytes that do not verify.
pub(crate) fn run(run: &Run, blocks: &[u8], walked: &WalkedRun) -> Vec<Finding> {
    let path = run.segment.path();
    let first = run.head.first_base.advance(LIFE_BYTES);
    let mut findings = Vec::new();
    let mut bad = |kind, detail: String, advice| {
        let finding = Finding::of_file(kind, Severity::Damage, path.clone(), detail, advice);
        findings.push(finding.in_segment(run.id()).at(first, run.head.end));
    };
    for (number, what) in life::bad_copies(blocks, &run.segment.life)
        .iter()
        .enumerate()
    {
        if let Some(what) = what {
            let detail = format!("life block {} {what}", number + 1);
            bad(FindingKind::Checksum, detail, advice::COPY);
        }
    }
    for hole in &walked.holes {
        let (from, to) = (run.segment.offset(hole.from), run.segment.offset(hole.to));
        let detail = format!(
            "bytes {from} to {to} of {} do not verify",
            run.segment.path()
        );
        bad(FindingKind::Checksum, detail, advice::TOLD);
    }
    findings
}

/// Compares the index of a run with its frames.
pub(crate) fn index_of_run(
    run: &Run,
    index: Option<&SealedIndex>,
    told: &SealedIndex,
) -> Option<Finding> {
    let path = index_path(run.id());
    let detail = match index {
        Some(index) if index.bytes() == told.bytes() => return None,
        Some(_) => format!("{path} says other things than the run"),
        None => return None,
    };
    let finding = Finding::of_file(
        FindingKind::Index,
        Severity::Damage,
        path,
        detail,
        advice::REMADE,
    );
    Some(finding.in_segment(run.id()))
}

/// Ranges of files that the device could not read so far. Separate findings name the records in them.
pub(crate) fn unreadable(disk: &dyn Disk) -> Vec<Finding> {
    let of = |(path, bytes): (String, Range<u64>)| {
        let (from, to) = (bytes.start, bytes.end);
        let detail = format!("the device cannot read bytes {from} to {to} of {path}");
        let kind = FindingKind::Missing;
        Finding::of_file(kind, Severity::Damage, path, detail, advice::DEVICE)
    };
    disk.unreadable().all().into_iter().map(of).collect()
}

/// Checks a segment file without frames: it has only its life blocks.
pub(crate) fn ready_file(disk: &dyn Disk, id: SegmentId) -> io::Result<Option<Finding>> {
    let path = life::journal_path(id);
    let head = head(disk, &path)?;
    let bad = match Life::decode(&head) {
        Ok(life) => life::bad_copies(&head, &life).iter().any(Option::is_some),
        Err(_) => true,
    };
    Ok(bad.then(|| {
        let detail = format!(
            "{path}, a segment that is ready and holds nothing, has a bad life block"
        );
        Finding::of_file(
            FindingKind::Checksum,
            Severity::Damage,
            path,
            detail,
            "nothing is lost; the next start makes it anew. The device may be failing: look at its health",
        )
        .in_segment(id)
    }))
}

fn head(disk: &dyn Disk, path: &str) -> io::Result<Vec<u8>> {
    let mut head = vec![0; usize::try_from(LIFE_BYTES).map_err(io::Error::other)?];
    let length = disk.open(path)?.read_full_at(&mut head, 0)?;
    head.truncate(length);
    Ok(head)
}

/// Explains a file in `journal/` that is none of the store's segments.
pub(crate) fn unusable(disk: &dyn Disk, id: SegmentId, store_id: u128) -> io::Result<Finding> {
    let path = life::journal_path(id);
    let (kind, severity, detail, advice) = match Life::decode(&head(disk, &path)?) {
        Ok(life) if life.store_id != store_id => (
            FindingKind::Unowned,
            Severity::Loss,
            format!(
                "{path} belongs to store {:032x}, not to this one",
                life.store_id
            ),
            "it is not used; if it took the place of a segment of this store, restore that from a backup",
        ),
        Ok(life) => (
            FindingKind::Unowned,
            Severity::Damage,
            format!(
                "{path} holds segment {}, which is in another file too",
                life.id
            ),
            "it is not used; move it elsewhere",
        ),
        Err(bad) => match bad.newer() {
            None => (
                FindingKind::Checksum,
                Severity::Loss,
                format!("{path} has no good life block: nothing in it can be verified"),
                advice::LOST,
            ),
            Some(what) => (
                FindingKind::Unowned,
                Severity::Loss,
                format!("{path} {what}: it is newer than this program"),
                "use the version of Wald that wrote it",
            ),
        },
    };
    Ok(Finding::of_file(kind, severity, path, detail, advice).in_segment(id))
}

/// The life of a segment that an index or a checkpoint must describe.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    pub(crate) life: Life,
    pub(crate) base: Position,
    pub(crate) end: Position,
}

/// Reads the index of a segment, if there is one, and checks it alone. Returns the bytes read.
pub(crate) fn index(
    disk: &dyn Disk,
    known: &Known,
    findings: &mut Vec<Finding>,
) -> io::Result<(Option<SealedIndex>, u64)> {
    let id = known.life.id;
    let path = index_path(id);
    let bytes = match read_whole(disk, &path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((None, 0)),
        bytes => bytes?,
    };
    let length = bytes.len() as u64;
    let mut bad = |kind, detail: String| {
        findings.push(
            Finding::of_file(kind, Severity::Damage, path.clone(), detail, advice::REMADE)
                .in_segment(id),
        );
    };
    let Some(index) = decode_index(bytes) else {
        bad(
            FindingKind::Checksum,
            format!("{path} does not match its checksum"),
        );
        return Ok((None, length));
    };
    if !index.is_of(&known.life, known.base) {
        bad(
            FindingKind::Index,
            format!("{path} is of another life of the segment"),
        );
        return Ok((None, length));
    }
    if index.end != known.end {
        bad(
            FindingKind::Index,
            format!(
                "{path} says that the segment ends at position {}, and it ends at {}",
                index.end, known.end
            ),
        );
        return Ok((None, length));
    }
    if let Some(detail) = bad_rows(&index) {
        bad(FindingKind::Index, format!("{path}: {detail}"));
        return Ok((None, length));
    }
    Ok((Some(index), length))
}

fn bad_rows(index: &SealedIndex) -> Option<String> {
    let mut last = None;
    for row in index.rows() {
        if last.replace(row.log_id) >= Some(row.log_id) {
            return Some(format!("the row of log {} is out of order", row.log_id));
        }
        let Some(image) = index.image(&row) else {
            return Some(format!("the image of log {} cannot be read", row.log_id));
        };
        if image.id != row.log_id || image.next != row.next_lsn {
            return Some(format!(
                "row and image of log {} say different things",
                row.log_id
            ));
        }
        let mut next = row.first_lsn;
        for place in index.entries(&row).from(0) {
            if place.first_lsn < next || place.end() > index.end {
                return Some(format!("an entry of log {} is out of order", row.log_id));
            }
            next = place.next_lsn();
        }
        if next > row.next_lsn {
            return Some(format!("log {} has entries beyond its end", row.log_id));
        }
    }
    None
}

/// Faults of a checkpoint, alone and against the segments. `lsns`: state of the logs at the end of its last
/// segment, if the walk is there.
pub(crate) fn checkpoint(
    disk: &dyn Disk,
    id: SegmentId,
    store_id: u128,
    (segments, is_sorted): (&BTreeMap<SegmentId, Known>, &dyn Fn(SegmentId) -> bool),
    lsns: Option<&NextLsns>,
) -> io::Result<Vec<Finding>> {
    let path = checkpoint::path(id);
    let bytes = match checkpoint::read(disk, id) {
        // Newer checkpoints replaced it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        bytes => bytes?,
    };
    let bad = |kind, detail: String| {
        let detail = format!("{path} {detail}");
        vec![
            Finding::of_file(
                kind,
                Severity::Damage,
                path.clone(),
                detail,
                "nothing is lost; a start reads an older one, or the segments themselves. The device may be failing: look at its health",
            )
            .in_segment(id),
        ]
    };
    let Some(bytes) = bytes else {
        return Ok(bad(
            FindingKind::Checksum,
            "does not match its checksum".to_owned(),
        ));
    };
    let mut stranger = None;
    let summary = checkpoint::decode(&bytes, |image| {
        let expected = lsns.filter(|lsns| !lsns.is_damaged());
        // If the deletion of a log is sorted, no file has the log.
        let sorted_away = |next: Lsn| image.deleted && next == Lsn::ZERO;
        if let Some(next) = expected.and_then(|lsns| lsns.of(image.id))
            && !sorted_away(next)
            && next != image.next
            && stranger.is_none()
        {
            stranger = Some(format!(
                "says that log {} goes on at lsn {}, and its frames say {next}",
                image.id, image.next
            ));
        }
    });
    let Some(summary) = summary else {
        return Ok(bad(FindingKind::Index, "cannot be read".to_owned()));
    };
    if summary.store_id != store_id {
        return Ok(bad(FindingKind::Unowned, "is of another store".to_owned()));
    }
    if summary.last != id || summary.segments.last().map(|s| s.life.id) != Some(id) {
        let detail = format!("ends with segment {}, not with its own", summary.last);
        return Ok(bad(FindingKind::Index, detail));
    }
    for entry in &summary.segments {
        if is_sorted(entry.life.id) {
            continue;
        }
        let Some(known) = segments.get(&entry.life.id) else {
            let detail = format!("tells of segment {}, which is missing", entry.life.id);
            return Ok(bad(FindingKind::Missing, detail));
        };
        if (known.life, known.base, known.end) != (entry.life, entry.base, entry.end) {
            let detail = format!("tells of another life or end of segment {}", entry.life.id);
            return Ok(bad(FindingKind::Index, detail));
        }
    }
    Ok(stranger.map_or_else(Vec::new, |detail| bad(FindingKind::Index, detail)))
}
