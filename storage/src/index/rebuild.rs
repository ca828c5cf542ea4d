//! The index of a segment, made from its frames alone.
//!
//! Such an index is partial: it lacks the lsns of logs without records in the segment. `read::rebuilt` also uses
//! older indexes.

use std::io;

use crate::disk::Disk;
use crate::format::content::Content;
use crate::format::walk;
use crate::format::walk::{Bytes, WalkItem};
use crate::index::drafts::{Drafts, FoundFrame};
use crate::index::sealed::SealedIndex;
use crate::journal::segment::Segment;

/// The index of a sealed segment, rebuilt from its frames for a process that found the index file damaged.
pub(crate) fn index_from_frames(disk: &dyn Disk, segment: &Segment) -> io::Result<SealedIndex> {
    let content = Content::from_device(disk, &segment.path(), segment.life.size)?;
    let bytes = Bytes {
        life: &segment.life,
        base: segment.base,
        bytes: &content,
    };
    let end = segment.end.read().unwrap_or(segment.base);
    let walked = bytes.walk_finished(end);
    let mut drafts = Drafts::new(0);
    for item in &walked.items {
        if let WalkItem::Frame { header, body_good } = item {
            let frame = bytes.walked(header, *body_good);
            let found = FoundFrame {
                header,
                body: walk::body_of(&frame, header, *body_good),
                producer: None,
                unit: header.position,
            };
            drafts.apply(segment.life.id, &found, segment.base);
        }
    }
    content.check()?;
    let index = drafts.seal(&segment.life, segment.base, end, walked.chain);
    Ok(index.into_partial())
}
