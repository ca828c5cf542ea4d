//! Scrubbing: sealed segments are read again and again, slowly. Bytes that a device lost are found while a
//! backup still has them, and not when a reader needs them.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::online::Verifier;
use super::segment::NextLsns;
use crate::api::finding::Severity;
use crate::api::pace::{Control, Pace, Stop};
use crate::base::ids::Timestamp;
use crate::base::metrics::ChecksumSite;
use crate::base::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Maximum time that one step gives way to appends that are under way. A pass therefore reads at least 1 MiB
/// per second, however busy the journal is.
const GIVE_WAY: Duration = Duration::from_secs(1);

/// Checks sealed segments slowly, again and again.
pub(crate) struct Scrubber {
    verifier: Arc<Verifier>,
    pub(crate) control: Control,
    /// Bytes read since the start.
    pub(crate) bytes: AtomicU64,
    /// End of the last complete pass; 0 = there is none.
    last_pass: AtomicI64,
}

impl Deref for Scrubber {
    type Target = Verifier;

    fn deref(&self) -> &Verifier {
        &self.verifier
    }
}

impl Scrubber {
    pub(crate) fn new(verifier: Arc<Verifier>) -> Self {
        Self {
            control: Control::new(verifier.config.scrub_bytes_per_second),
            verifier,
            bytes: AtomicU64::new(0),
            last_pass: AtomicI64::new(0),
        }
    }

    /// End of the last complete pass.
    pub(crate) fn last_pass(&self) -> Option<Timestamp> {
        let micros = self.last_pass.load(Ordering::Relaxed);
        (micros != 0).then(|| Timestamp::from_micros(micros))
    }
}

impl Scrubber {
    /// Body of the scrubbing thread, until it is stopped. Each process begins with the oldest segment: the
    /// place of the previous process is not kept.
    pub(crate) fn scrub(&self) {
        while !self.control.is_stopped() {
            let began = self.journal.clock.monotonic();
            if let Err(Stop::Io(error)) = self.scrub_once() {
                tracing::warn!(%error, "a pass of scrubbing was cut off; the next one begins anew");
            }
            let took = self.journal.clock.monotonic().duration_since(began);
            // Pauses at least 1 second, so that a permanent error does not cause a busy loop.
            let pause = self.config.scrub_interval.saturating_sub(took);
            self.control.wait(pause.max(Duration::from_secs(1)));
        }
    }

    /// One pass over all runs and sealed segments, at the rate of the settings.
    pub(crate) fn scrub_once(&self) -> Result<(), Stop> {
        let now = || self.journal.clock.monotonic();
        let mut pace = Pace::new(&self.control, &now);
        self.scrub_with(&mut |bytes| {
            pace.spend(bytes)?;
            self.give_way(&self.control, GIVE_WAY);
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        })
    }

    /// One pass over all runs and sealed segments. It calls `spend` with the bytes of each read.
    pub(crate) fn scrub_with(
        &self,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let segments: Vec<_> = self.journal.segments.read().values().cloned().collect();
        let site = ChecksumSite::Scrub;
        let mut findings = Vec::new();
        for run in self.journal.runs() {
            let mut lsns = NextLsns::new(false);
            findings.extend(self.check_run(&run, &mut lsns, site, spend)?);
        }
        for segment in segments {
            // The committer just verified the bytes that it writes. They get an index later.
            if segment.writer().is_some() {
                continue;
            }
            let mut lsns = NextLsns::new(false);
            findings.extend(self.check_segment(&segment, &mut lsns, site, spend)?);
        }
        findings.retain(|finding| finding.severity > Severity::Note);
        let ended = self.journal.clock.now();
        self.last_pass
            .store(ended.micros().max(1), Ordering::Relaxed);
        if !findings.is_empty() {
            tracing::warn!(
                findings = findings.len(),
                "a pass of scrubbing found damage; `walctl verify` names it"
            );
        }
        Ok(())
    }
}
