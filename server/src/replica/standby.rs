//! A node that does not own the store: it keeps the content of the bucket, and takes the store over when it may.
//!
//! ```text
//! directory is the newest one ───────────────────────────────────────────────▶ opens it
//! directory is older ─▶ sets it aside ─┐
//! empty directory ─────────────────────┴▶ keeps a copy ──▶ may claim ─▶ fence, rows, move content ─▶ opens it
//! empty bucket ─▶ reserves it ───────────────────────────────────────────────▶ makes the store
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use wald_bucket::{
    BucketError, Membership, NodeState, OwnerRecord, OwnerState, ReplicaCopy, SeenNode, ShipError,
    StandByTurn, StandByWatch,
};
use wald_proto::v1;
use wald_storage::{CopyReader, RealDisk, SystemClock, refuse_if_locked, set_aside};

use super::copy::Copying;
use super::fetch::FetchError;
use super::manifests::ProtoManifests;
use super::{ReplicaStart, SAMPLE_PAUSE, diverged, doubled, exit, fetch_code, term};
use crate::config::Config;
use crate::serve::{Exit, StartFacts, StoreOwner, no_store};

/// Longest pause between two looks at the owner.
pub(super) const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// Pause between two looks at an owner that has announced its end.
const HAND_OVER_PAUSE: Duration = Duration::from_millis(20);
/// Maximum time of such looks: 1,500 requests. An owner whose calls take longer to end is seen at the usual pace.
const HAND_OVER_TIME: Duration = Duration::from_secs(30);
/// Maximum time for the record of a stand-by that ends.
const LEAVE_TIME: Duration = Duration::from_secs(2);
/// Time for which a copy without news counts as a current one, at least.
const CAUGHT_UP: Duration = Duration::from_secs(10);

/// The data directory beside the owner's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnDirectory {
    /// It has no store.
    Empty,
    /// It is the newest one of the store, as far as the record shows.
    Newest,
    /// An owner has claimed the store since the term with this number, and has not served yet.
    Undecided(u64),
    /// Another owner has served the store since the term with this number.
    Older(u64),
}

/// The step after a look.
enum StandByStep {
    /// Look again later.
    Wait,
    /// The directory has the store, or is the one in which it is made.
    Ready,
}

/// An error of a step.
enum StandByError {
    /// The next step may succeed.
    Bucket(String),
    Exit(Exit),
}

impl From<Exit> for StandByError {
    fn from(exit: Exit) -> Self {
        Self::Exit(exit)
    }
}

impl From<BucketError> for StandByError {
    fn from(error: BucketError) -> Self {
        Self::Bucket(error.to_string())
    }
}

impl From<ShipError> for StandByError {
    fn from(error: ShipError) -> Self {
        Self::Bucket(error.to_string())
    }
}

/// State of the wait.
struct StandBy<'a> {
    start: &'a mut ReplicaStart,
    config: &'a Config,
    facts: &'a StartFacts,
    membership: Arc<Membership>,
    watch: StandByWatch,
    /// Whether the directory has no store.
    is_new: bool,
    store_id: Option<u128>,
    seen: Option<OwnerRecord>,
    /// Whether the operator knows why no node serves.
    has_warned: bool,
    /// The last error of a look, which is reported once.
    error: String,
    /// The last record of a node that could not be read, which is reported once.
    unread: String,
    copy: Copying,
    /// Whether the copy has everything that the bucket showed lately.
    is_caught_up: bool,
    /// Since when this node knows that the owner has announced its end.
    owner_ends: Option<Instant>,
}

impl ReplicaStart {
    /// Joins the nodes of the store, and waits until this one may own it. The directory has the store then, or is the one
    /// in which it is made.
    ///
    /// # Errors
    /// If the directory and the bucket do not fit each other, or if a take-over fails.
    pub(super) fn stand_by(&mut self, config: &Config, facts: &StartFacts) -> Result<(), Exit> {
        // A process that has the directory already is the node. It must not be replaced among the nodes.
        let disk = RealDisk::open(&self.directory).map_err(|error| unkept(&error.into()))?;
        refuse_if_locked(&*disk).map_err(|error| unkept(&error.into()))?;
        let bucket = self.remote.bucket.clone();
        let (name, endpoint) = (&self.claim.node, &self.claim.endpoint);
        let joins = Membership::join(&bucket, name, endpoint, config.lease_ttl);
        let joined = self.remote.runtime.block_on(joins);
        let membership = Arc::new(joined.map_err(|error| exit(&error.into()))?);
        self.claim.process = membership.incarnation().to_owned();
        self.membership = Some(Arc::clone(&membership));
        self.cluster.note_role(v1::ReplicaRole::Joining);
        let threads = config.storage().reader_threads;
        let reader = CopyReader::new(threads, config.lease_ttl, Arc::new(SystemClock));
        let reader = reader.map_err(|error| {
            let text = format!("cannot start the threads of readers: {error}");
            Exit::new(Exit::SYSTEM, text)
        })?;
        let _ = facts.copies.set(Arc::clone(&reader));
        self.sample_nodes(&membership, &reader);
        diverged::report(&self.directory);
        let mut wait = StandBy {
            watch: StandByWatch::new(&bucket, &self.claim.node, config.lease_ttl),
            start: self,
            config,
            facts,
            membership,
            is_new: facts.is_new,
            store_id: None,
            seen: None,
            has_warned: false,
            error: String::new(),
            unread: String::new(),
            copy: Copying::new(reader),
            is_caught_up: false,
            owner_ends: None,
        };
        loop {
            if *facts.stop.borrow() {
                return Err(wait.leave());
            }
            if wait.membership.is_lost() {
                wait.copy.end();
                let remote = &wait.start.remote;
                let ended = doubled::lost(
                    &wait.membership,
                    &wait.start.claim.node,
                    remote.bucket.place(),
                );
                return Err(remote.runtime.block_on(ended));
            }
            match wait.step() {
                Ok(StandByStep::Ready) => return Ok(()),
                Ok(StandByStep::Wait) => wait.error.clear(),
                Err(StandByError::Bucket(error)) => report(&mut wait.error, &error),
                Err(StandByError::Exit(exit)) => return Err(exit),
            }
            wait.pause();
        }
    }

    /// Shows the nodes in metrics from now on.
    fn sample_nodes(&self, membership: &Membership, reader: &Arc<CopyReader>) {
        let (lease, reader) = (Arc::clone(membership.lease()), Arc::clone(reader));
        let (metrics, cluster) = (Arc::clone(&self.metrics), Arc::clone(&self.cluster));
        self.remote.runtime.spawn(async move {
            let mut samples = tokio::time::interval(SAMPLE_PAUSE);
            loop {
                samples.tick().await;
                let ages = (lease.age(), reader.age());
                metrics.nodes(cluster.role(), cluster.stand_bys(), ages);
            }
        });
    }
}

impl StandBy<'_> {
    fn pause(&self) {
        let runtime = &self.start.remote.runtime;
        let announced = self.owner_ends.map(|since| since.elapsed());
        // A bucket that fails is asked less often.
        let announced = announced.filter(|_| self.error.is_empty());
        let pause = look_pause(announced, self.config.lease_ttl);
        runtime.block_on(async { tokio::time::sleep(pause).await });
    }

    /// Looks at the owner, and does the next thing.
    fn step(&mut self) -> Result<StandByStep, StandByError> {
        let remote = Arc::clone(&self.start.remote);
        let (bucket, runtime) = (&remote.bucket, &remote.runtime);
        let limit = self.config.lease_ttl / 3;
        let looks = async { timeout(limit, self.watch.look()).await };
        let Ok(turn) = runtime.block_on(looks) else {
            return Err(StandByError::Bucket(format!(
                "the bucket gave no answer within {limit:?}"
            )));
        };
        let claim = &self.start.claim;
        let (owner, inherits) = match turn? {
            StandByTurn::Wait(None) => {
                if self.is_new && !self.config.create_store {
                    return Err(no_store(&self.config.data_dir).into());
                }
                return Ok(match runtime.block_on(claim.reserve(bucket))? {
                    true => StandByStep::Ready,
                    false => StandByStep::Wait,
                });
            }
            // An operator says that the owner is gone.
            StandByTurn::Wait(Some(owner)) if claim.names(&owner) => {
                let inherits = Some(owner.term);
                (owner, Some(inherits))
            }
            StandByTurn::Wait(Some(owner)) => (owner, None),
            StandByTurn::Claim(owner, inherits) => (owner, Some(inherits)),
        };
        let since = self.owner_ends.unwrap_or_else(Instant::now);
        self.owner_ends = owner.ends.then_some(since);
        self.start.cluster.note(&owner, Some(self.watch.nodes()));
        self.report_unread();
        if owner.keys > 0 && self.start.keys.is_none() {
            // Encryption was switched on meanwhile. A node without keys must not follow.
            return Err(super::keys::refused(&remote).into());
        }
        self.find_store()?;
        let directory = self.directory_beside(&owner)?;
        match (directory, inherits) {
            (OwnDirectory::Older(term), _) => {
                self.set_aside(term)?;
                Ok(StandByStep::Wait)
            }
            // Recovery may take longer than the ttl, and the nodes must see meanwhile that the owner lives.
            (OwnDirectory::Newest, None) if self.goes_on(&owner) => {
                let is_shown = runtime.block_on(self.start.claim.goes_on(bucket))?;
                if is_shown {
                    return Ok(StandByStep::Ready);
                }
                if owner.starts_in_vain() && !self.has_warned {
                    tracing::error!(
                        place = bucket.place(),
                        starts = owner.starts,
                        stand_bys = owner.stand_bys.join(", "),
                        "this node has started with the store again and again, and has not served for lease_ttl; a stand-by \
                         follows now, or this node tries again after twice lease_ttl"
                    );
                    self.has_warned = true;
                }
                Ok(StandByStep::Wait)
            }
            (OwnDirectory::Newest, Some(inherits)) => {
                self.start.claim.inherits = inherits;
                Ok(StandByStep::Ready)
            }
            // The node that reserved the bucket has made nothing.
            (OwnDirectory::Empty, Some(inherits)) if self.store_id.is_none() => {
                self.start.claim.inherits = inherits;
                Ok(StandByStep::Ready)
            }
            (OwnDirectory::Undecided(term), Some(_)) => {
                self.set_aside(term)?;
                Ok(StandByStep::Wait)
            }
            (OwnDirectory::Empty, Some(inherits)) => {
                self.start.claim.inherits = inherits;
                self.take_over(&owner)?;
                Ok(StandByStep::Ready)
            }
            (OwnDirectory::Empty | OwnDirectory::Newest | OwnDirectory::Undecided(_), None) => {
                if directory == OwnDirectory::Empty {
                    self.follow(&owner);
                }
                self.show(&owner);
                Ok(StandByStep::Wait)
            }
        }
    }

    /// Reports the record of a node that this version cannot read.
    fn report_unread(&mut self) {
        let unread = self.watch.unread().map(ToString::to_string);
        let unread = unread.unwrap_or_default();
        if !unread.is_empty() && unread != self.unread {
            tracing::warn!(
                error = unread,
                "this node does not see one of the other nodes; if that one is the owner, nobody follows it automatically"
            );
        }
        self.unread = unread;
    }

    /// Leaves the nodes, because the process must end.
    fn leave(mut self) -> Exit {
        self.copy.end();
        drop(self.membership);
        if let Some(membership) = self.start.membership.take().and_then(Arc::into_inner) {
            let until = Instant::now() + LEAVE_TIME;
            let runtime = &self.start.remote.runtime;
            runtime.block_on(async { leave(membership, until).await });
        }
        Exit::new(Exit::UNAVAILABLE, "the stand-by has left")
    }

    /// Fences the owner, and makes a store of the kept content and the rest.
    fn take_over(&mut self, owner: &OwnerRecord) -> Result<(), StandByError> {
        self.start.decided = Some(Instant::now());
        let has_all = self.copy.end();
        // Calls must not go to the owner that is gone. A node that has not stood by shows no owner.
        self.facts.owner.send_if_modified(|shown| {
            let has_stood_by = shown.is_some();
            *shown = has_stood_by.then(|| StoreOwner {
                endpoint: String::new(),
                term: owner.term,
                is_followed: false,
            });
            has_stood_by
        });
        tracing::info!(
            place = self.start.remote.bucket.place(),
            owner = owner.node,
            term = owner.term,
            "the owner has ended; this node takes the store over"
        );
        let is_copied = self.is_caught_up && has_all;
        let fetched = self.start.fetch(self.config, is_copied);
        match fetched {
            Ok(()) => {}
            // Another node was faster, or the owner lives.
            Err(exit) if exit.again => return Err(StandByError::Bucket(exit.message)),
            // The owner may be fenced, so this node must go on, whatever fails.
            Err(exit) => return Err(exit.or_again(true).into()),
        }
        Ok(())
    }

    /// Finds the identity of the store in the bucket, which never changes.
    fn find_store(&mut self) -> Result<(), StandByError> {
        if self.store_id.is_none() {
            let found = ReplicaCopy::store_of(&self.start.remote.bucket);
            self.store_id = self.start.remote.runtime.block_on(found)?;
        }
        Ok(())
    }

    fn directory_beside(&mut self, owner: &OwnerRecord) -> Result<OwnDirectory, Exit> {
        let claim = &mut self.start.claim;
        let Some(store_id) = self.store_id else {
            // The first owner has not begun. The claim of a store that is here already compares it with the bucket.
            return Ok(match self.is_new && !claim.is_mine(owner) {
                true => OwnDirectory::Empty,
                false => OwnDirectory::Newest,
            });
        };
        claim.kept_term = term::kept(&self.start.directory, store_id)?;
        let is_own = owner.node == claim.node;
        Ok(match claim.kept_term {
            None if self.is_new => OwnDirectory::Empty,
            None => OwnDirectory::Newest,
            // A term that another node has got was kept here for a claim that failed.
            Some(kept) if is_own && kept >= owner.term => OwnDirectory::Newest,
            Some(kept) if owner.state == OwnerState::Opening => OwnDirectory::Undecided(kept),
            Some(kept) => OwnDirectory::Older(kept),
        })
    }

    /// Whether a node whose directory is the newest one may go on with it at once: it is the owner, and has not handed the
    /// store over.
    fn goes_on(&self, owner: &OwnerRecord) -> bool {
        let claim = &self.start.claim;
        let is_other = |successor: &String| *successor != claim.node;
        let is_handed_over = owner.successor.as_ref().is_some_and(is_other);
        claim.is_mine(owner) && !(owner.state == OwnerState::Released && is_handed_over)
    }

    /// Moves a store away that is no longer the newest one, and keeps content that the bucket has, too.
    fn set_aside(&mut self, term: u64) -> Result<(), StandByError> {
        let remote = &self.start.remote;
        // Content stays or moves within this directory: a manifest that nobody signed does no harm.
        let format = ProtoManifests::default();
        let copy = ReplicaCopy::open(&remote.bucket, &format, None);
        let copy = remote.runtime.block_on(copy)?;
        let manifest = copy.as_ref().and_then(ReplicaCopy::manifest);
        let disk = RealDisk::open(&self.start.directory).map_err(|error| unkept(&error.into()))?;
        let done = set_aside(&*disk, manifest, term).map_err(|error| unkept(&error.into()))?;
        self.is_new = true;
        diverged::report(&self.start.directory);
        tracing::warn!(
            term,
            kept = done.kept,
            moved = done.moved,
            "another node has served the store since this directory did: the files that the bucket has are kept, and \
             diverged/{term} has the rest; records there that were not REPLICATED are lost to the store"
        );
        Ok(())
    }

    /// Shows the owner to clients and operators.
    fn show(&mut self, owner: &OwnerRecord) {
        let ends = owner.state == OwnerState::Released;
        let endpoint = if ends { "" } else { &*owner.endpoint };
        let shown = Some(StoreOwner {
            endpoint: endpoint.to_owned(),
            term: owner.term,
            is_followed: self.is_caught_up && owner.state == OwnerState::Serving,
        });
        self.facts.owner.send_if_modified(|before| {
            let is_news = *before != shown;
            *before = shown;
            is_news
        });
        let place = self.start.remote.bucket.place();
        let is_named = owner.stand_bys.contains(&self.start.claim.node);
        let is_known = |seen: &OwnerRecord| {
            (seen.term, seen.state) == (owner.term, owner.state)
                && seen.stand_bys == owner.stand_bys
        };
        if !self.seen.as_ref().is_some_and(is_known) {
            tracing::info!(
                place,
                owner = owner.node,
                endpoint = owner.endpoint,
                term = owner.term,
                is_named,
                "another node owns the store"
            );
            self.seen = Some(owner.clone());
            self.has_warned = false;
        }
        let mut nodes = self.watch.nodes().iter();
        let lives = |node: &SeenNode| node.name == owner.node && node.is_alive();
        let is_alone = !owner.process.is_empty() && !ends && owner.stand_bys.is_empty();
        if is_alone && !nodes.any(lives) && !self.has_warned {
            tracing::warn!(
                place,
                owner = owner.node,
                term = owner.term,
                "the owner shows no sign of life, and has named no stand-by, so nobody follows it; start it again with its \
                 directory, or a node with --take-over={term} if it is gone for good",
                term = owner.term
            );
            self.has_warned = true;
        }
    }

    /// Follows the owner, and shows the other nodes whether this one may take the store over.
    fn follow(&mut self, owner: &OwnerRecord) {
        let start = &self.start;
        self.copy.note_keys(owner.keys);
        self.copy.begin(
            &start.remote,
            self.config,
            &start.directory,
            start.keys.as_ref(),
        );
        let nodes = self.watch.nodes().iter();
        // The owner shows its position three times in the ttl. An older one proves nothing about the present.
        let is_present = |node: &&SeenNode| node.unchanged < self.config.lease_ttl / 2;
        let mut shown = nodes.filter(is_present);
        if let Some(node) = shown.find(|node| node.name == owner.node) {
            self.copy.note_position(node.record.replicated);
        }
        self.is_caught_up = self.copy.is_caught_up(CAUGHT_UP.max(self.config.lease_ttl));
        let (state, role) = match self.is_caught_up {
            true => (NodeState::StandBy, v1::ReplicaRole::StandBy),
            false => (NodeState::Joining, v1::ReplicaRole::Joining),
        };
        self.membership.enter(state);
        start.cluster.note_role(role);
    }
}

/// Pause before the next look at the owner, which announced its end so long ago.
fn look_pause(announced: Option<Duration>, lease_ttl: Duration) -> Duration {
    let pause = match announced {
        // Not for ever: the owner may have died on its way out.
        Some(ago) if ago < HAND_OVER_TIME => HAND_OVER_PAUSE,
        _ => LOOK_PAUSE,
    };
    // A stand-by that looks less often than three times in the ttl counts as blind. The looks take time, too.
    pause.min(lease_ttl / 10)
}

/// Reports an error that is not the last one.
pub(super) fn report(last: &mut String, error: &str) {
    if last != error {
        tracing::warn!(
            error,
            "this stand-by does not follow the store; it tries again"
        );
        error.clone_into(last);
    }
}

/// Leaves the other nodes, until a time at most. They see it within their `lease_ttl` otherwise.
pub(super) async fn leave(membership: Membership, until: Instant) {
    let left = timeout_at(until, membership.leave()).await;
    if !matches!(left, Ok(Ok(()))) {
        tracing::warn!(
            "the other nodes were not informed of the end; they see it within lease_ttl"
        );
    }
}

fn unkept(error: &FetchError) -> Exit {
    Exit::new(fetch_code(error), error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_that_ends_is_looked_at_often_for_a_bounded_time() {
        let ttl = Duration::from_secs(10);
        assert_eq!(look_pause(None, ttl), LOOK_PAUSE);
        assert_eq!(look_pause(Some(Duration::ZERO), ttl), HAND_OVER_PAUSE);
        assert_eq!(look_pause(Some(HAND_OVER_TIME), ttl), LOOK_PAUSE);
        assert_eq!(
            look_pause(None, Duration::from_secs(2)),
            Duration::from_millis(200)
        );
        assert!(HAND_OVER_TIME.as_millis() / HAND_OVER_PAUSE.as_millis() <= 1_500);
    }
}
