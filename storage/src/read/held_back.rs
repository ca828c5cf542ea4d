//! Files that the sorter cannot use, and why.
//!
//! A fault stays noted until it is gone or a run replaces the file. Operators see the reasons.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::ids::SegmentId;
use crate::base::sync::Mutex;
use crate::journal::segment::Segment;

/// A part of a segment or run that the sorter cannot use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UnusablePart {
    Index,
    Link,
    /// The file is gone.
    File,
}

/// Segments and runs that the sorter cannot use, and why.
#[derive(Default)]
pub(crate) struct Unusable {
    why: Mutex<BTreeMap<(SegmentId, UnusablePart), String>>,
    /// A segment or run whose file is gone. Nothing is sorted until it is back or a start decides.
    pub(crate) gone: Mutex<Option<Arc<Segment>>>,
}

impl Unusable {
    /// Reasons why sorting cannot continue. Empty if it can.
    pub(crate) fn reasons(&self) -> Vec<String> {
        self.why.lock().values().cloned().collect()
    }

    /// Notes that the sorter cannot use this segment or run.
    pub(crate) fn stop_at(&self, id: SegmentId, fault: UnusablePart, why: String) {
        let mut unusable = self.why.lock();
        if unusable.get(&(id, fault)) != Some(&why) {
            tracing::warn!("{why}; nothing is sorted until then");
            unusable.insert((id, fault), why);
        }
    }

    /// Notes that the fault is gone.
    pub(crate) fn pass(&self, id: SegmentId, fault: UnusablePart) {
        self.why.lock().remove(&(id, fault));
    }

    /// Notes that the file of a segment or run is gone.
    pub(crate) fn note_gone(&self, segment: &Arc<Segment>) {
        *self.gone.lock() = Some(Arc::clone(segment));
        let why = format!(
            "{} is gone; put it back from a copy, or restart the daemon, which then names the lost records",
            segment.path()
        );
        self.stop_at(segment.life.id, UnusablePart::File, why);
    }

    /// Forgets segments and runs that a run has replaced.
    pub(crate) fn forget(&self, ids: &[SegmentId]) {
        self.why.lock().retain(|(id, _), _| !ids.contains(id));
    }
}
