//! Learning facts from images that damaged frames lack.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Drafts;
use crate::base::ids::{LogId, LogName, Lsn, Position};
use crate::format::address::Hole;
use crate::index::SealedIndex;
use crate::index::drafts::UnnamedLog;
use crate::logs::Lost;
use crate::logs::extras::Extras;
use crate::logs::image::Image;
use crate::logs::producers::Producers;

/// State of the logs of a segment before its frames were applied.
pub(crate) struct LogsBefore {
    /// Their producers, in order of the logs. The index lists changes.
    producers: Vec<(LogId, Producers)>,
    /// Number of lost changes before.
    lost_facts: usize,
}

/// The name of a log whose own name is lost, if no other log has it.
fn placeholder(id: LogId) -> String {
    format!("unnamed/{id}")
}

impl Drafts {
    /// Current state of the logs in an index.
    pub(crate) fn before(&self, index: &SealedIndex) -> LogsBefore {
        let known = |id: LogId| {
            let state = self.logs.get(&id)?.log.state.read();
            let extras = state.extras.as_deref()?;
            Some((id, extras.producers.clone()))
        };
        LogsBefore {
            producers: index.rows().filter_map(|row| known(row.log_id)).collect(),
            lost_facts: self.lost_facts.len(),
        }
    }

    /// Learns from the index of a segment, which describes its logs at its end. The frames of the segment are
    /// applied, but for these `holes`. Only records prove the tail of a log here: a start that did not know the tail
    /// may have made the index.
    pub(crate) fn learn_index(
        &mut self,
        index: &SealedIndex,
        holes: &[Hole],
        mut before: LogsBefore,
    ) {
        let window = self.producer_window;
        for row in index.rows() {
            let Some(mut image) = index.image(&row) else {
                continue;
            };
            self.touch(row.log_id, index.segment);
            for place in index.entries(&row).from(0) {
                let hit = |hole: &Hole| hole.from < place.end() && place.position < hole.to;
                if holes.iter().any(hit) {
                    let (from, to) = (place.first_lsn, place.next_lsn());
                    // Damage took the records before this place when the index was made.
                    let seen = self.draft(row.log_id).state().next;
                    self.lose(place.position, row.log_id, seen, from);
                    self.lose(place.position, row.log_id, from, to);
                }
            }
            let known = &mut before.producers;
            let at = known.binary_search_by_key(&row.log_id, |(id, _)| *id);
            let mut producers = at.map_or_else(
                |_| Producers::default(),
                |at| std::mem::take(&mut known[at].1),
            );
            if let Some(extras) = image.extras.as_deref_mut() {
                producers.apply(std::mem::take(&mut extras.producers), window);
            }
            if !producers.is_empty() {
                image.extras.get_or_insert_default().producers = producers;
            }
            let created = image.created_end;
            self.learn(image, index.end);
            let draft = self.draft(row.log_id);
            draft.proven = draft.proven.max(created);
        }
        self.lost_facts.truncate(before.lost_facts);
    }

    /// Learns from a checkpoint, as [`Drafts::learn`]. A checkpoint is only written if no tail is in doubt.
    pub(crate) fn learn_whole(&mut self, image: Image, end: Position) {
        let id = image.id;
        self.learn(image, end);
        if let Some(draft) = self.logs.get_mut(&id) {
            draft.proven = draft.proven.max(end);
        }
    }

    /// Learns the state of a log at `end`, up to which all readable frames are applied.
    fn learn(&mut self, image: Image, end: Position) {
        let (id, deleted) = (image.id, image.deleted);
        if deleted && !self.logs.contains_key(&id) {
            return;
        }
        let (config, update_time) = (image.config.clone(), image.update_time);
        let extras = image.extras.as_deref().map(Extras::from);
        let state = self.draft(id).state();
        let seen = state.next;
        if !deleted {
            // Damage took these before the image was made.
            for lost in image.lost.iter().filter(|lost| lost.to > seen) {
                let from = lost.from.max(seen);
                state.add_damage(Lost { from, ..*lost });
            }
            self.miss(end, id, seen, image.next);
        }
        self.learn_standing(image);
        let state = self.draft(id).state();
        if deleted {
            return;
        }
        state.extras = extras.map(Box::new);
        // A start without the newest settings may have made the image.
        if update_time >= state.update_time {
            state.config = config;
            state.update_time = update_time;
        }
    }

    /// Learns from an image of an earlier place. A log that is unknown here may be deleted.
    pub(crate) fn learn_old(&mut self, image: Image) {
        let Some(draft) = self.logs.get(&image.id) else {
            return;
        };
        let newer = draft.log.state.read().update_time > image.update_time;
        let (id, config, update_time) = (image.id, image.config.clone(), image.update_time);
        self.learn_standing(image);
        let state = self.draft(id).state();
        if !newer {
            state.config = config;
            state.update_time = update_time;
        }
    }

    /// Learns the facts of a log that only grow: they also hold if more frames followed.
    fn learn_standing(&mut self, mut image: Image) {
        let draft = self.draft(image.id);
        if let Some(name) = image.name.take().filter(|_| !draft.named) {
            draft.set_name(name);
        }
        let state = draft.state();
        if state.created_end == Position::ZERO {
            state.created_end = image.created_end;
            state.created_in = image.created_in.into();
            state.create_time = image.create_time;
        }
        state.last_time = state.last_time.max(image.last_time);
        state.last_end = state.last_end.max(image.last_end);
        if image.deleted {
            state.deleted = true;
            state.stored_bytes = 0;
            state.extras = None;
            return;
        }
        let last_end = state.last_end;
        let kept = image.kept.up_to(state.next);
        if kept.first > state.coming_first() {
            state.add_kept(last_end, kept);
        }
        let epoch = image.extras.map_or(0, |extras| extras.writer_epoch);
        if epoch > state.writer_epoch() {
            state.add_fence(last_end, epoch, last_end);
        }
    }

    /// Existing logs whose names no file has so far. Names whose loss was accepted are not wanted.
    pub(crate) fn without_name(&self) -> BTreeSet<LogId> {
        let exists = |draft: &super::Draft| !draft.log.state.read().deleted;
        let lost = self.nameless();
        let lost = lost.filter(|(id, draft)| exists(draft) && !self.lists_name(**id));
        lost.map(|(id, _)| *id).collect()
    }

    /// Names these logs. `None`: the log is deleted. A newer log of the same name proves a deletion, too: while a name
    /// is lost, no log is created. After an acceptance it proves nothing.
    pub(crate) fn name_found(&mut self, found: BTreeMap<LogId, Option<LogName>>) {
        let names = found
            .iter()
            .filter_map(|(id, name)| Some((name.clone()?, *id)));
        // Later entries have higher ids.
        let mut owners: HashMap<LogName, LogId> = names.collect();
        for (id, draft) in &self.logs {
            let name = draft.name().filter(|_| !draft.log.state.read().deleted);
            if let Some(owner) = name.and_then(|name| owners.get_mut(name)) {
                *owner = (*owner).max(*id);
            }
        }
        for (id, name) in found {
            match name {
                Some(name) if owners[&name] == id => self.draft(id).set_name(name),
                Some(_) if self.is_accepted_name(id) => {}
                _ => {
                    let state = self.draft(id).state();
                    state.deleted = true;
                    state.stored_bytes = 0;
                    state.extras = None;
                }
            }
        }
    }

    /// Notes that the logs are known as of `end`: damage before it leaves no doubt.
    pub(crate) fn end_doubt(&mut self, end: Position) {
        self.unattributed.retain(|at| *at > end);
        self.lost_facts.clear();
        self.count_doubts();
    }

    /// Reports changes that no file records.
    pub(crate) fn report_lost_facts(&mut self) {
        self.findings.append(&mut self.lost_facts);
    }

    /// Logs whose names are lost.
    fn nameless(&self) -> impl Iterator<Item = (&LogId, &super::Draft)> {
        self.logs.iter().filter(|(_, draft)| !draft.named)
    }

    /// Whether the loss of the name of this log was accepted.
    fn is_accepted_name(&self, id: LogId) -> bool {
        let mut accepted = self.accepted.iter();
        accepted.any(|accepted| accepted.covers_name(id))
    }

    /// Whether an acceptance lists the name of this log.
    fn lists_name(&self, id: LogId) -> bool {
        let name = (id, Lsn::ZERO, Lsn::ZERO);
        self.accepted.iter().any(|a| a.lost.contains(&name))
    }

    /// Logs whose names are lost, without those whose loss was accepted.
    pub(super) fn newly_nameless(&self) -> impl Iterator<Item = LogId> {
        let all = self.nameless().map(|(id, _)| *id);
        all.filter(|id| !self.is_accepted_name(*id))
    }

    /// Names the logs whose names are lost, if that loss was accepted: their records stay readable. All files
    /// were read before: the last one, a checkpoint, may know the name. A name that comes back after its loss was
    /// accepted has no effect, since another log may have it.
    pub(super) fn name_accepted(&mut self) {
        let accepted = self.accepted.iter().flat_map(|accepted| &accepted.lost);
        let names = accepted.filter(|(_, from, to)| *to == Lsn::ZERO && from == to);
        for id in names.map(|(id, ..)| *id).collect::<Vec<_>>() {
            if let Some(draft) = self.logs.get_mut(&id) {
                let name = draft.log.name.as_str();
                draft.named &= name.starts_with(&placeholder(id));
            }
        }
        let lost = self.nameless();
        let lost = lost.filter(|(id, _)| self.is_accepted_name(**id));
        let has_records = |(id, draft): (&LogId, &super::Draft)| {
            let state = draft.log.state.read();
            (!state.deleted && state.next > Lsn::ZERO).then_some(*id)
        };
        let lost: Vec<LogId> = lost.filter_map(has_records).collect();
        for id in lost {
            let name = self.free_name(id);
            self.draft(id).set_name(name);
        }
    }

    /// Logs with lost names whose loss is not accepted, in order.
    pub(super) fn unnamed(&self) -> Vec<UnnamedLog> {
        let unnamed = |(id, draft): (&LogId, &super::Draft)| {
            let state = draft.log.state.read();
            let is_new = !state.deleted && !self.is_accepted_name(*id);
            is_new.then(|| UnnamedLog {
                log_id: *id,
                name: self.free_name(*id),
                records: state.records(),
                bytes: state.stored_bytes,
            })
        };
        let mut found: Vec<_> = self.nameless().filter_map(unnamed).collect();
        found.sort_unstable_by_key(|log| log.log_id);
        found
    }

    /// The name for a log whose own name is lost. No other log has it.
    fn free_name(&self, id: LogId) -> LogName {
        let plain = placeholder(id);
        let is_taken = |name: &str| {
            let has =
                |draft: &super::Draft| draft.name().is_some_and(|other| other.as_str() == name);
            self.logs.values().any(has)
        };
        let others = (2_u64..).map(|number| format!("{plain}-{number}"));
        let mut names = std::iter::once(plain.clone()).chain(others);
        let free = names.find(|name| !is_taken(name));
        LogName::new(free.as_deref().unwrap_or(&plain)).expect("a plain name is valid")
    }
}
