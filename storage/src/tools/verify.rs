//! A directory that nobody serves: opened without changing anything, and checked.
//!
//! Other tools for such a directory (dump, repair) open it with [`Offline::open`], too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use crate::api::cipher::Cipher;
use crate::api::error::OpenError;
use crate::api::finding::{Finding, FindingKind, Severity, advice};
use crate::api::pace::{Control, Pace, Stop, VerifyProgress};
use crate::base::bounds::LIFE_BYTES;
use crate::base::clock::{Clock, SystemClock};
use crate::base::ids::{LogId, LogName, Lsn, SegmentId};
use crate::disk::directory;
use crate::disk::directory::{FormatFile, StoreIdentity};
use crate::disk::{Disk, DiskLock};
use crate::format::life::{Life, id_of, journal_path};
use crate::index::checkpoint;
use crate::index::run_file;
use crate::journal::run;
use crate::logs::damages;
use crate::logs::damages::Damage;
use crate::recovery::{self, Account, FoundRun, Survey, Surveyed};
use crate::upkeep::verify::files;
use crate::upkeep::verify::files::Known;
use crate::upkeep::verify::reader::StepReader;
use crate::upkeep::verify::reader::advice_for;
use crate::upkeep::verify::reader::merged;
use crate::upkeep::verify::segment;
use crate::upkeep::verify::segment::{Checked, NextLsns, SegmentFault, SegmentTarget};

/// A data directory that nobody serves.
pub struct Offline {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) format: FormatFile,
    pub(crate) store: StoreIdentity,
    /// The keys with which [`Offline::dump_frames`] shows encrypted records.
    pub(crate) keys: Option<Cipher>,
    _lock: Option<Box<dyn DiskLock>>,
}

/// Result of the verification of a directory.
#[derive(Debug, Clone)]
pub struct OfflineReport {
    /// The store.
    pub store_id: u128,
    /// All findings, in journal order; files first.
    pub findings: Vec<Finding>,
    /// Segments with frames.
    pub segments: u64,
    /// Frames in them that verify.
    pub frames: u64,
    /// Records in these.
    pub records: u64,
    /// Bytes read.
    pub checked_bytes: u64,
    /// Bytes behind the end of the journal that were never proven flushed: the next start
    /// cuts them off.
    pub torn_bytes: u64,
    /// Names and sizes in bytes of the files with tails that earlier starts cut off.
    pub quarantine: Vec<(String, u64)>,
    /// Whether the verification was stopped early.
    pub stopped: bool,
}

impl OfflineReport {
    /// The highest severity of the findings.
    pub fn severity(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

impl Offline {
    /// Opens the directory after a check that no process serves it. No process can begin to serve it while this
    /// value exists. Also opens a store that a start refuses because its FORMAT is gone.
    ///
    /// # Errors
    /// If a process serves it, if it holds no store or an incomplete restore, or if it is of a newer version.
    pub fn open(disk: Arc<dyn Disk>) -> Result<Self, OpenError> {
        let lock = directory::lock_shared(&*disk)?;
        directory::check_restored(&*disk)?;
        let format = directory::look(&*disk)?;
        let id = match format {
            FormatFile::Good(id) => id,
            FormatFile::Missing | FormatFile::Damaged => {
                let told = store_of_segments(&*disk).map_err(OpenError::io("reading segments"))?;
                told.ok_or_else(|| OpenError::NotAStore {
                    what: format!(
                        "{} holds no store: it has neither FORMAT nor a segment",
                        disk.location()
                    ),
                })?
            }
        };
        Ok(Self {
            disk,
            format,
            store: StoreIdentity { id, created: false },
            keys: None,
            _lock: lock,
        })
    }

    /// Shows encrypted records with these keys, which are loaded already.
    #[must_use]
    pub fn with_keys(self, keys: Cipher) -> Self {
        Self {
            keys: Some(keys),
            ..self
        }
    }

    /// Identity of the store.
    pub fn store_id(&self) -> u128 {
        self.store.id
    }

    /// Finds the place of its segments.
    pub(crate) fn survey(&self) -> Result<Survey, OpenError> {
        recovery::survey(&self.disk, self.store)
    }

    /// Checks everything. Changes nothing.
    ///
    /// # Errors
    /// If the directory cannot be read. Damage is no error.
    pub fn verify(
        &self,
        control: &Control,
        progress: &mut dyn FnMut(&VerifyProgress),
    ) -> Result<OfflineReport, OpenError> {
        let survey = self.survey()?;
        let clock = SystemClock;
        let now = || clock.monotonic();
        let mut run = OfflineRun::new(self, &survey, control, &now, progress);
        let whole = match run.check() {
            Ok(()) => true,
            Err(Stop::Stopped) => false,
            Err(Stop::Io(error)) => return Err(OpenError::io("verifying")(error)),
        };
        run.report(!whole, &clock)
    }
}

/// The store id in most segments and sorted runs.
fn store_of_segments(disk: &dyn Disk) -> io::Result<Option<u128>> {
    let mut votes: BTreeMap<u128, u64> = BTreeMap::new();
    for directory in ["journal", "sorted"] {
        for name in files::list(disk, directory)? {
            if id_of(&name).is_none() {
                continue;
            }
            let mut head = vec![0; usize::try_from(LIFE_BYTES).map_err(io::Error::other)?];
            let file = disk.open(&format!("{directory}/{name}"))?;
            let length = file.read_full_at(&mut head, 0)?;
            if let Ok(life) = Life::decode(&head[..length]) {
                *votes.entry(life.store_id).or_default() += 1;
            }
        }
    }
    Ok(votes.into_iter().max_by_key(|(_, n)| *n).map(|(id, _)| id))
}

/// One verification.
struct OfflineRun<'a> {
    offline: &'a Offline,
    survey: &'a Survey,
    pace: Pace<'a>,
    tell: &'a mut dyn FnMut(&VerifyProgress),
    progress: VerifyProgress,
    /// Faults of files and of the order of segments.
    findings: Vec<Finding>,
    /// Faults in segments, by their index in the survey.
    faults: Vec<(usize, SegmentFault)>,
    /// Records may be missing: recovery must identify them.
    needs_account: bool,
    frames: u64,
    records: u64,
}

impl<'a> OfflineRun<'a> {
    fn new(
        offline: &'a Offline,
        survey: &'a Survey,
        control: &'a Control,
        now: &'a dyn Fn() -> std::time::Instant,
        tell: &'a mut dyn FnMut(&VerifyProgress),
    ) -> Self {
        let bytes = |segment: &Surveyed| segment.end.since(segment.base);
        Self {
            offline,
            survey,
            pace: Pace::new(control, now),
            tell,
            progress: VerifyProgress {
                total_bytes: survey.segments.iter().map(bytes).sum::<u64>()
                    + survey.runs.iter().map(|run| run.opened.end).sum::<u64>(),
                ..VerifyProgress::default()
            },
            findings: Vec::new(),
            faults: Vec::new(),
            needs_account: false,
            frames: 0,
            records: 0,
        }
    }

    fn check(&mut self) -> Result<(), Stop> {
        let disk = &*self.offline.disk;
        let store_id = self.offline.store.id;
        let segments: BTreeMap<SegmentId, Known> = self
            .survey
            .segments
            .iter()
            .map(|segment| (segment.life.id, known(segment)))
            .collect();
        self.findings.extend(files::small_files(
            disk,
            &self.offline.format,
            store_id,
            segments.len(),
        )?);
        let runs = self.survey.runs.iter().map(|found| found.run.id());
        let all: BTreeSet<SegmentId> = segments.keys().copied().chain(runs).collect();
        self.findings.extend(files::strays(disk, &all, false)?);
        self.journal_files(&segments)?;
        let mut checkpoints: BTreeSet<SegmentId> = checkpoint::list(disk)?.into_iter().collect();
        let mut lsns = NextLsns::new(true);
        self.runs(&mut lsns)?;
        let survey = self.survey;
        let is_sorted = |id| survey.is_sorted(id);
        let mut before: Option<(SegmentId, Checked)> = None;
        for (number, segment) in self.survey.segments.iter().enumerate() {
            if self.follows(segment, before.as_ref()) {
                lsns.expect_gaps();
            }
            let mut checked = self.segment(segment, &mut lsns)?;
            for fault in checked.faults.drain(..) {
                self.needs_account |= fault.is_hole || !fault.touched.is_empty();
                self.faults.push((number, fault));
            }
            self.compare_link(number, before.as_ref(), &checked, &lsns);
            let id = segment.life.id;
            if checkpoints.remove(&id) {
                let found =
                    files::checkpoint(disk, id, store_id, (&segments, &is_sorted), Some(&lsns))?;
                self.findings.extend(found);
            }
            before = Some((id, checked));
        }
        self.end_of_journal(&checkpoints);
        for id in checkpoints {
            let found = files::checkpoint(disk, id, store_id, (&segments, &is_sorted), None)?;
            self.findings.extend(found);
        }
        Ok(())
    }

    /// Checks the sorted runs: each alone, and in sequence.
    fn runs(&mut self, lsns: &mut NextLsns) -> Result<(), Stop> {
        let disk = &*self.offline.disk;
        let survey = self.survey;
        for path in survey
            .leftovers
            .iter()
            .filter(|path| !path.ends_with(".new"))
        {
            let detail = format!("{path} is sorted, and was to be removed when a run ended");
            let kind = FindingKind::Unowned;
            let finding =
                Finding::of_file(kind, Severity::Note, path.clone(), detail, advice::LEFTOVER);
            self.findings.push(finding);
        }
        for (id, what) in &survey.bad_runs {
            self.needs_account = true;
            lsns.expect_gaps();
            let kind = FindingKind::Checksum;
            let path = run::path(*id);
            let finding = Finding::of_file(kind, Severity::Loss, path, what.clone(), advice::LOST);
            self.findings.push(finding.in_segment(*id));
        }
        let mut last = None;
        for FoundRun { opened, run } in &survey.runs {
            if run.head.before_first != last {
                self.needs_account = true;
                lsns.expect_gaps();
                let first = run.head.first;
                let detail = format!("the run of segments before segment {first} is missing");
                let finding =
                    Finding::new(FindingKind::Missing, Severity::Loss, detail, advice::LOST);
                self.findings.push(finding.in_segment(first));
            }
            last = Some(run.head.last);
            let known = Known {
                life: opened.life,
                base: run.segment.base,
                end: run.segment.base.advance(opened.end),
            };
            let (index, _) = files::index(disk, &known, &mut self.findings)?;
            let mut reader = StepReader::open(disk, &run.segment.path())?;
            let blocks = reader.read(0, LIFE_BYTES)?;
            let (pace, tell, progress) = (&mut self.pace, &mut *self.tell, &mut self.progress);
            let mut read = |from: u64, bytes: u64| {
                pace.spend(bytes)?;
                let found = reader.read(from, bytes)?;
                progress.checked_bytes += found.len() as u64;
                tell(progress);
                Ok(found)
            };
            let walked = run_file::walk_with(opened, &mut read)?;
            self.frames += walked.frames;
            self.records += walked.records;
            self.findings.extend(files::run(run, &blocks, &walked));
            if walked.holes.is_empty() {
                let told = walked.index(opened);
                self.findings
                    .extend(files::index_of_run(run, index.as_ref(), &told));
            } else {
                self.needs_account = true;
                lsns.expect_gaps();
            }
            for images in &walked.images {
                // Damage took records before the run was made.
                self.needs_account |= !images.image.lost.is_empty();
                lsns.set(images.image.id, images.image.next);
            }
        }
        Ok(())
    }

    /// Files in `journal/` that are no segments with frames.
    fn journal_files(&mut self, segments: &BTreeMap<SegmentId, Known>) -> Result<(), Stop> {
        let disk = &*self.offline.disk;
        for id in &self.survey.ready {
            self.findings.extend(files::ready_file(disk, *id)?);
        }
        let paths: BTreeSet<&str> = self
            .survey
            .segments
            .iter()
            .map(|s| s.path.as_str())
            .collect();
        for segment in &self.survey.segments {
            if segment.path != journal_path(segment.life.id) {
                let detail = format!(
                    "{} holds segment {}; it is used as that",
                    segment.path, segment.life.id
                );
                let path = segment.path.clone();
                self.findings.push(
                    Finding::of_file(
                        FindingKind::Unowned,
                        Severity::Damage,
                        path,
                        detail,
                        "nothing is lost by this; give it its own name while nobody serves the store",
                    )
                    .in_segment(segment.life.id),
                );
            }
        }
        for name in files::list(disk, "journal")? {
            let Some(id) = id_of(&name) else { continue };
            let path = journal_path(id);
            let used = paths.contains(path.as_str()) || self.survey.leftovers.contains(&path);
            if !used && !self.survey.ready.contains(&id) {
                let finding = files::unusable(disk, id, self.offline.store.id)?;
                // A segment that exists under another name is not lost.
                self.needs_account |= !segments.contains_key(&id);
                self.findings.push(finding);
            }
        }
        Ok(())
    }

    /// Whether a segment is missing between a segment and its predecessor.
    fn follows(&mut self, segment: &Surveyed, before: Option<&(SegmentId, Checked)>) -> bool {
        let Some(link) = &segment.link else {
            return false;
        };
        let before = before.map(|(id, _)| *id);
        let earlier = link.predecessor.filter(|id| Some(*id) != before);
        let is_there = |id: &SegmentId| {
            self.survey.is_sorted(*id) || self.survey.segments.iter().any(|s| s.life.id == *id)
        };
        if let Some(missing) = earlier.filter(|id| !is_there(id)) {
            self.missing(missing, &format!("before segment {}", segment.life.id));
        }
        if let Some(position) = link.lost_before {
            self.needs_account = true;
            self.findings.push(
                Finding::new(
                    FindingKind::Missing,
                    Severity::Loss,
                    format!(
                        "segments behind position {position} were gone when segment {} began; \
                             whose records they held is not known",
                        segment.life.id
                    ),
                    advice::UNPROVEN,
                )
                .in_segment(segment.life.id),
            );
        }
        let earlier = earlier.filter(|id| !self.survey.is_sorted(*id));
        earlier.is_some() || link.lost_before.is_some()
    }

    fn missing(&mut self, id: SegmentId, place: &str) {
        self.needs_account = true;
        self.findings.push(
            Finding::of_file(
                FindingKind::Missing,
                Severity::Loss,
                journal_path(id),
                format!("segment {id}, {place}, is missing or cannot be used"),
                advice::LOST,
            )
            .in_segment(id),
        );
    }

    /// Notes segments that other files name and that would stand behind the last one.
    fn end_of_journal(&mut self, checkpoints: &BTreeSet<SegmentId>) {
        let last = self.survey.segments.last();
        let last_id = last.map(|segment| segment.life.id);
        let begun = self.survey.last_begun.map(|begun| begun.segment);
        let told = checkpoints.iter().next_back().copied();
        for (id, who) in [
            (begun, "which the last start began"),
            (told, "which a checkpoint tells of"),
            (self.survey.missing, "which the last one says comes next"),
        ] {
            if let Some(id) = id.filter(|id| last_id.is_none_or(|last| last < *id)) {
                self.missing(id, who);
                break;
            }
        }
        // Only segments with a successor are cut to size.
        let Some(last) = last.filter(|_| !self.survey.is_sealed) else {
            return;
        };
        let bytes = self
            .offline
            .disk
            .open(&last.path)
            .and_then(|file| file.size());
        if let Ok(bytes) = bytes
            && bytes < last.life.size
        {
            self.needs_account = true;
            self.findings.push(
                Finding::of_file(
                    FindingKind::Missing,
                    Severity::Loss,
                    last.path.clone(),
                    format!(
                        "the last segment has {bytes} bytes instead of {}: records there, if any, are gone",
                        last.life.size
                    ),
                    advice::LOST,
                )
                .in_segment(last.life.id),
            );
        }
    }

    fn segment(&mut self, segment: &Surveyed, lsns: &mut NextLsns) -> Result<Checked, Stop> {
        let disk = &*self.offline.disk;
        let (index, _) = files::index(disk, &known(segment), &mut self.findings)?;
        let mut reader = StepReader::open(disk, &segment.path)?;
        // The links of later segments list accepted losses.
        let links = self.survey.segments.iter().filter_map(|s| s.link.as_ref());
        let accepted = links.filter_map(|link| link.accepted.as_ref());
        let accepted = accepted.flat_map(|a| a.places_between(segment.base, segment.end));
        let target = SegmentTarget {
            life: segment.life,
            base: segment.base,
            end: segment.end,
            file_bytes: reader.size()?,
            accepted: accepted.collect(),
        };
        let (pace, tell, progress) = (&mut self.pace, &mut *self.tell, &mut self.progress);
        let mut read = |from: u64, bytes: u64| {
            pace.spend(bytes)?;
            let found = reader.read(from, bytes)?;
            progress.checked_bytes += found.len() as u64;
            tell(progress);
            Ok(found)
        };
        let checked = segment::check(&target, index.as_ref(), lsns, &mut read)?;
        self.frames += checked.frames;
        self.records += checked.records;
        Ok(checked)
    }

    /// Compares the predecessor's end that a link records with the predecessor.
    fn compare_link(
        &mut self,
        number: usize,
        before: Option<&(SegmentId, Checked)>,
        checked: &Checked,
        lsns: &NextLsns,
    ) {
        let (Some(link), Some((id, before))) = (&checked.link, before) else {
            return;
        };
        if link.predecessor != Some(*id) {
            return;
        }
        let first = self.survey.segments[number].base.advance(LIFE_BYTES);
        let mut fault = |detail: String| {
            self.faults.push((
                number,
                SegmentFault::of_frame(FindingKind::Chain, Severity::Damage, first, detail),
            ));
        };
        if before
            .chain
            .is_some_and(|chain| chain != link.predecessor_chain)
        {
            fault(format!(
                "the link says that segment {id} ends with another frame than it does"
            ));
        }
        for closing in link.closings.iter().flatten() {
            let standing = checked.before.get(&closing.log_id).copied();
            let expected = standing.or_else(|| lsns.of(closing.log_id));
            if !lsns.is_damaged()
                && !closing.deleted
                && expected.is_some_and(|next| next != closing.next_lsn)
            {
                fault(format!(
                    "the link says that log {} went on at lsn {}, and its frames say otherwise",
                    closing.log_id, closing.next_lsn
                ));
            }
        }
    }

    /// Makes the report. Recovery identifies the missing records.
    fn report(mut self, stopped: bool, clock: &dyn Clock) -> Result<OfflineReport, OpenError> {
        let disk = Arc::clone(&self.offline.disk);
        let account = match self.needs_account && !stopped {
            true => Some(recovery::account(&disk, self.offline.store, clock)?),
            false => None,
        };
        let mut found = Attribution::of(account.as_ref());
        let mut in_segments = Vec::new();
        for (number, fault) in std::mem::take(&mut self.faults) {
            found.attribute(&self.survey.segments[number], &fault, &mut in_segments);
        }
        found.rest(self.survey, &mut in_segments);
        in_segments.sort_by_key(|finding| finding.positions);
        let mut findings = self.findings;
        findings.extend(files::unreadable(&*disk));
        if account.as_ref().is_some_and(Account::is_all_accepted) {
            // A start no longer reports missing files, either.
            let lost = findings.iter_mut();
            for finding in lost.filter(|finding| finding.severity == Severity::Loss) {
                finding.severity = Severity::Note;
                finding.detail.push_str("; its loss was accepted");
                finding.advice = advice::ACCEPTED;
            }
        }
        findings.extend(in_segments);
        if let Some(account) = &account {
            findings.extend(account.consequences.iter().map(|what| {
                Finding::new(
                    FindingKind::Checksum,
                    Severity::Damage,
                    what.clone(),
                    advice::TOLD,
                )
            }));
            if !findings.iter().any(|f| f.severity > Severity::Note) {
                // A start would report these findings, so this report includes them.
                findings.extend(account.findings.iter().map(|what| {
                    Finding::new(
                        FindingKind::Chain,
                        Severity::Damage,
                        what.clone(),
                        advice::TOLD,
                    )
                }));
            }
        }
        Ok(OfflineReport {
            store_id: self.offline.store.id,
            findings,
            segments: (self.survey.segments.len() + self.survey.runs.len()) as u64,
            frames: self.frames,
            records: self.records,
            checked_bytes: self.progress.checked_bytes,
            torn_bytes: self.survey.torn_bytes,
            quarantine: damages::files(&*disk).map_err(OpenError::io("listing quarantine"))?,
            stopped,
        })
    }
}

fn known(segment: &Surveyed) -> Known {
    Known {
        life: segment.life,
        base: segment.base,
        end: segment.end,
    }
}

/// Matches faults with the records that they affect.
struct Attribution<'a> {
    account: Option<&'a Account>,
    /// Damage that recovery reports and that is not matched with a fault yet.
    left: Vec<Damage>,
    names: HashMap<LogId, LogName>,
}

/// Ranges of lsns of one log.
type Ranges = BTreeMap<(Option<LogName>, LogId), Vec<(Lsn, Lsn)>>;

impl<'a> Attribution<'a> {
    fn of(account: Option<&'a Account>) -> Self {
        let logs = account.map(|account| account.logs.all_known());
        Self {
            account,
            left: account.map_or_else(Vec::new, |account| account.damages.clone()),
            names: logs
                .into_iter()
                .flatten()
                .map(|log| (log.id, log.name.clone()))
                .collect(),
        }
    }

    /// Adds the findings of one fault.
    fn attribute(&mut self, segment: &Surveyed, fault: &SegmentFault, findings: &mut Vec<Finding>) {
        let base = Finding {
            severity: fault.severity,
            ..Finding::of_file(
                fault.kind,
                fault.severity,
                segment.path.clone(),
                fault.detail.clone(),
                advice_for(fault, segment.base),
            )
            .in_segment(segment.life.id)
            .at(fault.from, fault.to)
        };
        let mut ranges = Ranges::new();
        let (mut unproven, mut accepted) = (false, 0);
        let gap = fault.touched.first().filter(|_| fault.is_gap).copied();
        self.left.retain(|damage| {
            let same_gap = gap.is_some_and(|gap| {
                damage.log.as_ref().is_some_and(|log| log.id == gap.log_id)
                    && gap.lsns() == Some((damage.from, damage.to))
            });
            let here = fault.from <= damage.position && damage.position < fault.to;
            if !(same_gap || here && fault.is_unreadable()) {
                return true;
            }
            if damage.accepted {
                accepted += 1;
            }
            match &damage.log {
                _ if damage.accepted => {}
                Some(log) => {
                    // Trimmed records are not missed.
                    let from = damage.from.max(log.state.read().coming_first());
                    if from < damage.to {
                        ranges
                            .entry((Some(log.name.clone()), log.id))
                            .or_default()
                            .push((from, damage.to));
                    }
                }
                None => unproven = true,
            }
            false
        });
        if self.account.is_none() {
            for touched in &fault.touched {
                if let Some(lsns) = touched.lsns() {
                    let name = self.names.get(&touched.log_id).cloned();
                    ranges.entry((name, touched.log_id)).or_default().push(lsns);
                }
            }
        }
        let none = ranges.is_empty();
        if none && !unproven && accepted > 0 {
            findings.push(Finding {
                severity: Severity::Note,
                detail: format!("{}; the loss of what was here was accepted", base.detail),
                advice: advice::ACCEPTED,
                ..base
            });
            return;
        }
        for ((log, log_id), lsns) in ranges {
            for lsns in merged(lsns) {
                findings.push(Finding {
                    log: log.clone(),
                    log_id: Some(log_id),
                    lsns: Some(lsns),
                    severity: Severity::Loss,
                    advice: advice::LOST,
                    ..base.clone()
                });
            }
        }
        if unproven {
            findings.push(Finding {
                severity: Severity::Loss,
                detail: format!("{}; whose records these were is not known", base.detail),
                advice: advice::UNPROVEN,
                ..base
            });
        } else if none {
            let told = self.account.is_some() && fault.severity == Severity::Loss;
            let whose = fault
                .touched
                .iter()
                .find(|touched| touched.log_id.get() != 0);
            let whose = whose.filter(|touched| self.names.contains_key(&touched.log_id));
            findings.push(Finding {
                log: whose.and_then(|touched| self.names.get(&touched.log_id).cloned()),
                log_id: whose.map(|touched| touched.log_id),
                // Recovery misses no record that is still kept.
                severity: if told {
                    Severity::Damage
                } else {
                    base.severity
                },
                advice: if told { advice::TOLD } else { base.advice },
                ..base
            });
        }
    }

    /// Records missing without bad bytes: records of missing segments.
    fn rest(&mut self, survey: &Survey, findings: &mut Vec<Finding>) {
        for damage in std::mem::take(&mut self.left) {
            let position = damage.position;
            let within = survey
                .segments
                .iter()
                .rfind(|segment| segment.base <= position);
            let first = damage
                .log
                .as_ref()
                .map(|log| log.state.read().coming_first());
            if damage.accepted || first.is_some_and(|first| damage.to <= first) {
                continue;
            }
            let name = damage.log.as_ref().map(|log| log.name.clone());
            let unproven = name.is_none() && damage.from == damage.to;
            let (detail, advice) = match unproven {
                true => ("; whose these were is not known", advice::UNPROVEN),
                false => ("", advice::LOST),
            };
            let detail = format!("records are missing at position {position}{detail}");
            findings.push(Finding {
                segment: within.map(|segment| segment.life.id.get()),
                positions: Some((position, position)),
                log_id: damage.log.as_ref().map(|log| log.id),
                log: name,
                lsns: (damage.from < damage.to).then_some((damage.from, damage.to)),
                ..Finding::new(FindingKind::Missing, Severity::Loss, detail, advice)
            });
        }
    }
}
