//! Lists the content of an archive, and verifies it.

use std::io;
use std::ops::Range;

use crate::api::pace::Stop;
use crate::api::record::Retention;
use crate::base::ids::{LogId, LogName, Lsn, Position, SegmentId, Timestamp};
use crate::disk;
use crate::disk::Disk;
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::index::run_file;
use crate::index::run_file::{BadRun, OpenedRun, WalkedRun};
use crate::logs::image::Image;
use crate::logs::image::Images;
use crate::upkeep::archive::{ArchiveName, FileStage, is_lock};

/// Selects logs in an archive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArchiveFilter {
    /// Only the store with this id.
    pub store: Option<u128>,
    /// Only logs with this name.
    pub log: Option<LogName>,
    /// Only logs whose names begin with this prefix.
    pub prefix: String,
    /// Only the log with this id: another may have had its name.
    pub log_id: Option<LogId>,
}

impl ArchiveFilter {
    fn of_store(&self, id: u128) -> bool {
        self.store.is_none_or(|store| store == id)
    }

    pub(crate) fn selects(&self, image: &Image) -> bool {
        let name = image.name.as_ref();
        let Some(name) = name else {
            return self.selects_unnamed(image.id);
        };
        self.log.as_ref().is_none_or(|log| log == name)
            && name.as_str().starts_with(&self.prefix)
            && self.log_id.is_none_or(|id| id == image.id)
    }

    /// Whether it selects a log whose name is lost.
    pub(crate) fn selects_unnamed(&self, id: LogId) -> bool {
        self.log.is_none() && self.prefix.is_empty() && self.log_id.is_none_or(|only| only == id)
    }

    fn is_of_all(&self) -> bool {
        self.log.is_none() && self.prefix.is_empty() && self.log_id.is_none()
    }
}

/// The content of an archive.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArchiveListing {
    /// Its files, by store, then in the order of their records.
    pub files: Vec<ArchiveFile>,
    /// Faults of the files.
    pub findings: Vec<ArchiveFinding>,
    /// Files that are being written, or that a crash has interrupted. The store has all their records.
    pub unfinished: Vec<String>,
    /// Files that are not of an archive.
    pub strangers: Vec<String>,
}

/// One file of an archive.
#[derive(Debug, Clone, PartialEq)]
pub struct ArchiveFile {
    /// Its name.
    pub path: String,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Id of the store that the file belongs to.
    pub store_id: u128,
    /// The sorted run that was made without these records.
    pub run: SegmentId,
    /// The first and the last segment that this run replaces.
    pub segments: (SegmentId, SegmentId),
    /// Positions in the journal that the file covers: from, to (exclusive).
    pub positions: Range<Position>,
    /// Whether the store may still have all these records.
    pub pending: bool,
    /// The selected logs in the file, by log id.
    pub logs: Vec<ArchivedLog>,
}

/// Records of one log in a file of an archive.
#[derive(Debug, Clone, PartialEq)]
pub struct ArchivedLog {
    /// The log's id in its store.
    pub log_id: LogId,
    /// Its name; `None` if the store had lost it to damage.
    pub name: Option<LogName>,
    /// The first lsn, and the lsn behind the last. Some between them may be missing.
    pub lsns: Range<Lsn>,
    /// Number of records.
    pub records: u64,
    /// Bytes of their batches as stored.
    pub bytes: u64,
    /// Arrival of the first and of the last batch.
    pub arrivals: (Timestamp, Timestamp),
    /// The log's own retention, if it had one.
    pub retention: Option<Retention>,
}

impl ArchivedLog {
    fn of(images: &Images) -> Option<Self> {
        let archived = images.archived?;
        let image = &images.image;
        Some(Self {
            log_id: image.id,
            name: image.name.clone(),
            lsns: archived.first..archived.next,
            records: archived.records,
            bytes: archived.bytes,
            arrivals: (archived.from, archived.to),
            retention: image.config.retention.as_deref().copied(),
        })
    }
}

/// A fault of a file of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveFinding {
    /// The file.
    pub path: String,
    /// The log, if the fault concerns one.
    pub log: Option<LogName>,
    /// Its id.
    pub log_id: Option<LogId>,
    /// Records that are lost: from, to (exclusive).
    pub lsns: Option<Range<Lsn>>,
    /// Description of the fault.
    pub detail: String,
}

impl ArchiveFinding {
    pub(crate) fn of_file(path: &str, detail: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            log: None,
            log_id: None,
            lsns: None,
            detail: detail.into(),
        }
    }

    fn of_log(path: &str, images: &Images, lsns: Range<Lsn>) -> Self {
        Self {
            path: path.to_owned(),
            log: images.image.name.clone(),
            log_id: Some(images.image.id),
            lsns: Some(lsns),
            detail: "records do not match their checksums".to_owned(),
        }
    }
}

/// A file of an archive, as far as it was read.
pub(crate) struct ArchivedFile {
    pub(crate) path: String,
    pub(crate) pending: bool,
    pub(crate) opened: OpenedRun,
    pub(crate) images: Vec<Images>,
    /// The whole content, if all of it was read.
    pub(crate) walked: Option<WalkedRun>,
}

/// Names of the files in an archive.
pub(crate) struct ArchiveNames {
    pub(crate) files: Vec<(ArchiveName, String, bool)>,
    unfinished: Vec<String>,
    strangers: Vec<String>,
}

pub(crate) fn names(disk: &dyn Disk, filter: &ArchiveFilter) -> io::Result<ArchiveNames> {
    let mut names = ArchiveNames {
        files: Vec::new(),
        unfinished: Vec::new(),
        strangers: Vec::new(),
    };
    for path in disk.list("")? {
        match ArchiveName::parse(&path) {
            Some((name, _)) if !filter.of_store(name.store) => {}
            Some((_, FileStage::New)) => names.unfinished.push(path),
            Some((name, stage)) => names.files.push((name, path, stage == FileStage::Pending)),
            None if is_lock(&path) => {}
            None => names.strangers.push(path),
        }
    }
    names.files.sort_unstable();
    names.unfinished.sort_unstable();
    names.strangers.sort_unstable();
    Ok(names)
}

/// Lists an archive. With `verify` all files are read and compared with their checksums; `progress` receives
/// the number of bytes read since its last call.
///
/// # Errors
/// If the directory, or a file in it, cannot be read. Damage is no error: see the findings.
pub fn list(
    disk: &dyn Disk,
    filter: &ArchiveFilter,
    verify: bool,
    progress: &mut dyn FnMut(u64),
) -> io::Result<ArchiveListing> {
    let names = names(disk, filter)?;
    let mut listing = ArchiveListing {
        unfinished: names.unfinished,
        strangers: names.strangers,
        ..ArchiveListing::default()
    };
    for (name, path, pending) in names.files {
        let Some(looked) = look(
            disk,
            (name, path, pending),
            verify,
            &mut listing.findings,
            progress,
        )?
        else {
            continue;
        };
        let selected = |images: &&Images| filter.selects(&images.image);
        let logs = looked.images.iter().filter(selected);
        let logs: Vec<_> = logs.filter_map(ArchivedLog::of).collect();
        if logs.is_empty() && !filter.is_of_all() {
            continue;
        }
        let head = &looked.opened.head;
        listing.files.push(ArchiveFile {
            bytes: looked.opened.life.size,
            store_id: looked.opened.life.store_id,
            run: looked.opened.life.id,
            segments: (head.first, head.last),
            positions: head.first_base..head.limit,
            pending: looked.pending,
            path: looked.path,
            logs,
        });
    }
    Ok(listing)
}

/// Reads a file. `None` if nothing of it is readable, which the findings report, or if it was removed meanwhile.
pub(crate) fn look(
    disk: &dyn Disk,
    (name, path, pending): (ArchiveName, String, bool),
    wholly: bool,
    findings: &mut Vec<ArchiveFinding>,
    progress: &mut dyn FnMut(u64),
) -> io::Result<Option<ArchivedFile>> {
    let (path, pending, opened) = match open(disk, &name, path, pending) {
        Ok(opened) => opened,
        Err((_, BadRun::Io(error))) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err((_, BadRun::Io(error))) => return Err(error),
        Err((path, BadRun::Newer(what) | BadRun::Damaged(what))) => {
            findings.push(ArchiveFinding::of_file(&path, what));
            return Ok(None);
        }
    };
    let life = &opened.life;
    if (life.store_id, life.id, life.salt) != (name.store, name.run, name.salt) {
        let what = "is not the file that its name says";
        findings.push(ArchiveFinding::of_file(&path, what));
        return Ok(None);
    }
    let file = disk.open(&path)?;
    if !wholly {
        let images = images(&*file, &opened)?;
        if (images.len() as u64) < opened.head.logs {
            let what = "does not tell of all of its logs any more; read all of it (--verify)";
            findings.push(ArchiveFinding::of_file(&path, what));
        }
        return Ok(Some(ArchivedFile {
            path,
            pending,
            opened,
            images,
            walked: None,
        }));
    }
    let mut read = |from: u64, bytes: u64| {
        progress(bytes);
        Ok(disk::read_some(&*file, from, bytes)?.into())
    };
    let mut walked = match run_file::walk_with(&opened, &mut read) {
        Ok(walked) => walked,
        Err(Stop::Io(error)) => return Err(error),
        Err(Stop::Stopped) => return Err(io::ErrorKind::Interrupted.into()),
    };
    let images = std::mem::take(&mut walked.images);
    tell_damage(&path, &walked, &images, findings);
    Ok(Some(ArchivedFile {
        path,
        pending,
        opened,
        images,
        walked: Some(walked),
    }))
}

type OpenedFile = (String, bool, OpenedRun);

/// Opens a file, which may have received its final name meanwhile.
fn open(
    disk: &dyn Disk,
    name: &ArchiveName,
    path: String,
    pending: bool,
) -> Result<OpenedFile, (String, BadRun)> {
    match run_file::open_archived(disk, &path) {
        Ok(opened) => Ok((path, pending, opened)),
        Err(BadRun::Io(error)) if pending && error.kind() == io::ErrorKind::NotFound => {
            let path = name.path(FileStage::Kept);
            match run_file::open_archived(disk, &path) {
                Ok(opened) => Ok((path, false, opened)),
                Err(bad) => Err((path, bad)),
            }
        }
        Err(bad) => Err((path, bad)),
    }
}

/// Adds findings for the damage of a file that was read.
fn tell_damage(
    path: &str,
    walked: &WalkedRun,
    images: &[Images],
    findings: &mut Vec<ArchiveFinding>,
) {
    if walked.lost_images {
        let what = "does not tell of all of its logs any more";
        findings.push(ArchiveFinding::of_file(path, what));
    }
    let mut lost = walked.lost_images;
    for images in images {
        let Some(archived) = images.archived else {
            continue;
        };
        let good = walked.good_of(images.image.id);
        let counts = good.iter().map(|(from, to)| to.since(*from));
        let there = counts.fold(0, u64::saturating_add);
        if there == archived.records {
            continue;
        }
        lost = true;
        let mut next = archived.first;
        for (from, to) in good.into_iter().chain([(archived.next, archived.next)]) {
            if from > next {
                findings.push(ArchiveFinding::of_log(path, images, next..from));
            }
            next = next.max(to);
        }
    }
    if !walked.holes.is_empty() && !lost {
        let what = "is damaged where no record is";
        findings.push(ArchiveFinding::of_file(path, what));
    }
}

/// The images of the logs of a file, without reading the records. Fewer where the file is damaged.
fn images(file: &dyn crate::disk::DiskFile, opened: &OpenedRun) -> io::Result<Vec<Images>> {
    let head = &opened.head;
    let end = head.order.first().map_or(head.order_end, |(_, at)| *at);
    let bytes = disk::read_some(file, head.images_at, end.saturating_sub(head.images_at))?;
    let mut found = Vec::new();
    let mut rest = bytes.as_slice();
    while let Some(header) = frame::decode_header(rest, opened.life.salt)
        .filter(|header| header.kind == FrameKind::Images)
    {
        let body = frame::verified_body(rest, &header);
        found.extend(body.and_then(Images::decode).unwrap_or_default());
        let length = usize::try_from(header.frame_len()).unwrap_or(usize::MAX);
        rest = rest.get(length..).unwrap_or(&[]);
    }
    Ok(found)
}
