//! A node that does not own the store: it keeps the content of the bucket, and takes the store over when it may.
//!
//! ```text
//! directory is the newest one ───────────────────────────────────────────────▶ opens it
//! directory is older ─▶ sets it aside ─┐
//! empty directory ─────────────────────┴▶ keeps content ─▶ may claim ─▶ fence, rows, move content ─▶ opens it
//! empty bucket ─▶ reserves it ───────────────────────────────────────────────▶ makes the store
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use wald_bucket::{
    Membership, NodeState, OwnerRecord, OwnerState, ReplicaCopy, StandByTurn, StandByWatch,
};
use wald_proto::v1;
use wald_storage::{KeptContent, RealDisk, remove_kept_content, set_aside};

use super::fetch::{Fetch, FetchError};
use super::{ReplicaStart, SAMPLE_PAUSE, exit, fetch_code, term};
use crate::config::Config;
use crate::serve::{Exit, StartFacts, StoreOwner, no_store};

/// Pause between two looks at the owner. A hand-over takes half of it longer on average.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// Pause between two looks for new content.
const KEEP_PAUSE: Duration = Duration::from_secs(10);

/// The data directory beside the owner's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnDirectory {
    /// It has no store.
    Empty,
    /// It is the newest one of the store, as far as the record shows.
    Newest,
    /// An owner has claimed the store since. It has not served yet.
    Undecided,
    /// Another owner has served the store since, in a later term than this one.
    Older(u64),
}

/// What a stand-by does between two looks.
struct Keeping {
    /// Time of the next look for content.
    due: Instant,
    kept: KeptContent,
    /// The last error, which is reported once.
    error: String,
}

impl ReplicaStart {
    /// Joins the nodes of the store, and waits until this one may own it. The directory has the store then, or is the one
    /// in which it is made.
    ///
    /// # Errors
    /// If the directory and the bucket do not fit each other, or if a take-over fails.
    pub(super) fn stand_by(&mut self, config: &Config, facts: &StartFacts) -> Result<(), Exit> {
        let remote = Arc::clone(&self.remote);
        let (bucket, runtime) = (&remote.bucket, &remote.runtime);
        let joins = Membership::join(
            bucket,
            &self.claim.node,
            &self.claim.endpoint,
            config.lease_ttl,
        );
        let membership = Arc::new(
            runtime
                .block_on(joins)
                .map_err(|error| exit(&error.into()))?,
        );
        self.claim.process = membership.incarnation().to_owned();
        self.membership = Some(Arc::clone(&membership));
        self.cluster.note_role(v1::ReplicaRole::Joining);
        self.sample_nodes(&membership);
        let mut watch = StandByWatch::new(bucket, &self.claim.node, config.lease_ttl);
        let mut is_new = facts.is_new;
        let mut seen: Option<OwnerRecord> = None;
        let mut keeping = Keeping {
            due: Instant::now(),
            kept: KeptContent::default(),
            error: String::new(),
        };
        loop {
            if *facts.stop.borrow() {
                drop(membership);
                if let Some(membership) = self.membership.take().and_then(Arc::into_inner) {
                    let until = Instant::now() + Duration::from_secs(2);
                    runtime.block_on(async { leave(membership, until).await });
                }
                return Err(Exit::new(Exit::UNAVAILABLE, "the stand-by has left"));
            }
            let turn = match runtime.block_on(watch.look()) {
                Ok(turn) => turn,
                Err(error) => {
                    keeping.report(&error.to_string());
                    runtime.block_on(async { tokio::time::sleep(LOOK_PAUSE).await });
                    continue;
                }
            };
            let (owner, inherits) = match turn {
                StandByTurn::Wait(None) => {
                    if is_new && !config.create_store {
                        return Err(no_store(&config.data_dir));
                    }
                    let reserves = runtime.block_on(self.claim.reserve(bucket));
                    match reserves.map_err(|error| exit(&error.into()))? {
                        true => return Ok(()),
                        false => continue,
                    }
                }
                StandByTurn::Wait(Some(owner)) => {
                    let is_named = self.claim.names(&owner);
                    let inherits = is_named.then_some(owner.term);
                    (owner, inherits.map(Some))
                }
                StandByTurn::Claim(owner, inherits) => (owner, Some(inherits)),
            };
            self.cluster.note(&owner, Some(watch.nodes()));
            let directory = self.directory_beside(&owner, is_new)?;
            if let OwnDirectory::Older(term) = directory {
                self.set_aside(term)?;
                is_new = true;
                continue;
            }
            if directory == OwnDirectory::Newest && is_free_for(&self.claim.node, &owner) {
                return Ok(());
            }
            match inherits {
                Some(inherits) => {
                    self.claim.inherits = inherits;
                    if directory == OwnDirectory::Newest {
                        return Ok(());
                    }
                    if self.store_id()?.is_none() {
                        // The node that reserved the bucket has made nothing.
                        return Ok(());
                    }
                    if directory == OwnDirectory::Undecided {
                        self.set_aside(owner.term)?;
                    }
                    membership.enter(NodeState::Owner);
                    self.decided = Some(Instant::now());
                    tracing::info!(
                        place = bucket.place(),
                        owner = owner.node,
                        term = owner.term,
                        "the owner has ended; this node takes the store over"
                    );
                    self.fetch(config, keeping.kept.bytes)?;
                    let disk = RealDisk::open(&self.directory);
                    let disk = disk.map_err(|error| unkept(&error.into()))?;
                    return remove_kept_content(&*disk).map_err(|error| unkept(&error.into()));
                }
                None => {
                    self.show(facts, &owner, &mut seen);
                    if directory == OwnDirectory::Empty {
                        self.keep(config, facts, &membership, &mut keeping);
                    }
                    runtime.block_on(async { tokio::time::sleep(LOOK_PAUSE).await });
                }
            }
        }
    }

    /// Shows the nodes in metrics from now on.
    fn sample_nodes(&self, membership: &Membership) {
        let lease = Arc::clone(membership.lease());
        let (metrics, cluster) = (Arc::clone(&self.metrics), Arc::clone(&self.cluster));
        self.remote.runtime.spawn(async move {
            let mut samples = tokio::time::interval(SAMPLE_PAUSE);
            loop {
                samples.tick().await;
                metrics.nodes(cluster.role(), cluster.stand_bys(), lease.age());
            }
        });
    }

    /// The store of the bucket; `None` if there is none.
    fn store_id(&self) -> Result<Option<u128>, Exit> {
        let found = ReplicaCopy::store_of(&self.remote.bucket);
        let found = self.remote.runtime.block_on(found);
        found.map_err(|error| exit(&error.into()))
    }

    fn directory_beside(
        &mut self,
        owner: &OwnerRecord,
        is_new: bool,
    ) -> Result<OwnDirectory, Exit> {
        let Some(store_id) = self.store_id()? else {
            // The first owner has not begun. A store that is here already is decided by its claim.
            return Ok(match is_new {
                true if !self.claim.is_mine(owner) => OwnDirectory::Empty,
                _ => OwnDirectory::Newest,
            });
        };
        let kept = term::kept(&self.directory, store_id)?;
        self.claim.kept_term = kept;
        Ok(match kept {
            None if is_new => OwnDirectory::Empty,
            // Its claim compares it with the bucket.
            None => OwnDirectory::Newest,
            Some(kept) if kept >= owner.term => OwnDirectory::Newest,
            Some(_) if owner.state == OwnerState::Opening => OwnDirectory::Undecided,
            Some(kept) => OwnDirectory::Older(kept),
        })
    }

    /// Moves a store away that is no longer the newest one, and keeps content that the bucket has, too.
    fn set_aside(&self, term: u64) -> Result<(), Exit> {
        let copy = ReplicaCopy::open(&self.remote.bucket, &super::ProtoManifests, None);
        let copy = self.remote.runtime.block_on(copy);
        let copy = copy.map_err(|error| exit(&error.into()))?;
        let manifest = copy.as_ref().and_then(ReplicaCopy::manifest);
        let disk = RealDisk::open(&self.directory).map_err(|error| unkept(&error.into()))?;
        let done = set_aside(&*disk, manifest, term).map_err(|error| unkept(&error.into()))?;
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
    fn show(&self, facts: &StartFacts, owner: &OwnerRecord, seen: &mut Option<OwnerRecord>) {
        let ends = owner.state == OwnerState::Released;
        let endpoint = if ends { "" } else { &*owner.endpoint };
        facts.owner.send_replace(Some(StoreOwner {
            endpoint: endpoint.to_owned(),
            term: owner.term,
        }));
        let is_known = |seen: &OwnerRecord| {
            let key = |owner: &OwnerRecord| (owner.term, owner.state, owner.stand_bys.clone());
            key(seen) == key(owner)
        };
        if !seen.as_ref().is_some_and(is_known) {
            tracing::info!(
                place = self.remote.bucket.place(),
                owner = owner.node,
                endpoint = owner.endpoint,
                term = owner.term,
                is_named = owner.stand_bys.contains(&self.claim.node),
                "another node owns the store"
            );
            *seen = Some(owner.clone());
        }
    }

    /// Keeps the newest content, if it is time.
    fn keep(
        &self,
        config: &Config,
        facts: &StartFacts,
        membership: &Membership,
        keeping: &mut Keeping,
    ) {
        if Instant::now() < keeping.due {
            return;
        }
        keeping.due = Instant::now() + KEEP_PAUSE;
        let mut goes_on = || !*facts.stop.borrow();
        let fetch = Fetch::begin(&self.remote, config, None);
        let kept = fetch.and_then(|fetch| fetch.keep(&self.directory, &mut goes_on));
        match kept {
            Ok(kept) => {
                keeping.kept = kept;
                keeping.error.clear();
                membership.enter(NodeState::StandBy);
                self.cluster.note_role(v1::ReplicaRole::StandBy);
            }
            // The owner has stored nothing yet.
            Err(FetchError::Empty { .. }) => {}
            Err(error) => {
                membership.enter(NodeState::Joining);
                self.cluster.note_role(v1::ReplicaRole::Joining);
                keeping.report(&error.to_string());
            }
        }
    }
}

impl Keeping {
    /// Reports an error that is not the last one.
    fn report(&mut self, error: &str) {
        if self.error != error {
            tracing::warn!(
                error,
                "this stand-by does not follow the store; it tries again"
            );
            error.clone_into(&mut self.error);
        }
    }
}

/// Whether a node whose directory is the newest one may go on with it at once: it is the owner, and has not handed the store
/// over.
fn is_free_for(node: &str, owner: &OwnerRecord) -> bool {
    let is_other = |successor: &String| successor != node;
    let is_handed_over = owner.successor.as_ref().is_some_and(is_other);
    owner.node == node && !(owner.state == OwnerState::Released && is_handed_over)
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
