//! What is stored, for people and programs to look at: every frame of a directory that
//! nobody serves, in order, with all that its header says; indexes; checkpoints.
//!
//! One step or one frame is in memory at a time, and the names of logs.

use std::collections::HashMap;

use crate::checkpoint;
use crate::codec;
use crate::digest::Digest;
use crate::error::{DumpError, OpenError};
use crate::ids::{LogId, LogName, Lsn, Position, SegmentId, Timestamp};
use crate::index::{Image, read_index};
use crate::journal::body::{self, Created, CursorBody, Link, Seal};
use crate::journal::compress;
use crate::journal::frame::{self, Header, Kind};
use crate::local::Forgotten;
use crate::record::{LogConfig, Producer, Record};
use crate::recovery::{Survey, Surveyed};
use crate::sorted;
use crate::verify::frames::{Event, Frames};
use crate::verify::pace::Stop;
use crate::verify::{Offline, Reader};

/// What of a store is wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DumpFilter {
    /// Only this segment.
    pub segment: Option<u64>,
    /// Only frames of this log; of logs that had the name one after the other, all.
    pub log: Option<LogName>,
    /// Only frames with a record from this lsn on.
    pub from_lsn: Option<Lsn>,
    /// Only frames with a record below this lsn.
    pub to_lsn: Option<Lsn>,
}

/// One piece of what is stored.
#[derive(Debug)]
pub enum Dumped {
    /// A segment begins.
    Segment(DumpedSegment),
    /// A frame of it.
    Frame(Box<DumpedFrame>),
    /// A stretch of it that does not verify.
    Damaged {
        /// The segment.
        segment: u64,
        /// Where it begins.
        from: Position,
        /// Where the next frame is, or the end of the segment.
        to: Position,
    },
    /// The index of a segment, one log at a time.
    Row(Box<DumpedRow>),
    /// A checkpoint begins.
    Checkpoint(DumpedCheckpoint),
    /// How a log stood when the checkpoint was taken.
    Log(Box<DumpedLog>),
}

/// A segment file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedSegment {
    /// Its number.
    pub id: u64,
    /// Its file.
    pub file: String,
    /// Position of the file's first byte.
    pub base: Position,
    /// Where its frames end.
    pub end: Position,
    /// The segments that it stands for, if it is a sorted run.
    pub sorted: Option<DumpedRun>,
    /// Size for all of its life.
    pub size: u64,
    /// What seeds its checksums.
    pub salt: u64,
}

/// What a sorted run stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DumpedRun {
    /// The first segment.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// Position of the first one's first byte.
    pub base: Position,
    /// Where the frames of the last one end.
    pub end: Position,
}

/// A frame, with all that its header says.
#[derive(Debug, Clone, PartialEq)]
pub struct DumpedFrame {
    /// The segment it is in.
    pub segment: u64,
    /// Where it is in the journal; of a frame of a sorted run an address beyond all positions.
    pub position: Position,
    /// Where it is in the file.
    pub offset: u64,
    /// What it says, in a word: batch, trim, link …
    pub kind: &'static str,
    /// Number of the codec of its body; 0 = none.
    pub codec: u8,
    /// Its atomic unit goes on in the next frame.
    pub continues: bool,
    /// Bytes of header and extensions.
    pub header_bytes: u32,
    /// Bytes of the body as stored.
    pub body_bytes: u32,
    /// CRC-32C of the body as stored.
    pub body_crc: u32,
    /// Records; of other kinds as the format says.
    pub count: u32,
    /// The log it is about.
    pub log_id: LogId,
    /// Its name, where that is known.
    pub log: Option<LogName>,
    /// First lsn; of other kinds as the format says.
    pub first_lsn: Lsn,
    /// When the server took it in.
    pub arrival: Timestamp,
    /// Everything below was flushed when this was written; 0 = nothing is said.
    pub durable_mark: Position,
    /// Header checksum of the frame before.
    pub chain: u32,
    /// Its own header checksum.
    pub crc: u32,
    /// Whose batch it is, with the digest of the records as sent.
    pub producer: Option<(Producer, Digest)>,
    /// What it tells of the group before: where that began, and each frame of it.
    pub directory: Option<(Position, Vec<DumpedEntry>)>,
    /// Its body.
    pub body: DumpedBody,
}

/// A frame, as the directory of a later one tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedEntry {
    /// What it says, in a word.
    pub kind: &'static str,
    /// Bytes of the frame.
    pub frame_bytes: u64,
    /// The log it is about.
    pub log_id: LogId,
    /// Its first lsn.
    pub first_lsn: Lsn,
    /// Its records.
    pub count: u32,
    /// The name, of a log that was created.
    pub name: Option<String>,
}

/// A record in a frame.
#[derive(Debug, Clone, PartialEq)]
pub struct DumpedRecord {
    /// Its lsn.
    pub lsn: Lsn,
    /// Its stored time.
    pub time: Timestamp,
    /// The record.
    pub record: Record,
}

/// What a frame holds.
#[derive(Debug, Clone, PartialEq)]
pub enum DumpedBody {
    /// It does not match its checksum, or cannot be read.
    Damaged,
    /// There is none, or none that this kind has.
    Empty,
    /// Records.
    Records(Vec<DumpedRecord>),
    /// A log came into being.
    Created {
        /// Its name.
        name: String,
        /// Its settings.
        config: LogConfig,
        /// When.
        time: Timestamp,
    },
    /// A log's settings.
    Configured(LogConfig),
    /// A cursor was moved to the frame's first lsn, or forgotten.
    Cursor {
        /// Its name.
        name: String,
        /// It is forgotten.
        deleted: bool,
    },
    /// Producers were forgotten.
    Forgotten {
        /// Each id with the epoch that is over.
        producers: Vec<(String, u64)>,
        /// The lowest epoch that an unknown producer may begin with; 0 if it did not change.
        first_epoch: u64,
    },
    /// What came before a segment.
    Link {
        /// The segment before; `None` in a store's first.
        predecessor: Option<u64>,
        /// Where it ends.
        predecessor_end: Position,
        /// Header checksum of its last frame.
        predecessor_chain: u32,
        /// Recovery epoch from here on.
        recovery_epoch: u64,
        /// Counter of the next log id.
        next_log_counter: u64,
        /// For each log the segment before touched: id and next lsn. `None` if they were
        /// too many to tell.
        closings: Option<Vec<(LogId, Lsn)>>,
    },
    /// The end of a segment.
    Seal {
        /// Frames before it.
        frames: u64,
        /// Records in them.
        records: u64,
        /// XXH3-128 of all bytes before it.
        digest: u128,
        /// Whether the run ended here as it should.
        clean: bool,
    },
}

/// What the index of a segment tells of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedRow {
    /// The segment.
    pub segment: u64,
    /// The log.
    pub log: DumpedLog,
    /// Its frames: offset in the file, first lsn, records, bytes.
    pub entries: Vec<(u64, Lsn, u32, u32)>,
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedCheckpoint {
    /// Its file.
    pub file: String,
    /// The last segment it covers.
    pub last_segment: u64,
    /// Recovery epoch.
    pub recovery_epoch: u64,
    /// Counter of the next log id.
    pub next_log_counter: u64,
    /// Whether the run ended with it.
    pub clean: bool,
    /// Segments it covers.
    pub segments: u64,
}

/// How a log stood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedLog {
    /// Its id.
    pub log_id: LogId,
    /// Its name; `None` if damage took it.
    pub log: Option<LogName>,
    /// The first record kept.
    pub first_lsn: Lsn,
    /// The next lsn.
    pub next_lsn: Lsn,
    /// Stored bytes of its frames.
    pub stored_bytes: u64,
    /// Whether it was deleted.
    pub deleted: bool,
    /// Stored time of its newest record.
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

/// Whoever looks has seen enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enough;

/// Takes one piece after another.
type Take<'a> = dyn FnMut(Dumped) -> Result<(), Enough> + 'a;

/// Ids and names of logs, as far as they were seen.
#[derive(Default)]
struct Names(HashMap<LogId, LogName>);

impl Names {
    fn learn(&mut self, id: LogId, name: &str) {
        if let Ok(name) = LogName::new(name) {
            self.0.insert(id, name);
        }
    }
}

impl Offline {
    /// Gives out all frames in order, damaged stretches among them.
    ///
    /// # Errors
    /// If the directory cannot be read, or has no such segment.
    pub fn dump_frames(&self, filter: &DumpFilter, take: &mut Take<'_>) -> Result<(), DumpError> {
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
        names: &mut Names,
        take: &mut Take<'_>,
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
        let mut reader = Reader::open(&*self.disk, &segment.path).map_err(fail())?;
        let mut read = |from: u64, bytes: u64| Ok(reader.read(from, bytes)?);
        let mut frames = Frames::new(segment.life, segment.base, segment.end, &mut read);
        let mut told = Ok(());
        loop {
            let next = frames.next(|event| {
                told = match event {
                    Event::Frame {
                        header,
                        bytes,
                        body,
                    } => {
                        let frame = dumped(segment, header, bytes, body, names);
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

    /// Names that checkpoints tell.
    fn names(&self) -> Result<Names, OpenError> {
        let mut names = Names::default();
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

    /// Gives out the indexes of segments, log by log.
    ///
    /// # Errors
    /// If the directory cannot be read, or has no such segment.
    pub fn dump_indexes(&self, filter: &DumpFilter, take: &mut Take<'_>) -> Result<(), DumpError> {
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
                let entry = |place: crate::index::Place| {
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

    /// Gives out the checkpoints that are whole, the newest first, log by log.
    ///
    /// # Errors
    /// If the directory cannot be read, or has no such segment.
    pub fn dump_checkpoints(
        &self,
        filter: &DumpFilter,
        take: &mut Take<'_>,
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

/// Sorted runs, then segments; or that one which is wanted. Frames of runs lie at addresses
/// that are no positions of the journal.
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
    [Kind::Batch.word(), Kind::Pack.word()].contains(&frame.kind)
        && filter.from_lsn.is_none_or(|from| next > Some(from))
        && filter.to_lsn.is_none_or(|to| frame.first_lsn < to)
}

fn dumped(
    segment: &Surveyed,
    header: &Header,
    bytes: &[u8],
    body: Option<&[u8]>,
    names: &mut Names,
) -> DumpedFrame {
    let directory = frame::directory_of(bytes, header);
    for entry in directory.iter().flat_map(|directory| &directory.entries) {
        if let Some(name) = &entry.name {
            names.learn(entry.log_id, name);
        }
    }
    let body = body_of(header, bytes, body);
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
        // A link has a segment's number there.
        log: names
            .0
            .get(&header.log_id)
            .filter(|_| header.kind != Kind::Link)
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

/// The records of what was one frame of the journal.
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

fn body_of(header: &Header, bytes: &[u8], body: Option<&[u8]>) -> DumpedBody {
    let Some(stored) = body else {
        return DumpedBody::Damaged;
    };
    let read = || {
        Some(match header.kind {
            Kind::Batch => {
                let plain = compress::decompress(header.codec(), stored)?;
                DumpedBody::Records(records_of(&plain, header.first_lsn, header.arrival)?)
            }
            Kind::Pack => {
                let mut records = Vec::new();
                for piece in sorted::pieces(bytes, header)? {
                    let stored = sorted::stored(bytes, header.header_len as usize, &piece)?;
                    let plain = compress::decompress(piece.codec, stored)?;
                    records.extend(records_of(&plain, piece.first_lsn, piece.arrival)?);
                }
                DumpedBody::Records(records)
            }
            Kind::Created => {
                let created = Created::decode(stored)?;
                DumpedBody::Created {
                    name: created.name,
                    config: created.config,
                    time: created.create_time,
                }
            }
            Kind::Configured => DumpedBody::Configured(body::config(stored)?),
            Kind::Cursor => {
                let cursor = CursorBody::decode(stored)?;
                DumpedBody::Cursor {
                    name: cursor.name.as_str().to_owned(),
                    deleted: cursor.deleted,
                }
            }
            Kind::Forgotten => {
                let forgotten = Forgotten::decode(stored)?;
                let each = forgotten.producers.into_iter();
                let each = each.map(|(id, epoch)| (id.as_str().to_owned(), epoch));
                DumpedBody::Forgotten {
                    producers: each.collect(),
                    first_epoch: forgotten.first_epoch,
                }
            }
            Kind::Link => {
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
            Kind::Seal => {
                let seal = Seal::decode(stored)?;
                DumpedBody::Seal {
                    frames: seal.frames,
                    records: seal.records,
                    digest: seal.digest,
                    clean: seal.clean,
                }
            }
            Kind::Deleted | Kind::Trim | Kind::Fence | Kind::Marker => DumpedBody::Empty,
            // What they tell is in the index, and in the header of the packs.
            Kind::Run | Kind::Images | Kind::Order => DumpedBody::Empty,
        })
    };
    read().unwrap_or(DumpedBody::Damaged)
}
