//! Checks the store of a running engine. The engine learns the findings at once: readers get them, metrics
//! change, and the next start finds them, too.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use super::files::{self, Known};
use super::segment::{self, NextLsns, SegmentFault, SegmentTarget};
use crate::api::error::VerifyError;
use crate::api::finding::{Finding, FindingKind, Severity, advice};
use crate::api::pace::{Control, Pace, Stop, VerifyProgress};
use crate::base::ids::{LogId, Lsn, Position, SegmentId};
use crate::base::metrics::ChecksumSite;
use crate::base::sync::Mutex;
use crate::disk::directory;
use crate::format::active::Place;
use crate::format::address;
use crate::format::address::Hole;
use crate::format::frame;
use crate::index::checkpoint;
use crate::index::run_file;
use crate::index::run_file::BadRun;
use crate::journal::run::Run;
use crate::journal::segment::Segment;
use crate::logs::Log;
use crate::read::store::Store;
use crate::upkeep::verify::reader::{StepReader, advice_for};

/// Faults that were logged and counted, so that the next check does not log them again.
#[derive(Default)]
struct KnownFaults(Mutex<HashSet<Logged>>);

/// A log, and ranges of its lsns.
type Hit = (Arc<Log>, Vec<(Lsn, Lsn)>);

/// Sorted runs, and segments of the journal.
type Files = (Vec<Arc<Run>>, Vec<Arc<Segment>>);

/// Segment, kind, position, sentence.
type Logged = (Option<u64>, FindingKind, Option<Position>, String);

impl KnownFaults {
    /// Whether the finding is new.
    fn first(&self, finding: &Finding) -> bool {
        let from = finding.positions.map(|(from, _)| from);
        let file = finding.file.clone().unwrap_or_default();
        self.0
            .lock()
            .insert((finding.segment, finding.kind, from, file))
    }
}

/// Checks the files of a running engine.
pub(crate) struct Verifier {
    store: Arc<Store>,
    told: KnownFaults,
}

impl Deref for Verifier {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl Verifier {
    pub(crate) fn new(store: &Arc<Store>) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::clone(store),
            told: KnownFaults::default(),
        })
    }

    /// The run or the segment with this number.
    pub(crate) fn files_of(&self, id: u64) -> Result<Files, VerifyError> {
        let (mut runs, mut segments) = self.journal.runs_and_segments();
        let standing = runs.iter().find(|run| {
            (run.head.first.get()..=run.head.last.get()).contains(&id) && run.id().get() != id
        });
        let run = standing.map(|run| run.id().get());
        runs.retain(|run| run.id().get() == id);
        segments.retain(|segment| segment.life.id.get() == id);
        match (runs.is_empty() && segments.is_empty(), run) {
            (false, _) => Ok((runs, segments)),
            (true, Some(run)) => Err(VerifyError::SegmentSorted { segment: id, run }),
            (true, None) => Err(VerifyError::SegmentNotFound { segment: id }),
        }
    }

    /// Checks the store, or some files of it.
    pub(crate) fn verify(
        &self,
        only: Option<Files>,
        control: &Control,
        tell: &mut dyn FnMut(&mut VerifyProgress),
    ) -> Result<(), Stop> {
        let whole = only.is_none();
        let (runs, segments) = only.unwrap_or_else(|| self.journal.runs_and_segments());
        let now = || self.journal.clock.monotonic();
        let mut pace = Pace::new(control, &now);
        let mut progress = VerifyProgress {
            total_bytes: segments
                .iter()
                .filter_map(|segment| self.settled_end(segment).map(|end| segment.offset(end)))
                .chain(runs.iter().map(|run| run.segment.life.size))
                .sum(),
            ..VerifyProgress::default()
        };
        let mut lsns = NextLsns::new(whole);
        let mut named = Vec::new();
        if whole {
            let findings = self.check_files(&segments)?;
            progress.findings = self.note(findings, ChecksumSite::Verify);
        }
        tell(&mut progress);
        for run in &runs {
            let mut spend = |bytes: u64| {
                pace.spend(bytes)?;
                progress.checked_bytes += bytes;
                tell(&mut progress);
                Ok(())
            };
            let found = self.check_run(run, &mut lsns, ChecksumSite::Verify, &mut spend)?;
            named.extend(found.iter().filter_map(|f| Some((f.log_id?, f.lsns?))));
            progress.findings.extend(found);
        }
        for segment in &segments {
            let mut spend = |bytes: u64| {
                pace.spend(bytes)?;
                progress.checked_bytes += bytes;
                tell(&mut progress);
                Ok(())
            };
            let found = self.check_segment(segment, &mut lsns, ChecksumSite::Verify, &mut spend)?;
            named.extend(found.iter().filter_map(|f| Some((f.log_id?, f.lsns?))));
            progress.findings.extend(found);
        }
        let mut findings = files::unreadable(&*self.disk);
        if whole {
            findings.extend(self.known_losses(&named));
        } else {
            let paths: HashSet<String> = runs
                .iter()
                .map(|run| run.segment.path())
                .chain(segments.iter().map(|segment| segment.path()))
                .collect();
            findings.retain(|finding| finding.file.as_ref().is_some_and(|p| paths.contains(p)));
        }
        progress
            .findings
            .extend(self.note(findings, ChecksumSite::Verify));
        tell(&mut progress);
        Ok(())
    }

    /// Losses without bad bytes: records in missing segments.
    fn known_losses(&self, named: &[(LogId, (Lsn, Lsn))]) -> Vec<Finding> {
        let mut findings = Vec::new();
        for damage in self
            .damages
            .between(Position::ZERO, Position::new(u64::MAX))
        {
            if damage.accepted || damage.harmless {
                continue;
            }
            let position = damage.position;
            let mut finding = Finding::new(
                FindingKind::Missing,
                Severity::Loss,
                format!("records are missing at position {position}"),
                advice::LOST,
            )
            .at(position, position);
            if let Some(log) = &damage.log {
                let state = log.state.read();
                let from = damage.from.max(state.first(self.journal.settled()));
                let is_named = |(id, (first, end)): &(LogId, (Lsn, Lsn))| {
                    *id == log.id && *first <= from && damage.to <= *end
                };
                if state.deleted || from >= damage.to || named.iter().any(is_named) {
                    continue;
                }
                finding.log = Some(log.name.clone());
                finding.log_id = Some(log.id);
                finding.lsns = Some((from, damage.to));
            } else {
                finding.detail.push_str("; whose these were is not known");
                finding.advice = advice::UNPROVEN;
            }
            findings.push(finding);
        }
        findings
    }

    /// End of the flushed frames of a segment; `None` if there are none.
    fn settled_end(&self, segment: &Segment) -> Option<Position> {
        let durable = self.journal.durable();
        let end = *segment.end.read();
        let end = end.unwrap_or(durable).min(durable);
        (end > segment.first() && end <= segment.limit()).then_some(end)
    }

    /// Checks one segment and its index. The engine knows the findings from then on. `spend` receives the
    /// number of bytes before each read.
    pub(crate) fn check_segment(
        &self,
        segment: &Arc<Segment>,
        lsns: &mut NextLsns,
        site: ChecksumSite,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<Vec<Finding>, Stop> {
        let checked = self.check_segment_file(segment, lsns, site, spend);
        after_retirement(segment, lsns, checked)
    }

    fn check_segment_file(
        &self,
        segment: &Arc<Segment>,
        lsns: &mut NextLsns,
        site: ChecksumSite,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<Vec<Finding>, Stop> {
        let Some(end) = self.settled_end(segment) else {
            return Ok(Vec::new());
        };
        if !segment.holes.read().is_empty() {
            lsns.expect_gaps();
        }
        let path = segment.path();
        let known = Known {
            life: segment.life,
            base: segment.base,
            end,
        };
        let mut findings = Vec::new();
        let index = match segment.is_indexed() {
            true => files::index(&*self.disk, &known, &mut findings)?.0,
            false => None,
        };
        if segment.is_retired() {
            return Ok(Vec::new());
        }
        let mut findings = self.note(findings, site);
        let writer = segment.writer();
        let mut reader = match StepReader::open(&*self.disk, &path) {
            Ok(reader) => reader,
            Err(error) if !segment.is_retired() && self.is_gone(segment, &error) => {
                lsns.expect_gaps();
                let gone = SegmentFault {
                    kind: FindingKind::Missing,
                    severity: Severity::Loss,
                    from: segment.first(),
                    to: end,
                    detail: format!("segment {} is gone", segment.life.id),
                    touched: Vec::new(),
                    is_hole: true,
                    is_gap: false,
                    explained: false,
                };
                self.attribute(segment, &path, &gone, site, &mut findings)?;
                return Ok(findings);
            }
            Err(error) => return Err(error.into()),
        };
        let target = SegmentTarget {
            life: segment.life,
            base: segment.base,
            end,
            file_bytes: reader.size()?,
            accepted: self.damages.accepted_between(segment.base, end),
        };
        let mut read = |from: u64, bytes: u64| {
            spend(bytes)?;
            // A segment that is being written is not read around the cache: that would write it back.
            Ok(match &writer {
                Some(_) => reader.read_cached(from, bytes)?,
                None => reader.read(from, bytes)?,
            })
        };
        let before = lsns.clone();
        let mut checked = segment::check(&target, index.as_ref(), lsns, &mut read)?;
        if checked.faults.iter().any(SegmentFault::is_unreadable) {
            // The memory of that read may be wrong. The second read bypasses the page cache.
            *lsns = before;
            let mut again = |from: u64, bytes: u64| {
                spend(bytes)?;
                Ok(reader.read(from, bytes)?)
            };
            checked = segment::check(&target, index.as_ref(), lsns, &mut again)?;
        }
        if segment.is_retired() {
            // Its file may have another life.
            return Ok(Vec::new());
        }
        for fault in &checked.faults {
            self.attribute(segment, &path, fault, site, &mut findings)?;
        }
        Ok(findings)
    }

    /// Checks one run and its index. The engine knows the findings from then on.
    pub(crate) fn check_run(
        &self,
        run: &Arc<Run>,
        lsns: &mut NextLsns,
        site: ChecksumSite,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<Vec<Finding>, Stop> {
        let checked = self.check_run_file(run, lsns, site, spend);
        after_retirement(&run.segment, lsns, checked)
    }

    fn check_run_file(
        &self,
        run: &Arc<Run>,
        lsns: &mut NextLsns,
        site: ChecksumSite,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<Vec<Finding>, Stop> {
        let (disk, segment) = (&*self.disk, &run.segment);
        let opened = match run_file::open(disk, run.id(), self.store_id) {
            Ok(opened) => opened,
            Err(_) if segment.is_retired() => return Ok(Vec::new()),
            Err(BadRun::Io(error)) if !self.is_gone(segment, &error) => return Err(error.into()),
            Err(bad) => {
                lsns.expect_gaps();
                let what = match bad {
                    BadRun::Io(_) => format!("{} is gone", segment.path()),
                    BadRun::Newer(what) | BadRun::Damaged(what) => what,
                };
                return self.lose_run(run, &what, site);
            }
        };
        let known = Known {
            life: segment.life,
            base: segment.base,
            end: segment.base.advance(opened.end),
        };
        let mut findings = Vec::new();
        let (index, _) = files::index(disk, &known, &mut findings)?;
        let mut reader = StepReader::open(disk, &segment.path())?;
        let blocks = reader.read(0, crate::base::bounds::LIFE_BYTES)?;
        let mut read = |from: u64, bytes: u64| {
            spend(bytes)?;
            Ok(reader.read(from, bytes)?)
        };
        let mut walked = run_file::walk_with(&opened, &mut read)?;
        for hole in &walked.holes {
            if self.frames_verify_again(segment, *hole)? {
                // The memory of that read was wrong.
                walked = run_file::walk_with(&opened, &mut read)?;
                break;
            }
        }
        if segment.is_retired() {
            // Readers no longer use the run.
            return Ok(Vec::new());
        }
        for images in &walked.images {
            lsns.set(images.image.id, images.image.next);
        }
        findings.extend(files::run(run, &blocks, &walked));
        if walked.holes.is_empty() {
            let told = walked.index(&opened);
            findings.extend(files::index_of_run(run, index.as_ref(), &told));
        }
        let mut findings = self.note(findings, site);
        for hole in &walked.holes {
            lsns.expect_gaps();
            let is_known = segment.is_hole(hole);
            segment.add_hole(*hole);
            for (log, place) in self.places_within(segment, hole.from, hole.to)? {
                let pack = walked
                    .packs
                    .iter()
                    .find(|p| p.place.position == place.position);
                let pieces = pack.map(|pack| pack.pieces.as_slice()).unwrap_or_default();
                let bad = pieces.iter().filter(|(_, good)| !good);
                let mut lost: Vec<_> = bad
                    .map(|(p, _)| (p.first_lsn, p.next_lsn(), p.position))
                    .collect();
                if pieces.is_empty() {
                    let first = self.journal.first_of_run(segment);
                    lost.push((place.first_lsn, place.next_lsn(), first));
                }
                for (from, to, position) in lost {
                    findings.extend(self.lose_of_run(
                        run,
                        &log,
                        &place,
                        (from, to),
                        position,
                        site,
                    ));
                }
            }
            if !is_known {
                self.let_next_start_find(segment);
            }
        }
        Ok(findings)
    }

    /// Whether a range of a run consists of whole frames when it is read again, from the device.
    fn frames_verify_again(&self, segment: &Segment, hole: Hole) -> io::Result<bool> {
        let bytes = self.bytes_again(segment, hole.from, hole.to.since(hole.from))?;
        let mut at = hole.from;
        while at < hole.to {
            let from = usize::try_from(at.since(hole.from)).map_err(io::Error::other)?;
            let rest = bytes.get(from..).unwrap_or(&[]);
            let header = frame::decode_header(rest, segment.life.salt);
            let header = header.filter(|header| header.position == at);
            let whole = header.filter(|header| frame::verified_body(rest, header).is_some());
            let Some(header) = whole else {
                return Ok(false);
            };
            at = header.end();
        }
        Ok(true)
    }

    /// Quarantines unreadable records of a run, as far as they are kept.
    fn lose_of_run(
        &self,
        run: &Run,
        log: &Arc<Log>,
        place: &Place,
        (from, to): (Lsn, Lsn),
        position: Position,
        site: ChecksumSite,
    ) -> Option<Finding> {
        let (deleted, first) = {
            let state = log.state.read();
            (state.deleted, state.first(self.journal.settled()))
        };
        let kept = from.max(first);
        if deleted || kept >= to {
            return None;
        }
        let hit = Place {
            first_lsn: from,
            count: u32::try_from(to.since(from)).unwrap_or(u32::MAX),
            ..*place
        };
        self.quarantine_at(log, &hit, position, site);
        let detail = format!(
            "records in {} do not match their checksum",
            run.segment.path()
        );
        let path = run.segment.path();
        let finding = Finding {
            log: Some(log.name.clone()),
            log_id: Some(log.id),
            lsns: Some((kept, to)),
            ..Finding::of_file(
                FindingKind::Checksum,
                Severity::Loss,
                path,
                detail,
                advice::LOST,
            )
        };
        Some(finding.in_segment(run.id()).at(position, position))
    }

    /// Notes that a run is no longer readable.
    fn lose_run(
        &self,
        run: &Arc<Run>,
        what: &str,
        site: ChecksumSite,
    ) -> Result<Vec<Finding>, Stop> {
        let (segment, path) = (&run.segment, run.segment.path());
        let kind = FindingKind::Missing;
        let finding = Finding::of_file(kind, Severity::Damage, path, what.to_owned(), advice::TOLD);
        let first = self.journal.first_of_run(segment);
        let finding = finding.in_segment(run.id()).at(first, run.head.end);
        let mut findings = self.note(vec![finding], site);
        // Without an index in memory or in its file the records cannot be attributed to logs.
        if let Some(index) = self.indexes.get(segment)? {
            for row in index.rows() {
                let entries = index.entries(&row);
                let (Some(log), Some(place)) = (self.logs.by_id(row.log_id), entries.get(0)) else {
                    continue;
                };
                let lost = (row.first_lsn, row.next_lsn);
                findings.extend(self.lose_of_run(run, &log, &place, lost, first, site));
            }
        }
        self.let_next_start_find(segment);
        Ok(findings)
    }

    /// Finds the records that a fault affects, and quarantines them.
    fn attribute(
        &self,
        segment: &Arc<Segment>,
        path: &str,
        fault: &SegmentFault,
        site: ChecksumSite,
        findings: &mut Vec<Finding>,
    ) -> io::Result<()> {
        let base = Finding::of_file(
            fault.kind,
            fault.severity,
            path,
            fault.detail.clone(),
            advice_for(fault, segment.base),
        )
        .in_segment(segment.life.id)
        .at(fault.from, fault.to);
        let mut hit: BTreeMap<u64, Hit> = BTreeMap::new();
        let mut known = Vec::new();
        if fault.is_unreadable() && fault.from < fault.to {
            for (log, place) in self.places_within(segment, fault.from, fault.to)? {
                let first = log.state.read().first(self.journal.settled());
                let kept = (place.first_lsn.max(first), place.next_lsn());
                if log.state.read().deleted || kept.0 >= kept.1 {
                    continue;
                }
                self.quarantine_found(&log, &place, site);
                let entry = hit.entry(log.id.get()).or_insert_with(|| (log, Vec::new()));
                entry.1.push(kept);
            }
            // Records that were known as lost no longer have places.
            known = self.damages.between(fault.from, fault.to);
        } else if let Some(gap) = fault.touched.first().filter(|_| fault.is_gap) {
            known = self.damages.of_log(gap.log_id, gap.first_lsn);
        }
        let is_known = !known.is_empty();
        let mut accepted = false;
        for damage in known {
            accepted |= damage.accepted;
            let Some(log) = damage.log.filter(|_| !damage.accepted) else {
                continue;
            };
            let first = log.state.read().first(self.journal.settled());
            let kept = (damage.from.max(first), damage.to);
            if !log.state.read().deleted && kept.0 < kept.1 {
                let entry = hit.entry(log.id.get()).or_insert_with(|| (log, Vec::new()));
                entry.1.push(kept);
            }
        }
        if hit.is_empty() && accepted {
            findings.push(Finding {
                severity: Severity::Note,
                detail: format!("{}; the loss of what was here was accepted", base.detail),
                advice: advice::ACCEPTED,
                ..base
            });
            return Ok(());
        }
        if hit.is_empty() {
            let severity = match fault.severity {
                // The engine knows all frames: the damaged one has no record that is kept.
                Severity::Loss if fault.is_unreadable() || is_known => Severity::Damage,
                other => other,
            };
            let touched = fault.touched.first();
            let log = touched.and_then(|touched| self.logs.by_id(touched.log_id));
            let finding = Finding {
                severity,
                log: log.as_ref().map(|log| log.name.clone()),
                log_id: log.as_ref().map(|log| log.id),
                advice: if severity == fault.severity {
                    base.advice
                } else {
                    advice::TOLD
                },
                ..base
            };
            findings.extend(self.note(vec![finding], site));
            return Ok(());
        }
        for (log, lsns) in hit.into_values() {
            for lsns in crate::upkeep::verify::reader::merged(lsns) {
                findings.push(Finding {
                    severity: Severity::Loss,
                    log: Some(log.name.clone()),
                    log_id: Some(log.id),
                    lsns: Some(lsns),
                    advice: advice::LOST,
                    ..base.clone()
                });
            }
        }
        Ok(())
    }

    /// Frames with records within a range of a segment, by the indexes of the engine.
    fn places_within(
        &self,
        segment: &Segment,
        from: Position,
        to: Position,
    ) -> io::Result<Vec<(Arc<Log>, Place)>> {
        let mut found = Vec::new();
        if let Some(index) = self.sealed_index(segment)? {
            for row in index.rows() {
                let Some(log) = self.logs.by_id(row.log_id) else {
                    continue;
                };
                let entries = index.entries(&row);
                let first = entries.partition_point(|place| place.end() <= from);
                let hit = entries.from(first).take_while(|place| place.position < to);
                found.extend(hit.map(|place| (Arc::clone(&log), place)));
            }
            return Ok(found);
        }
        if address::is_address(segment.base) {
            return Ok(found);
        }
        for log in self.logs.all_known() {
            let places = log.state.read().places.within(from, to).to_vec();
            found.extend(places.into_iter().map(|place| (Arc::clone(&log), place)));
        }
        Ok(found)
    }

    /// Counts and logs new findings. Returns all findings.
    pub(crate) fn note(&self, findings: Vec<Finding>, site: ChecksumSite) -> Vec<Finding> {
        for finding in &findings {
            if finding.severity > Severity::Note && self.told.first(finding) {
                self.journal.observer.checksum_failure(site);
                tracing::error!(
                    file = finding.file,
                    segment = finding.segment,
                    from_position = finding.positions.map(|(from, _)| from.get()),
                    to_position = finding.positions.map(|(_, to)| to.get()),
                    "{}; {}",
                    finding.detail,
                    finding.advice
                );
            }
        }
        findings
    }

    /// Checks all files except segments.
    fn check_files(&self, segments: &[Arc<Segment>]) -> Result<Vec<Finding>, Stop> {
        let disk = &*self.disk;
        let format = directory::look(disk).map_err(io::Error::other)?;
        let mut findings = files::small_files(disk, &format, self.store_id, segments.len())?;
        let ids: BTreeSet<SegmentId> = segments.iter().map(|segment| segment.life.id).collect();
        findings.extend(files::strays(disk, &ids, true)?);
        // Segments in a checkpoint have ended long ago.
        let known: BTreeMap<SegmentId, Known> = segments
            .iter()
            .filter_map(|segment| {
                let end = (*segment.end.read())?;
                let known = Known {
                    life: segment.life,
                    base: segment.base,
                    end,
                };
                Some((segment.life.id, known))
            })
            .collect();
        let sorted = self.journal.runs().last().map(|run| run.head.last);
        for id in checkpoint::list(disk)? {
            // A checkpoint newer than this list is left to the next check.
            if known.contains_key(&id) {
                let is_sorted = |id| Some(id) <= sorted;
                let known = (&known, &is_sorted as &dyn Fn(SegmentId) -> bool);
                findings.extend(files::checkpoint(disk, id, self.store_id, known, None)?);
            }
        }
        Ok(findings)
    }
}

/// Result of a check of one file. The sorter may retire a file while it is checked: a run then holds its
/// records, and errors of the old file mean nothing.
fn after_retirement(
    segment: &Segment,
    lsns: &mut NextLsns,
    checked: Result<Vec<Finding>, Stop>,
) -> Result<Vec<Finding>, Stop> {
    if !segment.is_retired() {
        return checked;
    }
    lsns.expect_gaps();
    match checked {
        Err(Stop::Io(_)) => Ok(Vec::new()),
        checked => checked,
    }
}
