//! The key of a store's digests, and the choice of the segment that provides it.

use std::sync::Arc;

use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::SegmentId;
use crate::disk::{Disk, is_shortage};
use crate::format::digest::Secret;
use crate::format::life::{DigestKey, Life};
use crate::journal::segment::Segment;

/// The key in the segments whose beginnings were read.
#[derive(Debug, Default)]
pub(super) struct FoundKey {
    newest: Option<(SegmentId, Secret)>,
    /// Whether a segment is of a version without keys.
    without: bool,
}

impl FoundKey {
    /// Notes the beginning of a segment: its life blocks at least.
    pub(super) fn note(&mut self, id: SegmentId, head: &[u8], store_id: u128) -> DigestKey {
        let key = Life::key(head, store_id);
        match key {
            DigestKey::Good(secret) if self.newest.is_none_or(|(newest, _)| newest <= id) => {
                self.newest = Some((id, secret));
            }
            DigestKey::None => self.without = true,
            DigestKey::Good(_) | DigestKey::Damaged | DigestKey::Unknown => {}
        }
        key
    }

    /// The key of the newest segment that has a good one. `None` for a new store, and for a store of an older
    /// version. A start from a checkpoint has not read the segments that it covers. It reads them only if no
    /// segment behind it has the key.
    ///
    /// # Errors
    /// If there are no file descriptors. A segment that cannot be read counts as damaged.
    pub(super) fn secret<'a>(
        &mut self,
        disk: &dyn Disk,
        segments: impl DoubleEndedIterator<Item = &'a Arc<Segment>>,
        store_id: u128,
    ) -> std::io::Result<Option<Secret>> {
        if self.newest.is_none() {
            for segment in segments.rev() {
                let head = match read_head(disk, &segment.path()) {
                    Err(error) if is_shortage(&error) => return Err(error),
                    head => head.unwrap_or_default(),
                };
                // All segments before one without a key are of versions without keys.
                match self.note(segment.life.id, &head, store_id) {
                    DigestKey::Good(_) | DigestKey::None => break,
                    DigestKey::Damaged | DigestKey::Unknown => {}
                }
            }
        }
        Ok(self.newest.map(|(_, secret)| secret))
    }

    /// Whether a store that was begun before has lost its key.
    pub(super) fn is_lost(&self) -> bool {
        self.newest.is_none() && !self.without
    }
}

fn read_head(disk: &dyn Disk, path: &str) -> std::io::Result<Vec<u8>> {
    let mut head = vec![0; usize::try_from(LIFE_BYTES).map_err(std::io::Error::other)?];
    let length = disk.open(path)?.read_full_at(&mut head, 0)?;
    head.truncate(length);
    Ok(head)
}
