//! The first step of an owner: compares the rows of the tail with the local journal, and stores the rest.
//!
//! ```text
//! bucket   ▐ files of the manifest ▌▐ rows ▌
//! journal  ▐ ......................  ▐ same ▌ rest, and the new segment ▌ ─▶ rows
//! ```
//!
//! A node that would end another owner compares both before its claim, too ([`compare`]).

use std::io;
use std::ops::Range;

use wald_storage::{JournalPart, Position, SegmentId};

use super::error::ShipError;
use super::files::read_manifest;
use super::shipped::Shipped;
use super::{ManifestFormat, PART_BYTES, ShipSource, Shipper, rest_of};
use crate::bucket::Bucket;
use crate::tail::{COPY_ATTEMPTS, LARGEST_PART, ReplicaTail, TailCopy, TailErrorKind, TailPart};

/// All rows of the tail, as they were read once.
#[derive(Default)]
pub(super) struct SeenRows {
    shipped: Shipped,
    last: Option<LastRow>,
}

impl SeenRows {
    /// Reads all rows.
    async fn read(tail: &ReplicaTail) -> Result<Self, ShipError> {
        let mut rows = tail.rows().await?;
        let mut seen = Self::default();
        while let Some(row) = rows.next().await? {
            seen.add(row);
        }
        Ok(seen)
    }

    /// Adds the next row.
    pub(super) fn add(&mut self, row: TailPart) {
        let now = LastRow::after(self.last.take(), row);
        let segment = SegmentId::new(now.row.segment);
        self.shipped.note(segment, now.end(), 1);
        self.last = Some(now);
    }
}

/// The last row, and the position from which the journal can be read to reach it.
struct LastRow {
    /// A row may begin within a group, so reading begins with the row at which its group begins.
    from: u64,
    row: TailPart,
}

impl LastRow {
    fn end(&self) -> Position {
        Position::new(self.row.position + self.row.bytes.len() as u64)
    }

    /// The last row so far, if `row` follows `last`.
    fn after(last: Option<Self>, row: TailPart) -> Self {
        let goes_on = last
            .filter(|last| last.row.segment == row.segment && last.row.bytes.len() == LARGEST_PART);
        let from = goes_on.map_or(row.position, |last| last.from);
        Self { from, row }
    }

    /// Makes sure that the journal has this row. Returns the rest of the group in which the row ends.
    async fn compare(
        &self,
        source: &dyn ShipSource,
        bucket: &Bucket,
        durable: Position,
    ) -> Result<Option<JournalPart>, ShipError> {
        let end = self.end();
        let lacks = || {
            let (segment, position) = (self.row.segment, self.row.position);
            diverged(
                bucket,
                format!(
                    "its rows reach position {end}, and the row at position {position} of segment {segment} differs or is \
                     missing"
                ),
            )
        };
        if end > durable {
            return Err(lacks());
        }
        let mut at = Position::new(self.from);
        while at < end {
            let part = source.read_part(at, PART_BYTES).await;
            let part = part.map_err(|error| match error.kind() {
                // The journal has no group there.
                io::ErrorKind::NotFound | io::ErrorKind::InvalidData => lacks(),
                _ => ShipError::Journal(error),
            })?;
            let part = part.ok_or_else(lacks)?;
            if part.position != at || !self.agrees(&part) {
                return Err(lacks());
            }
            at = part.end;
            if at > end {
                return Ok(Some(rest_of(&part, end)));
            }
        }
        Ok(None)
    }

    /// Whether a part has the same bytes as the row, as far as both have them.
    fn agrees(&self, part: &JournalPart) -> bool {
        let (row, start) = (&self.row, part.position.get());
        let from = start.max(row.position);
        let to = part.end.min(self.end()).get();
        let same = from >= to
            || within(&part.bytes, start, from..to) == within(&row.bytes, row.position, from..to);
        part.segment.get() == row.segment && same
    }
}

/// The bytes of a range of positions, if `bytes` from position `base` on have all of it.
fn within(bytes: &[u8], base: u64, range: Range<u64>) -> Option<&[u8]> {
    let from = usize::try_from(range.start.checked_sub(base)?).ok()?;
    let to = usize::try_from(range.end.checked_sub(base)?).ok()?;
    bytes.get(from..to)
}

impl Shipper {
    /// Stores everything that is durable now, behind the files and rows that the bucket has. `seen`: the rows, if this owner has
    /// read them already.
    pub(super) async fn resume(&mut self, seen: Option<SeenRows>) -> Result<(), ShipError> {
        let SeenRows { shipped, last } = match seen {
            Some(seen) => seen,
            None => SeenRows::read(&self.tail).await?,
        };
        self.ship.shipped.send_replace(shipped);
        let durable = self.ship.source.progress().durable;
        let Some(position) = self.files.position() else {
            // The engine counts the sealed segments that wait, so that their files are sent.
            self.ship.source.release(Position::ZERO);
            if is_sorted(&*self.ship.source).await? {
                reaches_rows(&self.ship.bucket, last.as_ref(), durable)?;
                return self.first_files(last).await;
            }
            if let Some(last) = last {
                self.rows_agree(&last, durable).await?;
            }
            return self.store_rest(durable).await;
        };
        reaches(&self.ship.bucket, position, durable)?;
        self.ship.source.release(position);
        if let Some(last) = last.filter(|last| last.end() > position) {
            self.rows_agree(&last, durable).await?;
        }
        self.ship
            .shipped
            .send_modify(|shipped| shipped.skip_to(position));
        self.drain(position);
        self.store_rest(durable).await
    }

    /// Compares the last row with the journal, and stores the rest of the group in which it ends.
    async fn rows_agree(&self, last: &LastRow, durable: Position) -> Result<(), ShipError> {
        let rest = last.compare(&*self.ship.source, &self.ship.bucket, durable);
        if let Some(rest) = rest.await? {
            self.ship.store_part(&self.tail, &rest).await?;
            self.ship.note(&rest);
        }
        Ok(())
    }

    /// Stores the rest of the journal up to a position that is durable, and publishes it.
    async fn store_rest(&self, durable: Position) -> Result<(), ShipError> {
        self.store_to(durable).await?;
        let end = self.ship.shipped.borrow().end;
        if end > Position::ZERO {
            self.ship.source.publish(end);
        }
        self.ship.is_up();
        Ok(())
    }

    /// Stores the parts up to a position. Publishes nothing.
    async fn store_to(&self, durable: Position) -> Result<(), ShipError> {
        loop {
            let from = self.ship.shipped.borrow().end;
            if from >= durable {
                return Ok(());
            }
            let part = self.ship.source.read_part(from, PART_BYTES).await;
            let Some(part) = part.map_err(ShipError::Journal)? else {
                return Ok(());
            };
            self.ship.store_part(&self.tail, &part).await?;
            self.ship.note(&part);
        }
    }

    /// The first owner of a store that has sorted a part of its journal: files come first. They end with a segment, so the
    /// rows begin with one. Nothing counts as replicated before the files have their manifest. `last`: a row of an earlier
    /// attempt.
    async fn first_files(&mut self, last: Option<LastRow>) -> Result<(), ShipError> {
        let (manifest, sent_bytes) = self.files.send(&self.ship).await?;
        let position = manifest.position;
        // The sorter leaves the newest finished segment.
        if position == Position::ZERO {
            return Err(self.files.malformed("names no finished segment"));
        }
        let durable = self.ship.source.progress().durable;
        if let Some(last) = last.filter(|last| last.end() > position) {
            self.rows_agree(&last, durable).await?;
        }
        self.ship
            .shipped
            .send_modify(|shipped| shipped.skip_to(position));
        self.store_to(durable).await?;
        self.files
            .name(&self.ship, &self.tail, manifest, sent_bytes)
            .await?;
        self.store_rest(durable).await
    }

    fn drain(&self, position: Position) {
        self.ship.drain(&self.tail, position);
    }
}

/// Makes sure that the journal has everything that the bucket has. Writes nothing, and the owner goes on meanwhile.
///
/// # Errors
/// `Diverged` if the journal lacks something; others if the bucket or the journal cannot be read.
pub(super) async fn compare(
    source: &dyn ShipSource,
    bucket: &Bucket,
    format: &dyn ManifestFormat,
) -> Result<(), ShipError> {
    let Some((copy, last)) = last_row(bucket).await? else {
        return Ok(());
    };
    let durable = source.progress().durable;
    let mut position = Position::ZERO;
    match copy.manifest() {
        Some(manifest) => {
            read_manifest(bucket, &manifest.name, format).await?;
            position = Position::new(manifest.position);
            reaches(bucket, position, durable)?;
        }
        // The first owner has promised nothing yet. The next one sends the files.
        None if is_sorted(source).await? => return reaches_rows(bucket, last.as_ref(), durable),
        None => {}
    }
    if let Some(last) = last.filter(|last| last.end() > position) {
        last.compare(source, bucket, durable).await?;
    }
    Ok(())
}

/// The tail as of one moment, and its last row. Begins again while the owner removes rows during the read.
async fn last_row(bucket: &Bucket) -> Result<Option<(TailCopy, Option<LastRow>)>, ShipError> {
    let mut attempt = 1;
    loop {
        let Some(mut copy) = TailCopy::open(bucket).await? else {
            return Ok(None);
        };
        let mut last = None;
        let error = loop {
            match copy.next().await {
                Ok(Some(row)) => last = Some(LastRow::after(last, row)),
                Ok(None) => return Ok(Some((copy, last))),
                Err(error) => break error,
            }
        };
        if error.kind() != TailErrorKind::Changed || attempt == COPY_ATTEMPTS {
            return Err(error.into());
        }
        attempt += 1;
    }
}

/// Makes sure that the journal reaches the files.
fn reaches(bucket: &Bucket, position: Position, durable: Position) -> Result<(), ShipError> {
    match position <= durable {
        true => Ok(()),
        false => Err(diverged(
            bucket,
            format!("its files reach position {position}, and the directory {durable}"),
        )),
    }
}

/// Makes sure that the journal reaches the rows.
fn reaches_rows(
    bucket: &Bucket,
    last: Option<&LastRow>,
    durable: Position,
) -> Result<(), ShipError> {
    match last.map(LastRow::end) {
        Some(end) if end > durable => Err(diverged(
            bucket,
            format!("its rows reach position {end}, and the directory {durable}"),
        )),
        _ => Ok(()),
    }
}

/// Whether the journal cannot be read from its begin.
async fn is_sorted(source: &dyn ShipSource) -> Result<bool, ShipError> {
    match source.read_part(Position::ZERO, 1).await {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(ShipError::Journal(error)),
    }
}

fn diverged(bucket: &Bucket, what: String) -> ShipError {
    let place = bucket.place().to_owned();
    ShipError::Diverged { place, what }
}
