//! The one node that writes, and its term.
//!
//! ```text
//! record says: nobody, released, me ─▶ newest term E ─▶ keep E + 1 ─▶ record {E + 1, me} ─▶ open the tail with E + 1
//!              another node ─▶ refused, unless a person takes over
//! ```
//!
//! The record names the owner for people and clients. Only the term of the tail decides: an owner that was fenced stores
//! nothing. The term is kept in the data directory before it is claimed, so that a later start recognises its own claim.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::error::OwnerError;
use super::nodes::is_zero;
use crate::bucket::Bucket;
use crate::error::BucketError;
use crate::record::{BucketRecord, random};
use crate::tail::{NewestTail, ReplicaTail, TailError, TailErrorKind};
use crate::takeover::TakeOver;

/// Path of the record.
const OWNER: &str = "shards/0/owner";
/// Attempts to claim a term while other nodes claim terms too, or the bucket gives no answer.
const ATTEMPTS: usize = 5;
/// Pause between two attempts.
const ATTEMPT_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of processes of one owner that go on one after the other, and end before they have served for a ttl. The next
/// one leaves the store to a stand-by.
const MOST_STARTS: u64 = 3;

/// State of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnerState {
    /// It opens the store.
    Opening,
    /// It serves.
    Serving,
    /// It has ended and has stored everything.
    Released,
}

/// The owner of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    /// Number of its term; 0 before the first one.
    pub term: u64,
    /// Name of the node.
    pub node: String,
    /// Different for each claim.
    pub incarnation: String,
    /// The address for clients; empty if it is unknown.
    pub endpoint: String,
    /// Its state.
    pub state: OwnerState,
    /// Number of the term of another node that it has taken over. A node that ends before it serves may try again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken: Option<u64>,
    /// Identity of its process among the nodes; empty if it is not one of them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Names of the stand-bys that may take the store over when this node is dead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stand_bys: Vec<String>,
    /// Name of the node that follows, if this one has handed the store over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub successor: Option<String>,
    /// Whether it is about to hand the store over. It serves until then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ends: bool,
    /// Generation of the key ring in the bucket, in this term; 0 if the records are plain.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub keys: u64,
    /// Number of processes of this node that went on with the store one after the other, since one has served for a ttl.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub starts: u64,
}

impl OwnerRecord {
    /// Whether the processes of this node have ended too early too often, so that the next one leaves the store to a stand-by.
    pub fn starts_in_vain(&self) -> bool {
        self.starts >= MOST_STARTS && !self.stand_bys.is_empty()
    }

    /// Reads the record; `None` if the store had no owner.
    ///
    /// # Errors
    /// `Damaged` if the object is none; others if the store fails.
    pub async fn read(bucket: &Bucket) -> Result<Option<BucketRecord<Self>>, BucketError> {
        BucketRecord::read(bucket, OWNER).await
    }

    /// Replaces the version that was read, or creates the first one; `None` if another node was faster.
    pub(super) async fn write(
        self,
        bucket: &Bucket,
        found: Option<&BucketRecord<Self>>,
    ) -> Result<Option<BucketRecord<Self>>, BucketError> {
        match found {
            Some(found) => found.swap(bucket, OWNER, self).await,
            None => BucketRecord::create(bucket, OWNER, self).await,
        }
    }
}

/// The node that wants to own a store.
#[derive(Debug, Clone)]
pub struct OwnerClaim {
    /// Name of the node.
    pub node: String,
    /// The address for clients; empty if it is unknown.
    pub endpoint: String,
    /// Number of the term that the data directory has claimed last; `None` if it has claimed none.
    pub kept_term: Option<u64>,
    /// The owner that is gone, if a person says so.
    pub take_over: Option<TakeOver>,
    /// Number of the term of an owner that is dead, as this node has seen it. This node follows if the record names it as
    /// a stand-by, or as the owner.
    pub inherits: Option<u64>,
    /// Identity of this process among the nodes; empty if it is not one of them.
    pub process: String,
}

impl OwnerClaim {
    /// Whether this node may try. A directory may go on if its own claim is the last one.
    fn may_follow(&self, owner: &OwnerRecord) -> bool {
        let is_free = owner.state == OwnerState::Released;
        self.is_mine(owner) || is_free || self.names(owner) || self.is_heir(owner)
    }

    fn is_heir(&self, owner: &OwnerRecord) -> bool {
        let is_named = owner.node == self.node || owner.stand_bys.contains(&self.node);
        self.inherits == Some(owner.term) && is_named
    }

    /// Whether this process, or an earlier one with the same directory, was the last to claim the store.
    pub fn is_mine(&self, owner: &OwnerRecord) -> bool {
        let has_reserved = owner.term == 0 && owner.process == self.process;
        owner.node == self.node && (self.kept_term >= Some(owner.term) || has_reserved)
    }

    /// Reserves an empty bucket, so that one of several new nodes makes the store. Returns whether it is this one.
    ///
    /// # Errors
    /// If the bucket fails. Then the bucket may or may not be reserved.
    pub async fn reserve(&self, bucket: &Bucket) -> Result<bool, BucketError> {
        let mine = OwnerRecord {
            term: 0,
            node: self.node.clone(),
            incarnation: random(bucket.place())?,
            endpoint: self.endpoint.clone(),
            state: OwnerState::Opening,
            taken: None,
            process: self.process.clone(),
            stand_bys: Vec::new(),
            successor: None,
            ends: false,
            keys: 0,
            starts: 0,
        };
        Ok(mine.write(bucket, None).await?.is_some())
    }

    /// Makes the beats of this process count as the owner's, while it still opens the store of an earlier process with the same
    /// directory. Otherwise a stand-by would follow that process after its `lease_ttl`, however alive this one is. Returns
    /// false if another node has changed the record, or if a stand-by must follow: [`OwnerRecord::starts_in_vain`].
    ///
    /// # Errors
    /// If the bucket fails. Then the record may or may not show it.
    pub async fn goes_on(&self, bucket: &Bucket) -> Result<bool, BucketError> {
        let Some(found) = OwnerRecord::read(bucket).await? else {
            return Ok(false);
        };
        let is_shown = found.value.process == self.process;
        if is_shown || !self.is_mine(&found.value) || found.value.state == OwnerState::Released {
            return Ok(self.is_mine(&found.value));
        }
        // A process that opens the store and dies would keep it from its stand-bys for ever.
        if found.value.starts_in_vain() {
            return Ok(false);
        }
        let mine = OwnerRecord {
            process: self.process.clone(),
            ends: false,
            starts: found.value.starts + 1,
            ..found.value.clone()
        };
        Ok(mine.write(bucket, Some(&found)).await?.is_some())
    }

    /// Whether a person says that this owner is gone. A node that has taken over the named term and ended before it served
    /// is gone, too.
    pub fn names(&self, owner: &OwnerRecord) -> bool {
        match self.take_over {
            None => false,
            Some(TakeOver::Any) => true,
            Some(TakeOver::Term(term)) => {
                let has_tried = owner.node == self.node && owner.state == OwnerState::Opening;
                owner.term == term || (has_tried && owner.taken == Some(term))
            }
        }
    }

    /// Refuses a claim after this owner, as far as its record shows it.
    fn check(&self, bucket: &Bucket, owner: &OwnerRecord) -> Result<(), OwnerError> {
        let refused = || (bucket.place().to_owned(), Box::new(owner.clone()));
        if self.is_superseded(owner) {
            let (place, owner) = refused();
            return Err(OwnerError::Superseded { place, owner });
        }
        if !self.may_follow(owner) {
            let (place, owner) = refused();
            return Err(OwnerError::Owned { place, owner });
        }
        Ok(())
    }

    /// Whether the directory must be compared with the bucket before a claim: unless its own claim is the last one, and has
    /// ended.
    ///
    /// # Errors
    /// `Owned` and `Superseded` as [`Owned::claim`]; others if the bucket fails.
    pub(super) async fn must_compare(&self, bucket: &Bucket) -> Result<bool, OwnerError> {
        let Some(found) = OwnerRecord::read(bucket).await? else {
            return Ok(false);
        };
        let owner = found.value;
        self.check(bucket, &owner)?;
        let is_last = owner.node == self.node && self.kept_term == Some(owner.term);
        Ok(owner.state != OwnerState::Released || !is_last)
    }

    /// Whether an owner has served after this directory did. It has stored its begin first, which the directory lacks.
    fn is_superseded(&self, owner: &OwnerRecord) -> bool {
        let is_later = self.kept_term.is_some_and(|kept| kept < owner.term);
        is_later && owner.state != OwnerState::Opening
    }
}

/// The error of an open after which a claim may try again.
///
/// # Errors
/// Another error.
fn may_repeat(error: TailError) -> Result<TailError, OwnerError> {
    match error.kind() {
        TailErrorKind::Fenced | TailErrorKind::Unreachable => Ok(error),
        _ => Err(error.into()),
    }
}

/// A node that owns a store.
pub(super) struct Owned {
    bucket: Bucket,
    record: BucketRecord<OwnerRecord>,
    /// The owner before, if this node took the store from it.
    pub(super) before: Option<OwnerRecord>,
    pub(super) tail: Arc<ReplicaTail>,
}

impl Owned {
    /// Becomes the owner, with the next term, and shows this state. `keep` must make the term durable in the data directory; the
    /// claim has it then, so that a later attempt recognises a record of this one.
    ///
    /// # Errors
    /// `Owned` if another node is the owner, `Superseded` if one has served since this directory did, `Contended` if other nodes claim terms at the same time; others if the bucket
    /// or the directory fails.
    pub(super) async fn claim(
        bucket: &Bucket,
        claim: &mut OwnerClaim,
        state: OwnerState,
        keep: &(dyn Fn(u64) -> io::Result<()> + Send + Sync),
    ) -> Result<Self, OwnerError> {
        let incarnation = random(bucket.place())?;
        let (mut last, mut before) = (None, None);
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                sleep(ATTEMPT_PAUSE).await;
            }
            let found = OwnerRecord::read(bucket).await?;
            // The record of an attempt before is this node's, too.
            let other = found.as_ref().map(|found| &found.value);
            if let Some(owner) = other.filter(|owner| owner.incarnation != incarnation) {
                claim.check(bucket, owner)?;
                let takes = claim.take_over.is_some() || claim.inherits.is_some();
                let is_taken = takes && !claim.is_mine(owner);
                before = is_taken.then(|| owner.clone());
            }
            let mut newest = NewestTail::read(bucket).await?;
            if other
                .is_some_and(|owner| owner.incarnation != incarnation && owner.term > newest.term())
            {
                // That node ended between its record and its tail. Nobody else has its term: an operator may name it.
                match ReplicaTail::open_after(bucket, newest).await {
                    Ok(opened) => drop(opened),
                    Err(error) => {
                        last = Some(may_repeat(error)?);
                        continue;
                    }
                }
                newest = NewestTail::read(bucket).await?;
            }
            let term = newest.term() + 1;
            keep(term).map_err(OwnerError::Kept)?;
            claim.kept_term = Some(term);
            let taken = match claim.take_over {
                Some(TakeOver::Term(term)) if before.is_some() => Some(term),
                _ => None,
            };
            // The owner before may follow again. A process that is none of the nodes holds no lease, so it names nobody.
            let is_node = !claim.process.is_empty();
            let followers = other.filter(|owner| is_node && !owner.process.is_empty());
            let followers = followers.map(|owner| owner.stand_bys.iter().chain([&owner.node]));
            let mut stand_bys: Vec<String> = followers.into_iter().flatten().cloned().collect();
            stand_bys.retain(|name| *name != claim.node);
            let mine = OwnerRecord {
                term,
                node: claim.node.clone(),
                incarnation: incarnation.clone(),
                endpoint: claim.endpoint.clone(),
                state,
                taken,
                process: claim.process.clone(),
                stand_bys,
                successor: None,
                ends: false,
                keys: other.map_or(0, |owner| owner.keys),
                starts: other
                    .filter(|owner| owner.node == claim.node)
                    .map_or(0, |owner| owner.starts),
            };
            let Some(record) = mine.write(bucket, found.as_ref()).await? else {
                continue;
            };
            match ReplicaTail::open_after(bucket, newest).await {
                Ok(tail) => {
                    return Ok(Self {
                        bucket: bucket.clone(),
                        record,
                        before,
                        tail: Arc::new(tail),
                    });
                }
                Err(error) => last = Some(may_repeat(error)?),
            }
        }
        Err(match last {
            Some(error) if error.kind() == TailErrorKind::Unreachable => error.into(),
            _ => OwnerError::Contended {
                place: bucket.place().to_owned(),
            },
        })
    }

    /// The record as this node wrote it last.
    pub(super) fn record(&self) -> &OwnerRecord {
        &self.record.value
    }

    /// Notes a state in the record. Another node's record stays as it is: the tail decides.
    ///
    /// # Errors
    /// If the bucket fails. Then the record may or may not have the state.
    #[cfg(test)]
    async fn enters(&mut self, state: OwnerState) -> Result<(), BucketError> {
        self.change(|record| record.state = state).await?;
        Ok(())
    }

    /// Changes the record. Returns whether it was this node's.
    ///
    /// # Errors
    /// If the bucket fails. Then the record may or may not be changed.
    pub(super) async fn change(
        &mut self,
        change: impl Fn(&mut OwnerRecord),
    ) -> Result<bool, BucketError> {
        loop {
            let mut next = self.record.value.clone();
            change(&mut next);
            if let Some(record) = next.write(&self.bucket, Some(&self.record)).await? {
                self.record = record;
                return Ok(true);
            }
            // A change that was cut off may have arrived.
            match OwnerRecord::read(&self.bucket).await? {
                Some(found) if found.value.incarnation == self.record.value.incarnation => {
                    self.record = found;
                }
                _ => return Ok(false),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::faults::{StoreFault, faulty};

    fn claim(node: &str, kept_term: Option<u64>) -> OwnerClaim {
        OwnerClaim {
            node: node.to_owned(),
            endpoint: format!("{node}:6925"),
            kept_term,
            take_over: None,
            inherits: None,
            process: String::new(),
        }
    }

    async fn own(bucket: &Bucket, claim: &OwnerClaim) -> Result<Owned, OwnerError> {
        Owned::claim(bucket, &mut claim.clone(), OwnerState::Opening, &|_| Ok(())).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_follows_itself_and_a_released_owner_but_no_other() {
        let (bucket, _, _) = faulty();
        let kept = Mutex::new(Vec::new());
        let keep = |term| {
            kept.lock().unwrap().push(term);
            Ok(())
        };
        let first = Owned::claim(&bucket, &mut claim("a", None), OwnerState::Opening, &keep).await;
        assert_eq!(first.unwrap().tail.term(), 1);
        // The directory of "a" is another one, or an old copy.
        for stale in [None, Some(0)] {
            let refused = own(&bucket, &claim("a", stale)).await.err().unwrap();
            assert!(matches!(refused, OwnerError::Owned { .. }));
        }
        let mut second = Owned::claim(
            &bucket,
            &mut claim("a", Some(1)),
            OwnerState::Opening,
            &keep,
        )
        .await
        .unwrap();
        assert_eq!(second.tail.term(), 2);
        assert_eq!(*kept.lock().unwrap(), [1, 2]);
        second.enters(OwnerState::Serving).await.unwrap();
        let refused = own(&bucket, &claim("b", None)).await.err().unwrap();
        assert_eq!(
            refused.to_string(),
            "s3://memory/pre/fix: the node \"a\" (a:6925) owns the store in term 2; stop it, or start with \
             --take-over=2 if it is gone for good"
        );
        second.enters(OwnerState::Released).await.unwrap();
        assert_eq!(
            own(&bucket, &claim("b", None)).await.unwrap().tail.term(),
            3
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_that_never_serves_for_long_leaves_the_store_to_a_stand_by() {
        let (bucket, _, _) = faulty();
        let begins = |process: &str| OwnerClaim {
            process: process.to_owned(),
            ..claim("a", Some(u64::MAX))
        };
        let mut owned = own(&bucket, &begins("first")).await.unwrap();
        let named = |record: &mut OwnerRecord| record.stand_bys = vec!["b".to_owned()];
        owned.change(named).await.unwrap();
        for process in ["second", "third", "fourth"] {
            assert!(begins(process).goes_on(&bucket).await.unwrap());
            // A repeat after an unclear answer counts once. So does the claim of the process.
            assert!(begins(process).goes_on(&bucket).await.unwrap());
            own(&bucket, &begins(process)).await.unwrap();
        }
        let before = OwnerRecord::read(&bucket).await.unwrap().unwrap();
        assert!(!begins("fifth").goes_on(&bucket).await.unwrap());
        let after = OwnerRecord::read(&bucket).await.unwrap().unwrap();
        assert!(after.is_same_version(&before) && after.value.starts == 3);
        // Without a stand-by nobody else could serve.
        let alone = OwnerRecord {
            stand_bys: Vec::new(),
            ..after.value.clone()
        };
        alone.write(&bucket, Some(&after)).await.unwrap().unwrap();
        assert!(begins("fifth").goes_on(&bucket).await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_person_takes_over_and_the_owner_before_writes_no_record() {
        let (bucket, _, _) = faulty();
        let mut first = own(&bucket, &claim("a", None)).await.unwrap();
        let taken = OwnerClaim {
            take_over: Some(TakeOver::Any),
            ..claim("b", None)
        };
        let second = own(&bucket, &taken).await.unwrap();
        assert_eq!(first.tail.ended().await.kind(), TailErrorKind::Fenced);
        first.enters(OwnerState::Released).await.unwrap();
        let record = OwnerRecord::read(&bucket).await.unwrap().unwrap().value;
        assert_eq!((record.term, &*record.node), (2, "b"));
        assert_eq!(record.state, OwnerState::Opening);
        assert_eq!(second.tail.term(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_named_term_is_taken_over_once_and_again_only_before_it_served() {
        let (bucket, _, _) = faulty();
        let mut first = own(&bucket, &claim("a", None)).await.unwrap();
        first.enters(OwnerState::Serving).await.unwrap();
        let taken = |node, kept_term, term| OwnerClaim {
            take_over: Some(TakeOver::Term(term)),
            ..claim(node, kept_term)
        };
        // Another term than that of the owner fences nobody.
        for other in [0, 2, 3] {
            let refused = own(&bucket, &taken("b", None, other)).await.err().unwrap();
            assert!(matches!(refused, OwnerError::Owned { .. }));
        }
        assert_eq!(ReplicaTail::newest_term(&bucket).await.unwrap(), 1);
        let second = own(&bucket, &taken("b", None, 1)).await.unwrap();
        assert_eq!(second.before.as_ref().unwrap().node, "a");
        assert_eq!(second.tail.term(), 2);
        // It ended while it fetched the store, and so has its directory. Nobody else may follow it.
        let refused = own(&bucket, &taken("c", None, 1)).await.err().unwrap();
        assert!(matches!(refused, OwnerError::Owned { .. }));
        let again = own(&bucket, &taken("b", None, 1)).await.unwrap();
        assert_eq!(again.tail.term(), 3);
        // Its directory has the store now: the term of the directory lets it in.
        let mut third = own(&bucket, &taken("b", Some(3), 1)).await.unwrap();
        assert!(third.before.is_none());
        third.enters(OwnerState::Serving).await.unwrap();
        // The option stays in the command, and the directory is lost.
        let refused = own(&bucket, &taken("b", None, 1)).await.err().unwrap();
        assert!(matches!(refused, OwnerError::Owned { .. }));
        assert!(own(&bucket, &taken("b", None, 4)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_term_has_one_owner_even_if_it_ended_before_it_opened_the_tail() {
        let (bucket, _, _) = faulty();
        let first = own(&bucket, &claim("a", None)).await.unwrap();
        let record = OwnerRecord::read(&bucket).await.unwrap().unwrap();
        let ended = OwnerRecord {
            term: 2,
            node: "b".to_owned(),
            incarnation: "other".to_owned(),
            taken: Some(1),
            ..first.record.value
        };
        ended.write(&bucket, Some(&record)).await.unwrap().unwrap();
        assert_eq!(ReplicaTail::newest_term(&bucket).await.unwrap(), 1);
        let taken = |node| OwnerClaim {
            take_over: Some(TakeOver::Term(2)),
            ..claim(node, None)
        };
        let mut third = own(&bucket, &taken("c")).await.unwrap();
        assert_eq!((third.record.value.term, third.tail.term()), (3, 3));
        third.enters(OwnerState::Serving).await.unwrap();
        // The option of another node still names "b", which is gone, and not "c".
        let refused = own(&bucket, &taken("d")).await.err().unwrap();
        assert!(matches!(refused, OwnerError::Owned { .. }));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_whose_tail_did_not_open_is_this_node_s_own_later() {
        let (bucket, faults, _) = faulty();
        drop(own(&bucket, &claim("a", None)).await.unwrap());
        let mut again = claim("a", Some(1));
        *faults.only_in.lock().unwrap() = "/db/";
        faults.next_puts([StoreFault::Unavailable; 10_000]);
        let failed = Owned::claim(&bucket, &mut again, OwnerState::Opening, &|_| Ok(())).await;
        assert!(failed.is_err());
        let record = OwnerRecord::read(&bucket).await.unwrap().unwrap().value;
        assert_eq!((record.term, record.state), (2, OwnerState::Opening));
        faults.puts.lock().unwrap().clear();
        let owned = Owned::claim(&bucket, &mut again, OwnerState::Opening, &|_| Ok(()))
            .await
            .unwrap();
        assert!(owned.tail.term() > 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_survives_lost_answers_and_keeps_its_term_first() {
        let (bucket, faults, _) = faulty();
        faults.next_puts([StoreFault::AnswerLost; 4]);
        let owned = own(&bucket, &claim("a", None)).await.unwrap();
        let record = OwnerRecord::read(&bucket).await.unwrap().unwrap().value;
        assert_eq!(record.term, owned.tail.term());
        let term = ReplicaTail::newest_term(&bucket).await.unwrap();
        let full = |_| Err(io::Error::other("no space"));
        let refused = Owned::claim(
            &bucket,
            &mut claim("a", Some(term)),
            OwnerState::Opening,
            &full,
        )
        .await;
        assert!(matches!(refused.err().unwrap(), OwnerError::Kept(_)));
        assert_eq!(ReplicaTail::newest_term(&bucket).await.unwrap(), term);
    }
}
