//! Makes a store of the records in an archive.
//!
//! The store has only sorted runs: the archived records of each log, as they were stored, with their lsns,
//! arrivals and places in the journal. Files of an archive may overlap (a crash, a file that was copied back).
//! A record that exists twice is taken once, by lsn.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::list::{ArchiveFilter, ArchiveFinding, ArchivedFile, look, names};
use crate::api::config::StorageConfig;
use crate::api::error::RestoreError;
use crate::api::record::{LogConfig, Retention};
use crate::base::ids::{LogId, LogName, Lsn, Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::disk;
use crate::disk::directory;
use crate::disk::directory::DIRECTORIES;
use crate::disk::{Disk, DiskFile};
use crate::format::address;
use crate::format::chain::Chain;
use crate::format::frame;
use crate::format::frame::HEADER_BYTES;
use crate::format::life::{Life, SORTED_RUN};
use crate::format::pack;
use crate::format::pack::Piece;
use crate::format::run_head::RunHead;
use crate::format::sealed;
use crate::index::run_file;
use crate::index::{IndexBuilder, NewRow, index_path};
use crate::journal::run;
use crate::logs::extras::{ExtrasImage, MissingRecords};
use crate::logs::image::Image;
use crate::logs::image::put_images;
use crate::logs::{FirstKept, TrimBy};
use crate::recovery::RecoveryReport;
use crate::tools::backup::{self, write};
use crate::upkeep::sorter;
use crate::upkeep::sorter::RunWriter;

/// Size from which on a run is ended where possible, bytes.
const RUN_BYTES: u64 = 1 << 30;

/// Result of a restore.
#[derive(Debug, Clone)]
pub struct ArchiveRestored {
    /// The id of the new store.
    pub store_id: u128,
    /// Files of the archive that were read.
    pub files: u64,
    /// Bytes of batches that were restored.
    pub bytes: u64,
    /// Number of batches that existed more than once.
    pub duplicates: u64,
    /// Logs that were not restored, since later logs have their names.
    pub skipped: Vec<SkippedLog>,
    /// Faults of the archive.
    pub findings: Vec<ArchiveFinding>,
    /// Findings of the first start.
    pub report: RecoveryReport,
}

/// A log that was not restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkippedLog {
    /// Its id.
    pub log_id: LogId,
    /// Its name; `None` if that is not known.
    pub name: Option<LogName>,
}

/// A pack of a file.
struct FilePack {
    /// The first record in it.
    first: Lsn,
    /// The record after its last one.
    next: Lsn,
    /// Index of the file.
    source: usize,
    address: Position,
    bytes: u32,
    /// Positions of the first and of the last piece in the journal.
    positions: (Position, Position),
}

/// A log that is being restored.
struct Restoring {
    image: Image,
    parts: Vec<FilePack>,
    /// For each file with records of the log: the first record that no explicit trim had removed then.
    trimmed: BTreeMap<usize, Lsn>,
    /// The next lsn after the records restored so far.
    next: Lsn,
    position: Position,
    kept: Option<FirstKept>,
    missing: Vec<MissingRecords>,
    bytes: u64,
    last_time: Timestamp,
}

/// Everything to restore.
struct RestorePlan {
    sources: Vec<ArchiveSource>,
    logs: BTreeMap<LogId, Restoring>,
    /// Packs of logs that no file described so far: a later one may.
    unnamed: Vec<(LogId, FilePack)>,
    skipped: Vec<SkippedLog>,
    /// Positions at which runs may end.
    borders: BTreeSet<Position>,
    arrival: Timestamp,
}

struct ArchiveSource {
    path: String,
    life: Life,
}

/// Makes a store of the records in an archive, in an empty directory. All files are compared with their
/// checksums first. Damaged records are left out and reported. `progress` receives the number of bytes of the
/// archive read since its last call.
///
/// # Errors
/// If the archive has no such records, if the directory is not empty or in use, or if the file system fails. In
/// these cases no start accepts the directory as a store.
pub fn restore(
    archive: &Arc<dyn Disk>,
    target: &Arc<dyn Disk>,
    filter: &ArchiveFilter,
    config: &StorageConfig,
    progress: &mut dyn FnMut(u64),
) -> Result<ArchiveRestored, RestoreError> {
    // First: to read the archive takes long.
    backup::refuse_target(&**target)?;
    let mut findings = Vec::new();
    let plan = plan(archive, filter, &mut findings, progress)?;
    let files = plan.sources.len() as u64;
    let skipped = plan.skipped.clone();
    let lock = backup::begin_restore(&**target)?;
    let mut id = [0; 16];
    let drawing = || RestoreError::io(format!("drawing a store id in {}", target.location()));
    target.draw(&mut id).map_err(drawing())?;
    let mut work = ArchiveRestore {
        archive: &**archive,
        target: &**target,
        store_id: u128::from_le_bytes(id),
        plan,
        open: None,
        findings,
        bytes: 0,
        duplicates: 0,
    };
    work.write_runs()?;
    backup::flush_names(&**target, &DIRECTORIES)?;
    // A directory without FORMAT is no store: this file comes last.
    directory::write_format(&**target, work.store_id, config.largest_body())?;
    let report = backup::finish_restore(target, config)?;
    drop(lock);
    Ok(ArchiveRestored {
        store_id: work.store_id,
        files,
        bytes: work.bytes,
        duplicates: work.duplicates,
        skipped,
        findings: work.findings,
        report,
    })
}

/// Reads and verifies the archive, and plans the restore.
fn plan(
    archive: &Arc<dyn Disk>,
    filter: &ArchiveFilter,
    findings: &mut Vec<ArchiveFinding>,
    progress: &mut dyn FnMut(u64),
) -> Result<RestorePlan, RestoreError> {
    let reading = || RestoreError::io(format!("reading the archive {}", archive.location()));
    let names = names(&**archive, filter).map_err(reading())?;
    let mut stores: Vec<u128> = names.files.iter().map(|(name, ..)| name.store).collect();
    stores.dedup();
    if stores.len() > 1 {
        let stores: Vec<String> = stores.iter().map(|id| format!("{id:032x}")).collect();
        return Err(RestoreError::SeveralStores {
            directory: archive.location(),
            stores: stores.join(", "),
        });
    }
    let mut plan = RestorePlan {
        sources: Vec::new(),
        logs: BTreeMap::new(),
        unnamed: Vec::new(),
        skipped: Vec::new(),
        borders: BTreeSet::new(),
        arrival: Timestamp::default(),
    };
    for named in names.files {
        let looked = look(&**archive, named, true, findings, progress).map_err(reading())?;
        if let Some(looked) = looked {
            plan.add(looked);
        }
    }
    plan.assign_unnamed(filter, findings);
    plan.choose(filter);
    if plan.logs.is_empty() {
        return Err(RestoreError::NothingArchived {
            directory: archive.location(),
        });
    }
    Ok(plan)
}

impl RestorePlan {
    fn add(&mut self, looked: ArchivedFile) {
        let source = self.sources.len();
        let head = &looked.opened.head;
        self.borders.extend([head.first_base, head.limit]);
        self.arrival = self.arrival.max(head.arrival);
        for images in looked.images {
            let image = images.image;
            let id = image.id;
            let trimmed = image.kept.trimmed();
            let log = self
                .logs
                .entry(id)
                .or_insert_with(|| Restoring::of(image.clone()));
            log.trimmed.insert(source, trimmed);
            if image.next > log.image.next || image.last_end > log.image.last_end {
                log.image = image;
            }
        }
        for pack in looked.walked.into_iter().flat_map(|walked| walked.packs) {
            let part = FilePack {
                first: pack.place.first_lsn,
                next: pack.place.next_lsn(),
                source,
                address: pack.place.position,
                bytes: pack.place.frame_len,
                positions: pack.positions,
            };
            match self.logs.get_mut(&pack.log) {
                Some(log) => log.parts.push(part),
                None => self.unnamed.push((pack.log, part)),
            }
        }
        self.sources.push(ArchiveSource {
            path: looked.path,
            life: looked.opened.life,
        });
    }

    /// Gives packs to logs that only later files described. A log that no file describes has no name either: its records
    /// are reported.
    fn assign_unnamed(&mut self, filter: &ArchiveFilter, findings: &mut Vec<ArchiveFinding>) {
        let mut lost: BTreeMap<(LogId, usize), Range<Lsn>> = BTreeMap::new();
        for (id, part) in std::mem::take(&mut self.unnamed) {
            if let Some(log) = self.logs.get_mut(&id) {
                log.parts.push(part);
            } else if filter.selects_unnamed(id) {
                let lsns = lost
                    .entry((id, part.source))
                    .or_insert(part.first..part.next);
                *lsns = lsns.start.min(part.first)..lsns.end.max(part.next);
            }
        }
        findings.extend(lost.into_iter().map(|((id, source), lsns)| ArchiveFinding {
            log_id: Some(id),
            lsns: Some(lsns),
            ..ArchiveFinding::of_file(
                &self.sources[source].path,
                "no file describes the log, so its records are left out",
            )
        }));
    }

    /// Keeps the selected logs: of several with one name the newest.
    fn choose(&mut self, filter: &ArchiveFilter) {
        self.logs
            .retain(|_, log| filter.selects(&log.image) && !log.parts.is_empty());
        let mut newest: BTreeMap<LogName, LogId> = BTreeMap::new();
        for log in self.logs.values() {
            if let Some(name) = &log.image.name {
                // Ids are given out in order.
                newest.insert(name.clone(), log.image.id);
            }
        }
        let chosen = |image: &Image| {
            let name = image.name.as_ref();
            name.is_some_and(|name| newest.get(name) == Some(&image.id))
        };
        for log in self.logs.values().filter(|log| !chosen(&log.image)) {
            self.skipped.push(SkippedLog {
                log_id: log.image.id,
                name: log.image.name.clone(),
            });
        }
        self.logs.retain(|_, log| chosen(&log.image));
        for log in self.logs.values_mut() {
            log.parts.sort_by_key(|part| (part.first, part.source));
        }
    }

    /// The ranges of the journal that one run each replaces.
    fn stretches(&self) -> Vec<(Position, Position)> {
        let mut weights: BTreeMap<Position, u64> = BTreeMap::new();
        for part in self.logs.values().flat_map(|log| &log.parts) {
            let border = self.borders.range(..=part.positions.0).next_back();
            *weights
                .entry(border.copied().unwrap_or(Position::ZERO))
                .or_default() += u64::from(part.bytes);
        }
        let end = self.borders.last().copied().unwrap_or(Position::ZERO);
        let (mut stretches, mut from, mut bytes) = (Vec::new(), Position::ZERO, 0);
        for (border, weight) in weights {
            if bytes > 0 && bytes + weight > RUN_BYTES {
                stretches.push((from, border));
                (from, bytes) = (border, 0);
            }
            bytes += weight;
        }
        stretches.push((from, end));
        stretches
    }
}

impl Restoring {
    fn of(image: Image) -> Self {
        Self {
            image,
            parts: Vec::new(),
            trimmed: BTreeMap::new(),
            next: Lsn::ZERO,
            position: Position::ZERO,
            kept: None,
            missing: Vec::new(),
            bytes: 0,
            last_time: Timestamp::default(),
        }
    }

    /// Notes the records between the restored ones and this piece. Returns their number.
    fn skip_to(&mut self, piece: &Piece, source: usize) -> u64 {
        let first = piece.first_lsn;
        let trimmed = self.trimmed.get(&source).copied().unwrap_or(Lsn::ZERO);
        if self.kept.is_none() {
            // If a trim ends within a batch, the rest of the batch is kept.
            let begins = first.max(trimmed.min(piece.next_lsn()));
            self.kept = Some(FirstKept {
                bytes: 0,
                first: begins,
                expired: begins.since(trimmed.min(begins)),
            });
            return first.since(Lsn::ZERO);
        }
        let border = trimmed.clamp(self.next, first);
        for (from, to, by) in [
            (self.next, border, TrimBy::Somebody),
            (border, first, TrimBy::Retention),
        ] {
            if from < to {
                self.missing.push(MissingRecords { from, to, by });
            }
        }
        first.since(self.next)
    }

    /// The image of the log with the records restored so far.
    fn image(&self, segment: SegmentId) -> Image {
        let old = self.image.extras.as_deref().cloned().unwrap_or_default();
        let mut extras = ExtrasImage {
            writer_epoch: old.writer_epoch,
            cursors: old.cursors,
            missing: self.missing.clone(),
            // The archive may lack the facts that identify producers.
            ..ExtrasImage::default()
        };
        for mark in extras.cursors.values_mut() {
            mark.lsn = mark.lsn.min(self.next);
        }
        Image {
            next: self.next,
            kept: self.kept.unwrap_or_default(),
            last_time: self.last_time,
            created_end: self.image.created_end.min(self.position),
            last_end: self.position.advance(8),
            stored_bytes: self.bytes,
            deleted: false,
            // An empty retention of its own: with any other, all records would expire again.
            config: Arc::new(LogConfig {
                retention: Some(Box::new(Retention::default())),
                ..(*self.image.config).clone()
            }),
            touched_in: Some(segment),
            created_in: None,
            chain: Chain::default(),
            extras: (!extras.is_empty()).then(|| Box::new(extras)),
            lost: Vec::new(),
            ..self.image.clone()
        }
    }
}

/// A restore in progress.
struct ArchiveRestore<'a> {
    archive: &'a dyn Disk,
    target: &'a dyn Disk,
    store_id: u128,
    plan: RestorePlan,
    /// The file read last.
    open: Option<(usize, Arc<dyn DiskFile>)>,
    findings: Vec<ArchiveFinding>,
    bytes: u64,
    duplicates: u64,
}

impl ArchiveRestore<'_> {
    fn write_runs(&mut self) -> Result<(), RestoreError> {
        let stretches = self.plan.stretches();
        let count = stretches.len() as u64;
        for (number, stretch) in (1..).zip(stretches) {
            // Each run replaces one segment. Numbers of runs are beyond the numbers of segments.
            self.write_run(
                SegmentId::new(number),
                SegmentId::new(count + number),
                stretch,
            )?;
        }
        Ok(())
    }

    fn write_run(
        &mut self,
        segment: SegmentId,
        id: SegmentId,
        (from, to): (Position, Position),
    ) -> Result<(), RestoreError> {
        let path = run::path(id);
        let writing = || RestoreError::io(format!("writing {path} in {}", self.target.location()));
        let salt = sorter::draw_salt(self.target).map_err(writing())?;
        let about = (id, self.store_id, salt);
        let mut writer =
            RunWriter::create_as(self.target, &path, about, SORTED_RUN).map_err(writing())?;
        let base = address::base_of(id);
        let mut builder = IndexBuilder::new(base, self.plan.logs.len());
        let mut befores = Vec::new();
        let mut logs = std::mem::take(&mut self.plan.logs);
        for (log_id, log) in &mut logs {
            let before = log.next;
            writer.begin_log(*log_id);
            self.write_log(&mut writer, log, (from, to))?;
            let writing = RestoreError::io(format!("writing {path}"));
            let places = writer.end_log().map_err(writing)?;
            if places.is_empty() {
                continue;
            }
            befores.push(before);
            builder.push(NewRow {
                image: log.image(segment),
                places,
                below: None,
            });
        }
        self.plan.logs = logs;
        let before = (segment > SegmentId::FIRST).then(|| SegmentId::new(segment.get() - 1));
        let head = RunHead {
            first: segment,
            before_first: before,
            first_base: from,
            last: segment,
            before_last: before,
            end: to,
            limit: to,
            chain: 0,
            next_log_counter: 1,
            arrival: self.plan.arrival,
            latest: builder.latest(),
            epoch: self.epoch(),
            ..RunHead::empty()
        };
        let writing = || RestoreError::io(format!("writing {path} in {}", self.target.location()));
        let mut images = std::iter::zip(builder.images(), befores);
        let finished = writer.finish(head, |out| {
            let next = images.next();
            let put = next.map(|(image, before)| put_images(out, image, before, None));
            put.is_some()
        });
        drop(images);
        let (life, _, end, chain) = finished.map_err(writing())?;
        let index = builder.finish(&life, base.advance(end), chain);
        let index = index.into_index();
        write(self.target, &index_path(id), index.bytes()).map_err(writing())
    }

    /// An epoch above the epochs in the ids of the restored logs, and probably above all epochs of their former store.
    fn epoch(&self) -> RecoveryEpoch {
        let first = RecoveryEpoch::first_of(self.store_id);
        let highest = self.plan.logs.keys().map(|id| id.epoch()).max();
        let apart = u64::try_from(self.store_id % 1024).unwrap_or(0);
        match highest.filter(|highest| *highest >= first) {
            Some(highest) => highest.plus(64 + apart),
            None => first,
        }
    }

    /// Writes the records of a log in a range of the journal.
    fn write_log(
        &mut self,
        writer: &mut RunWriter,
        log: &mut Restoring,
        (from, to): (Position, Position),
    ) -> Result<(), RestoreError> {
        let parts = std::mem::take(&mut log.parts);
        let mut last = None;
        for part in &parts {
            if part.positions.1 < from || part.positions.0 >= to {
                continue;
            }
            let (bytes, body, pieces) = self.read(part)?;
            for piece in pieces {
                if piece.position < from || piece.position >= to {
                    continue;
                }
                // Damage was reported during verification.
                let Some(stored) = run_file::stored(&bytes, body, &piece) else {
                    continue;
                };
                if piece.next_lsn() <= log.next {
                    self.duplicates += 1;
                    continue;
                }
                if piece.first_lsn < log.next || piece.position <= log.position {
                    self.conflict(part.source, log, &piece);
                    continue;
                }
                let dropped = log.skip_to(&piece, part.source);
                let path = run::path(writer.id());
                writer
                    .add(piece, stored, dropped)
                    .map_err(RestoreError::io(format!("writing {path}")))?;
                log.next = piece.next_lsn();
                log.position = piece.position;
                // Size of the former frame, without extensions.
                log.bytes += HEADER_BYTES as u64 + u64::from(piece.stored).next_multiple_of(8);
                self.bytes += u64::from(piece.stored);
                last = Some((piece, stored.to_vec()));
            }
        }
        log.parts = parts;
        if let Some((piece, stored)) = last {
            let times = sealed::stored_times(piece.codec, &stored, piece.count, piece.arrival);
            let time = times.map_or(piece.arrival, |(_, last)| last);
            log.last_time = log.last_time.max(time);
        }
        Ok(())
    }

    /// Reports a conflict: the archived store went on from a backup, and one lsn was given out twice.
    fn conflict(&mut self, source: usize, log: &Restoring, piece: &Piece) {
        self.findings.push(ArchiveFinding {
            path: self.plan.sources[source].path.clone(),
            log: log.image.name.clone(),
            log_id: Some(log.image.id),
            lsns: Some(piece.first_lsn..piece.next_lsn()),
            detail: "does not go with what other files hold of the log; it is left out".to_owned(),
        });
    }

    /// Reads a pack. Returns its bytes, the offset of its body, and its pieces.
    fn read(&mut self, part: &FilePack) -> Result<(Vec<u8>, usize, Vec<Piece>), RestoreError> {
        let source = &self.plan.sources[part.source];
        let reading = || RestoreError::io(format!("reading {}", source.path));
        let file = match &self.open {
            Some((number, file)) if *number == part.source => Arc::clone(file),
            _ => {
                let file = self.archive.open(&source.path).map_err(reading())?;
                self.open = Some((part.source, Arc::clone(&file)));
                file
            }
        };
        let offset = part.address.since(address::base_of(source.life.id));
        let bytes = disk::read_some(&*file, offset, u64::from(part.bytes)).map_err(reading())?;
        let header = frame::decode_header(&bytes, source.life.salt)
            .filter(|header| header.position == part.address);
        let told = header.and_then(|header| Some((header, pack::pieces(&bytes, &header)?)));
        // It was good a moment ago.
        let (header, pieces) =
            told.ok_or_else(|| reading()(std::io::ErrorKind::InvalidData.into()))?;
        Ok((bytes, header.header_len as usize, pieces))
    }
}
