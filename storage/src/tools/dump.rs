//! Stored data, for people and programs to inspect: every frame of a directory that no process serves,
//! in order, with all fields of its header; indexes; checkpoints.
//!
//! Memory holds one step or one frame at a time, and the names of logs.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use crate::api::cipher::Cipher;
use crate::api::codec;
use crate::api::error::{DumpError, OpenError};
use crate::api::pace::Stop;
use crate::api::record::{LogConfig, Producer, Record};
use crate::base::ids::{LogId, LogName, Lsn, Position, SegmentId, Timestamp};
use crate::format::body;
use crate::format::body::{Created, CursorBody, Link, Seal};
use crate::format::compress;
use crate::format::digest::Digest;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::format::pack;
use crate::format::pack::Piece;
use crate::format::sealed;
use crate::format::sealed::{BodyPlace, CannotOpen, SEALED, SealedBody, is_sealed};
use crate::format::walk::{Event, Walk};
use crate::index::checkpoint;
use crate::index::read_index;
use crate::index::run_file;
use crate::logs::image::Image;
use crate::logs::producers::Forgotten;
use crate::recovery::{Survey, Surveyed};
use crate::tools::verify::Offline;
use crate::upkeep::verify::reader::StepReader;

/// Selects a part of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DumpFilter {
    /// Only the segment with this id.
    pub segment: Option<u64>,
    /// Only frames of this log, and of earlier and later logs of that name.
    pub log: Option<LogName>,
    /// Only frames with a record from this lsn on.
    pub from_lsn: Option<Lsn>,
    /// Only frames with a record below this lsn.
    pub to_lsn: Option<Lsn>,
}

/// One piece of stored data.
#[derive(Debug)]
pub enum Dumped {
    /// The beginning of a segment.
    Segment(DumpedSegment),
    /// A frame of the segment.
    Frame(Box<DumpedFrame>),
    /// A stretch of the segment that does not verify.
    Damaged {
        /// Number of the segment.
        segment: u64,
        /// Start of the stretch.
        from: Position,
        /// Position of the next frame, or the end of the segment.
        to: Position,
    },
    /// The index of a segment, one log at a time.
    Row(Box<DumpedRow>),
    /// The beginning of a checkpoint.
    Checkpoint(DumpedCheckpoint),
    /// State of a log in the checkpoint.
    Log(Box<DumpedLog>),
}

/// A segment file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedSegment {
    /// Number of the segment.
    pub id: u64,
    /// Path of the file.
    pub file: String,
    /// Position of the file's first byte.
    pub base: Position,
    /// End of the segment's frames.
    pub end: Position,
    /// The segments that it replaces, if it is a sorted run.
    pub sorted: Option<DumpedRun>,
    /// Size of the file during its life, in bytes.
    pub size: u64,
    /// Salt of each checksum.
    pub salt: u64,
}

/// The segments that a sorted run replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DumpedRun {
    /// Number of the first segment.
    pub first: u64,
    /// Number of the last segment.
    pub last: u64,
    /// Position of the first segment's first byte.
    pub base: Position,
    /// End of the last segment's frames.
    pub end: Position,
}

/// A frame, with all fields of its header.
#[derive(Debug, Clone, PartialEq)]
pub struct DumpedFrame {
    /// Number of the segment.
    pub segment: u64,
    /// Position in the journal. A frame of a sorted run has an address instead, beyond all positions.
    pub position: Position,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Kind of the frame, in a word: batch, trim, link …
    pub kind: &'static str,
    /// Number of the codec of the body; 0: not compressed.
    pub codec: u8,
    /// Whether the atomic unit continues in the next frame.
    pub continues: bool,
    /// Bytes of header and extensions.
    pub header_bytes: u32,
    /// Bytes of the body as stored.
    pub body_bytes: u32,
    /// Checksum of the body as stored: CRC-32C.
    pub body_crc: u32,
    /// Number of records; frames of other kinds use it as the format describes.
    pub count: u32,
    /// The log of the frame.
    pub log_id: LogId,
    /// Name of the log, if it is known.
    pub log: Option<LogName>,
    /// First lsn; frames of other kinds use it as the format describes.
    pub first_lsn: Lsn,
    /// Time at which the server received the frame.
    pub arrival: Timestamp,
    /// Everything below was flushed when the frame was written; 0: unknown.
    pub durable_mark: Position,
    /// Header checksum of the frame before.
    pub chain: u32,
    /// Header checksum of this frame.
    pub crc: u32,
    /// Producer of the batch, with the digest of the records as sent.
    pub producer: Option<(Producer, Digest)>,
    /// Directory of the group before: its start, and each of its frames.
    pub directory: Option<(Position, Vec<DumpedEntry>)>,
    /// Body of the frame.
    pub body: DumpedBody,
}

/// A frame, as the directory of a later frame describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedEntry {
    /// Kind of the frame, in a word.
    pub kind: &'static str,
    /// Length of the frame, in bytes.
    pub frame_bytes: u64,
    /// The log of the frame.
    pub log_id: LogId,
    /// First lsn of the frame.
    pub first_lsn: Lsn,
    /// Number of records in the frame.
    pub count: u32,
    /// Name of the log, if the frame created the log.
    pub name: Option<String>,
}

/// A record in a frame.
#[derive(Debug, Clone, PartialEq)]
pub struct DumpedRecord {
    /// Lsn of the record.
    pub lsn: Lsn,
    /// Stored time of the record.
    pub time: Timestamp,
    /// The record.
    pub record: Record,
}

/// Contents of a frame.
#[derive(Debug, Clone, PartialEq)]
pub enum DumpedBody {
    /// The body does not match its checksum, or cannot be read.
    Damaged,
    /// The body is empty, or not shown for this kind.
    Empty,
    /// Records.
    Records(Vec<DumpedRecord>),
    /// Encrypted records without all of their keys ([`Offline::with_keys`]): the numbers of their keys, in order; 0 stands
    /// for records that are not encrypted.
    Encrypted(Vec<u64>),
    /// A log was created.
    Created {
        /// Name of the log.
        name: String,
        /// Settings of the log.
        config: LogConfig,
        /// Time of the creation.
        time: Timestamp,
    },
    /// A log's settings.
    Configured(LogConfig),
    /// A cursor was moved to the frame's first lsn, or deleted.
    Cursor {
        /// Name of the cursor.
        name: String,
        /// Whether the cursor was deleted.
        deleted: bool,
    },
    /// Producers were forgotten.
    Forgotten {
        /// Each id with its ended epoch.
        producers: Vec<(String, u64)>,
        /// The lowest epoch with which an unknown producer may begin; 0: unchanged.
        first_epoch: u64,
    },
    /// Description of the segment before.
    Link {
        /// Number of the segment before; `None` in the first segment of a store.
        predecessor: Option<u64>,
        /// End of the segment before.
        predecessor_end: Position,
        /// Header checksum of its last frame.
        predecessor_chain: u32,
        /// Recovery epoch from here on.
        recovery_epoch: u64,
        /// Counter of the next log id.
        next_log_counter: u64,
        /// Id and next lsn of each log that the segment before touched. `None` if there were too many.
        closings: Option<Vec<(LogId, Lsn)>>,
    },
    /// The end of a segment.
    Seal {
        /// Number of frames before the seal.
        frames: u64,
        /// Number of records in these frames.
        records: u64,
        /// XXH3-128 of the bytes from the first frame up to the seal.
        digest: u128,
        /// Whether the run ended cleanly here.
        clean: bool,
    },
}

/// A log in the index of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedRow {
    /// Number of the segment.
    pub segment: u64,
    /// The log.
    pub log: DumpedLog,
    /// The log's frames: offset in the file, first lsn, records, bytes.
    pub entries: Vec<(u64, Lsn, u32, u32)>,
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedCheckpoint {
    /// Path of the file.
    pub file: String,
    /// Number of the last segment that the checkpoint covers.
    pub last_segment: u64,
    /// Recovery epoch.
    pub recovery_epoch: u64,
    /// Counter of the next log id.
    pub next_log_counter: u64,
    /// Whether the run ended cleanly with this checkpoint.
    pub clean: bool,
    /// Number of segments that the checkpoint lists.
    pub segments: u64,
}

/// State of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedLog {
    /// Id of the log.
    pub log_id: LogId,
    /// Name of the log; `None` if damage removed it.
    pub log: Option<LogName>,
    /// The first record kept.
    pub first_lsn: Lsn,
    /// The next lsn.
    pub next_lsn: Lsn,
    /// Stored bytes of the log's frames.
    pub stored_bytes: u64,
    /// Whether the log was deleted.
    pub deleted: bool,
    /// Stored time of the log's newest record.
    pub newest: Timestamp,
}

impl DumpedLog {
    fn of(image: Image) -> Self {
        Self {
            log_id: image.id,
            log: image.name,
            first_lsn: image.kept.first,
            next_lsn: image.next,
            stored_bytes: image.stored_bytes,
            deleted: image.deleted,
            newest: image.last_time,
        }
    }
}

/// The caller wants no more pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enough;

/// Receives one piece after another.
type TakeDumped<'a> = dyn FnMut(Dumped) -> Result<(), Enough> + 'a;

/// Ids and names of the logs seen so far.
#[derive(Default)]
struct LogNames(HashMap<LogId, LogName>);

impl LogNames {
    fn learn(&mut self, id: LogId, name: &str) {
        if let Ok(name) = LogName::new(name) {
            self.0.insert(id, name);
        }
    }
}

impl Offline {
    /// Passes all frames to `take` in order, with damaged stretches among them.
    ///
    /// # Errors
    /// If the directory cannot be read, or has no such segment.
    pub fn dump_frames(
        &self,
        filter: &DumpFilter,
        take: &mut TakeDumped<'_>,
    ) -> Result<(), DumpError> {
        let survey = self.survey()?;
        let mut names = self.names()?;
        for (segment, sorted) in chosen(survey, filter)? {
            let segment = &segment;
            let index = read_index(&*self.disk, segment.life.id);
            if let Some(index) = index.map_err(OpenError::io("reading an index"))? {
                for image in index.rows().filter_map(|row| index.image(&row)) {
                    if let Some(name) = image.name {
                        names.0.insert(image.id, name);
                    }
                }
            }
            if self.dump_segment((segment, sorted), filter, &mut names, take)? == Err(Enough) {
                break;
            }
        }
        Ok(())
    }

    fn dump_segment(
        &self,
        (segment, sorted): (&Surveyed, Option<DumpedRun>),
        filter: &DumpFilter,
        names: &mut LogNames,
        take: &mut TakeDumped<'_>,
    ) -> Result<Result<(), Enough>, OpenError> {
        let fail = || OpenError::io(format!("reading {}", segment.path));
        let shown = take(Dumped::Segment(DumpedSegment {
            id: segment.life.id.get(),
            file: segment.path.clone(),
            base: segment.base,
            end: segment.end,
            sorted,
            size: segment.life.size,
            salt: segment.life.salt,
        }));
        if shown == Err(Enough) {
            return Ok(Err(Enough));
        }
        let mut reader = StepReader::open(&*self.disk, &segment.path).map_err(fail())?;
        let mut read = |from: u64, bytes: u64| Ok(reader.read(from, bytes)?);
        let mut frames = Walk::stream(&segment.life, segment.base, segment.end, &mut read);
        let mut told = Ok(());
        loop {
            let next = frames.next(segment.end, |event| {
                told = match event {
                    Event::Frame {
                        header,
                        bytes,
                        body,
                    } => {
                        let keys = self.keys.as_ref();
                        let frame = dumped(segment, header, (bytes, body), names, keys);
                        match wanted(&frame, filter) {
                            true => take(Dumped::Frame(Box::new(frame))),
                            false => Ok(()),
                        }
                    }
                    Event::Hole { from, to, .. } => take(Dumped::Damaged {
                        segment: segment.life.id.get(),
                        from,
                        to,
                    }),
                };
            });
            match next {
                Ok(true) if told.is_ok() => {}
                Ok(_) => return Ok(told),
                Err(Stop::Io(error)) => return Err(fail()(error)),
                Err(Stop::Stopped) => return Ok(Err(Enough)),
            }
        }
    }

    /// Names in the checkpoints.
    fn names(&self) -> Result<LogNames, OpenError> {
        let mut names = LogNames::default();
        let fail = || OpenError::io("reading a checkpoint");
        for id in checkpoint::list(&*self.disk).map_err(fail())? {
            if let Some(bytes) = checkpoint::read(&*self.disk, id).map_err(fail())? {
                checkpoint::decode(&bytes, |image| {
                    if let Some(name) = image.name {
                        names.0.insert(image.id, name);
                    }
                });
            }
        }
        Ok(names)
    }

    /// Passes the indexes of segments to `take`, log by log.
    ///
    /// # Errors
    /// If the directory cannot be read, or has no such segment.
    pub fn dump_indexes(
        &self,
        filter: &DumpFilter,
        take: &mut TakeDumped<'_>,
    ) -> Result<(), DumpError> {
        for (segment, _) in chosen(self.survey()?, filter)? {
            let id = segment.life.id;
            let index = read_index(&*self.disk, id).map_err(OpenError::io("reading an index"))?;
            let Some(index) = index.filter(|index| index.is_of(&segment.life, segment.base)) else {
                continue;
            };
            for row in index.rows() {
                let Some(image) = index.image(&row) else {
                    continue;
                };
                if filter.log.is_some() && filter.log != image.name {
                    continue;
                }
                let entries = index.entries(&row);
                let entry = |place: crate::format::active::Place| {
                    let offset = place.position.since(segment.base);
                    (offset, place.first_lsn, place.count, place.frame_len)
                };
                let row = DumpedRow {
                    segment: id.get(),
                    log: DumpedLog::of(image),
                    entries: entries.from(0).map(entry).collect(),
                };
                if take(Dumped::Row(Box::new(row))) == Err(Enough) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Passes the complete checkpoints to `take`, newest first, log by log.
    ///
    /// # Errors
    /// If the directory cannot be read, or has no such segment.
    pub fn dump_checkpoints(
        &self,
        filter: &DumpFilter,
        take: &mut TakeDumped<'_>,
    ) -> Result<(), DumpError> {
        let fail = || OpenError::io("reading a checkpoint");
        let ids = checkpoint::list(&*self.disk).map_err(fail())?;
        for id in ids.into_iter().rev() {
            let Some(bytes) = checkpoint::read(&*self.disk, id).map_err(fail())? else {
                continue;
            };
            let Some(summary) = checkpoint::decode(&bytes, |_| {}) else {
                continue;
            };
            let mut told = take(Dumped::Checkpoint(DumpedCheckpoint {
                file: checkpoint::path(id),
                last_segment: summary.last.get(),
                recovery_epoch: summary.epoch.get(),
                next_log_counter: summary.next_log_counter,
                clean: summary.clean,
                segments: summary.segments.len() as u64,
            }));
            checkpoint::decode(&bytes, |image| {
                let wanted = filter.log.is_none() || filter.log == image.name;
                if told.is_ok() && wanted {
                    told = take(Dumped::Log(Box::new(DumpedLog::of(image))));
                }
            });
            if told.is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// Sorted runs, then segments; or only the wanted one. Frames of runs lie at addresses, which are no
/// positions of the journal.
fn chosen(
    survey: Survey,
    filter: &DumpFilter,
) -> Result<Vec<(Surveyed, Option<DumpedRun>)>, DumpError> {
    let runs = survey.runs.iter().map(|found| {
        let file = Surveyed {
            life: found.opened.life,
            path: found.run.segment.path(),
            base: found.run.segment.base,
            end: found.run.segment.base.advance(found.opened.end),
            link: None,
        };
        let head = &found.opened.head;
        let told = DumpedRun {
            first: head.first.get(),
            last: head.last.get(),
            base: head.first_base,
            end: head.end,
        };
        (file, Some(told))
    });
    let mut files: Vec<_> = runs.collect();
    files.extend(survey.segments.into_iter().map(|segment| (segment, None)));
    let Some(wanted) = filter.segment else {
        return Ok(files);
    };
    let standing = files.iter().find_map(|(file, told)| {
        let run = told.filter(|run| (run.first..=run.last).contains(&wanted))?;
        Some((file.life.id, run))
    });
    files.retain(|(segment, _)| segment.life.id.get() == wanted);
    match (files.is_empty(), standing) {
        (false, _) => Ok(files),
        (true, Some((run, _))) => Err(DumpError::NotFound(format!(
            "segment {wanted:016x} was sorted: what it held is in the sorted run {run}"
        ))),
        (true, None) => Err(DumpError::NotFound(format!(
            "there is no segment {wanted:016x} with frames"
        ))),
    }
}

fn wanted(frame: &DumpedFrame, filter: &DumpFilter) -> bool {
    let by_log = filter.log.is_none() || frame.log == filter.log;
    let bounded = filter.from_lsn.is_some() || filter.to_lsn.is_some();
    if !by_log || !bounded {
        return by_log;
    }
    let next = frame.first_lsn.checked_advance(u64::from(frame.count));
    [FrameKind::Batch.word(), FrameKind::Pack.word()].contains(&frame.kind)
        && filter.from_lsn.is_none_or(|from| next > Some(from))
        && filter.to_lsn.is_none_or(|to| frame.first_lsn < to)
}

fn dumped(
    segment: &Surveyed,
    header: &FrameHeader,
    (bytes, body): (&[u8], Option<&[u8]>),
    names: &mut LogNames,
    keys: Option<&Cipher>,
) -> DumpedFrame {
    let directory = frame::directory_of(bytes, header);
    for entry in directory.iter().flat_map(|directory| &directory.entries) {
        if let Some(name) = &entry.name {
            names.learn(entry.log_id, name);
        }
    }
    let body = body_of(header, bytes, body, keys);
    if let DumpedBody::Created { name, .. } = &body {
        names.learn(header.log_id, name);
    }
    DumpedFrame {
        segment: segment.life.id.get(),
        position: header.position,
        offset: header.position.since(segment.base),
        kind: header.kind.word(),
        codec: header.codec(),
        continues: header.continues(),
        header_bytes: header.header_len,
        body_bytes: header.body_len,
        body_crc: header.body_crc,
        count: header.count,
        log_id: header.log_id,
        // A link has a segment's number in this field.
        log: names
            .0
            .get(&header.log_id)
            .filter(|_| header.kind != FrameKind::Link)
            .cloned(),
        first_lsn: header.first_lsn,
        arrival: header.arrival,
        durable_mark: header.durable_mark,
        chain: header.chain,
        crc: header.crc,
        producer: frame::producer_of(bytes, header),
        directory: directory.map(|directory| {
            let entry = |entry: frame::DirectoryEntry| DumpedEntry {
                kind: entry.kind.word(),
                frame_bytes: entry.frame_len,
                log_id: entry.log_id,
                first_lsn: entry.first_lsn,
                count: entry.count,
                name: entry.name,
            };
            let entries = directory.entries.into_iter().map(entry).collect();
            (directory.start, entries)
        }),
        body,
    }
}

/// The records of one former frame of the journal.
fn records_of(plain: &[u8], first: Lsn, arrival: Timestamp) -> Option<Vec<DumpedRecord>> {
    let lsns = (0..).map(|index| first.checked_advance(index));
    let record = |(record, lsn): (Record, Option<Lsn>)| {
        Some(DumpedRecord {
            lsn: lsn?,
            time: record.timestamp.unwrap_or(arrival),
            record,
        })
    };
    codec::records(plain)?
        .into_iter()
        .zip(lsns)
        .map(record)
        .collect()
}

/// The bytes of a body before it was compressed and encrypted. `None` if they cannot be read.
///
/// # Errors
/// If the key of the body is missing.
fn plain_of<'b>(
    keys: Option<&Cipher>,
    bound: &BodyPlace,
    stored: &'b [u8],
) -> Result<Option<Cow<'b, [u8]>>, MissingKey> {
    if !is_sealed(bound.codec) {
        return Ok(compress::decompress(bound.codec, stored));
    }
    let Some(sealed) = SealedBody::parse(stored) else {
        return Ok(None);
    };
    match sealed.open(keys.map(|keys| &**keys), bound) {
        Ok(opened) => {
            let plain = compress::decompress(bound.codec & !SEALED, &opened);
            Ok(plain.map(|plain| Cow::Owned(plain.into_owned())))
        }
        Err(CannotOpen::NoKey(_)) => Err(MissingKey),
        // Its bytes were changed on purpose.
        Err(CannotOpen::Altered(_)) => Ok(None),
    }
}

/// The key of encrypted records is not at hand.
struct MissingKey;

fn body_of(
    header: &FrameHeader,
    bytes: &[u8],
    body: Option<&[u8]>,
    keys: Option<&Cipher>,
) -> DumpedBody {
    let Some(stored) = body else {
        return DumpedBody::Damaged;
    };
    let read = || {
        Some(match header.kind {
            FrameKind::Batch => {
                let bound = BodyPlace {
                    log: header.log_id,
                    first_lsn: header.first_lsn,
                    count: header.count,
                    codec: header.codec(),
                };
                match plain_of(keys, &bound, stored) {
                    Ok(plain) => {
                        let (first, arrival) = (header.first_lsn, header.arrival);
                        DumpedBody::Records(records_of(&plain?, first, arrival)?)
                    }
                    Err(MissingKey) => {
                        DumpedBody::Encrypted(vec![sealed::key_of(header.codec(), stored)])
                    }
                }
            }
            FrameKind::Pack => {
                let mut records = Vec::new();
                let pieces = pack::pieces(bytes, header)?;
                let body_at = header.header_len as usize;
                for piece in &pieces {
                    let stored = run_file::stored(bytes, body_at, piece)?;
                    let bound = BodyPlace {
                        log: header.log_id,
                        first_lsn: piece.first_lsn,
                        count: piece.count,
                        codec: piece.codec,
                    };
                    let Ok(plain) = plain_of(keys, &bound, stored) else {
                        let key = |piece: &Piece| {
                            let stored = run_file::stored(bytes, body_at, piece)?;
                            Some(sealed::key_of(piece.codec, stored))
                        };
                        let keys: Option<BTreeSet<u64>> = pieces.iter().map(key).collect();
                        return Some(DumpedBody::Encrypted(keys?.into_iter().collect()));
                    };
                    records.extend(records_of(&plain?, piece.first_lsn, piece.arrival)?);
                }
                DumpedBody::Records(records)
            }
            FrameKind::Created => {
                let created = Created::decode(stored)?;
                DumpedBody::Created {
                    name: created.name,
                    config: created.config,
                    time: created.create_time,
                }
            }
            FrameKind::Configured => DumpedBody::Configured(body::config(stored)?),
            FrameKind::Cursor => {
                let cursor = CursorBody::decode(stored)?;
                DumpedBody::Cursor {
                    name: cursor.name.as_str().to_owned(),
                    deleted: cursor.deleted,
                }
            }
            FrameKind::Forgotten => {
                let forgotten = Forgotten::decode(stored)?;
                let each = forgotten.producers.into_iter();
                let each = each.map(|(id, epoch)| (id.as_str().to_owned(), epoch));
                DumpedBody::Forgotten {
                    producers: each.collect(),
                    first_epoch: forgotten.first_epoch,
                }
            }
            FrameKind::Link => {
                let link = Link::decode(stored)?;
                let closings = link.closings.map(|closings| {
                    let each = closings.into_iter();
                    each.map(|closing| (closing.log_id, closing.next_lsn))
                        .collect()
                });
                DumpedBody::Link {
                    predecessor: link.predecessor.map(SegmentId::get),
                    predecessor_end: link.predecessor_end,
                    predecessor_chain: link.predecessor_chain,
                    recovery_epoch: link.recovery_epoch.get(),
                    next_log_counter: link.next_log_counter,
                    closings,
                }
            }
            FrameKind::Seal => {
                let seal = Seal::decode(stored)?;
                DumpedBody::Seal {
                    frames: seal.frames,
                    records: seal.records,
                    digest: seal.digest,
                    clean: seal.clean,
                }
            }
            FrameKind::Deleted | FrameKind::Trim | FrameKind::Fence | FrameKind::Marker => {
                DumpedBody::Empty
            }
            // The index, and the headers of packs, hold their contents.
            FrameKind::Run | FrameKind::Images | FrameKind::Order => DumpedBody::Empty,
        })
    };
    read().unwrap_or(DumpedBody::Damaged)
}
