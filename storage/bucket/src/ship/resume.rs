//! The first step of an owner: compares the rows of the tail with the local journal, and stores the rest.
//!
//! ```text
//! bucket   ▐ files of the manifest ▌▐ rows ▌
//! journal  ▐ ......................  ▐ same ▌ rest, and the new segment ▌ ─▶ rows
//! ```

use std::io;
use std::ops::Range;
use std::sync::Arc;

use wald_storage::{JournalPart, Position, SegmentId};

use super::error::ShipError;
use super::{PART_BYTES, Shipper, rest_of};
use crate::tail::{LARGEST_PART, ReplicaTail, TailPart};

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

    /// The last row of the tail. `each` gets the segment and the end of every row.
    async fn read(
        tail: &ReplicaTail,
        mut each: impl FnMut(SegmentId, Position),
    ) -> Result<Option<Self>, ShipError> {
        let mut rows = tail.rows().await?;
        let mut last: Option<Self> = None;
        while let Some(row) = rows.next().await? {
            let goes_on = last.filter(|last| {
                last.row.segment == row.segment && last.row.bytes.len() == LARGEST_PART
            });
            let from = goes_on.map_or(row.position, |last| last.from);
            let now = Self { from, row };
            each(SegmentId::new(now.row.segment), now.end());
            last = Some(now);
        }
        Ok(last)
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
    /// Stores everything that is durable now, behind the files and rows that the bucket has.
    pub(super) async fn resume(&mut self) -> Result<(), ShipError> {
        let tail = Arc::clone(&self.tail);
        let shipped = &self.ship.shipped;
        let last = LastRow::read(&tail, |segment, end| {
            shipped.send_modify(|shipped| shipped.note(segment, end, 1));
        })
        .await?;
        let durable = self.ship.source.progress().durable;
        let Some(position) = self.files.position() else {
            // The engine counts the sealed segments that wait, so that their files are sent.
            self.ship.source.release(Position::ZERO);
            if self.is_sorted().await? {
                return self.first_files().await;
            }
            if let Some(last) = last {
                self.rows_agree(&last, durable).await?;
            }
            return self.store_rest(durable).await;
        };
        if position > durable {
            return Err(self.diverged(format!(
                "its files reach position {position}, and the directory {durable}"
            )));
        }
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

    /// Whether the journal cannot be read from its begin.
    async fn is_sorted(&self) -> Result<bool, ShipError> {
        match self.ship.source.read_part(Position::ZERO, 1).await {
            Ok(_) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(error) => Err(ShipError::Journal(error)),
        }
    }

    /// Compares the last row with the journal.
    async fn rows_agree(&self, last: &LastRow, durable: Position) -> Result<(), ShipError> {
        let end = last.end();
        let lacks = || {
            let (segment, position) = (last.row.segment, last.row.position);
            self.diverged(format!(
                "its rows reach position {end}, and the row at position {position} of segment {segment} differs or is \
                 missing"
            ))
        };
        if end > durable {
            return Err(lacks());
        }
        let mut at = Position::new(last.from);
        while at < end {
            let part = self.ship.source.read_part(at, PART_BYTES).await;
            let part = part.map_err(|error| match error.kind() {
                // The journal has no group there.
                io::ErrorKind::NotFound | io::ErrorKind::InvalidData => lacks(),
                _ => ShipError::Journal(error),
            })?;
            let part = part.ok_or_else(lacks)?;
            if part.position != at || !last.agrees(&part) {
                return Err(lacks());
            }
            at = part.end;
            if at > end {
                let rest = rest_of(&part, end);
                self.ship.store_part(&self.tail, &rest).await?;
                self.ship.note(&rest);
            }
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

    /// The first owner of a store that has sorted a part of its journal: files come first. Nothing counts as replicated
    /// before they have their manifest.
    async fn first_files(&mut self) -> Result<(), ShipError> {
        let (manifest, sent_bytes) = self.files.send(&self.ship).await?;
        let position = manifest.position;
        self.ship
            .shipped
            .send_modify(|shipped| shipped.skip_to(position));
        let durable = self.ship.source.progress().durable;
        self.store_to(durable).await?;
        self.files
            .name(&self.ship, &self.tail, &manifest, sent_bytes)
            .await?;
        self.store_rest(durable).await
    }

    fn drain(&self, position: Position) {
        self.ship.drain(&self.tail, position);
    }

    fn diverged(&self, what: String) -> ShipError {
        let place = self.ship.bucket.place().to_owned();
        ShipError::Diverged { place, what }
    }
}
