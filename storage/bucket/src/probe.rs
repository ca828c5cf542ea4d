//! The test that each bucket must pass before anything relies on it: conditional writes, and reads and lists that see the
//! last write. Some servers ignore conditions, or check them without a lock.

use bytes::Bytes;
use futures_util::future::join_all;

use crate::bucket::{Bucket, Put, PutOnce, Tag, WriteCondition};
use crate::error::{BucketError, BucketErrorKind};
use crate::record::random;

/// Rounds of each race at an endpoint that has passed before.
pub const ROUNDS: usize = 8;
/// Rounds of each race at a new endpoint.
pub const NEW_ENDPOINT_ROUNDS: usize = 100;
/// Writers in one round of a race.
const WRITERS: usize = 16;
/// Races that may end without a decision before the store is refused.
const UNDECIDED_RACES: usize = 5;
/// Maximum bytes of an object of the probe.
const LARGEST: u64 = 4096;

/// The failure of a probe.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The bucket does something else than it must.
    #[error(
        "{place}: the bucket is refused: the check {check:?} failed, {what}; Wald needs a store with atomic conditional \
         writes"
    )]
    Refused {
        /// The URL.
        place: String,
        /// Name of the check.
        check: &'static str,
        /// The observation.
        what: String,
    },
    /// The store failed, so that nothing is known about it.
    #[error(transparent)]
    Store(#[from] BucketError),
}

/// Tests the bucket with `rounds` rounds of each race. Removes its objects.
///
/// # Errors
/// If a check fails, or the store.
pub async fn probe(bucket: &Bucket, rounds: usize) -> Result<(), ProbeError> {
    let directory = format!("probe/{}", random(bucket.place())?);
    let run = Probe {
        bucket,
        directory: &directory,
    };
    let result = match run.all(rounds).await {
        // The objects of the probe are small and new, so the store sends something else than it has.
        Err(ProbeError::Store(error)) if error.kind() == BucketErrorKind::Damaged => {
            run.refused("answers", error.to_string())
        }
        done => done,
    };
    let removed = run.remove().await;
    result?;
    Ok(removed?)
}

struct Probe<'a> {
    bucket: &'a Bucket,
    directory: &'a str,
}

impl Probe<'_> {
    async fn all(&self, rounds: usize) -> Result<(), ProbeError> {
        self.conditions().await?;
        for round in 0..rounds {
            self.race(round).await?;
        }
        Ok(())
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.directory)
    }

    fn refused<T>(&self, check: &'static str, what: impl Into<String>) -> Result<T, ProbeError> {
        Err(ProbeError::Refused {
            place: self.bucket.place().to_owned(),
            check,
            what: what.into(),
        })
    }

    async fn conditions(&self) -> Result<(), ProbeError> {
        let (bucket, one) = (self.bucket, self.path("one"));
        let put = |text: &'static str, condition| {
            let one = &one;
            async move {
                bucket
                    .put_if(one, Bytes::from_static(text.as_bytes()), condition)
                    .await
            }
        };
        let Put::Done(first) = put("first", WriteCondition::Absent).await? else {
            return self.refused(
                "create",
                "an object that did not exist could not be created",
            );
        };
        if put("second", WriteCondition::Absent).await? != Put::Lost {
            return self.refused("create twice", "an existing object was created again");
        }
        let Put::Done(third) = put("third", WriteCondition::Is(&first)).await? else {
            return self.refused("swap", "a swap with the right tag was refused");
        };
        if third == first {
            return self.refused("swap", "two versions have one tag");
        }
        if put("fourth", WriteCondition::Is(&first)).await? != Put::Lost {
            return self.refused("swap with a stale tag", "it was done");
        }
        self.holds("read after write", "one", b"third", &third)
            .await?;
        let missing = self.path("missing");
        let swap = bucket
            .put_if(&missing, "x".into(), WriteCondition::Is(&third))
            .await?;
        if swap != Put::Lost || bucket.size(&missing).await?.is_some() {
            return self.refused("swap of a missing object", "it was done");
        }
        let names = bucket.list(self.directory).await?;
        let names: Vec<&str> = names.iter().map(|entry| entry.name.as_str()).collect();
        if names != ["one"] {
            return self.refused("list after write", format!("the list has {names:?}"));
        }
        Ok(())
    }

    /// Makes sure that an object has these bytes and this tag.
    async fn holds(
        &self,
        check: &'static str,
        name: &str,
        bytes: &[u8],
        tag: &Tag,
    ) -> Result<(), ProbeError> {
        match self.bucket.read(&self.path(name), LARGEST).await? {
            Some((there, now)) if there == bytes && now == *tag => Ok(()),
            Some((there, _)) if there == bytes => self.refused(check, "the read has another tag"),
            Some(_) => self.refused(check, "the read has older bytes"),
            None => self.refused(check, "the object is missing"),
        }
    }

    /// One round: writers create one object, then swap its version. Each time exactly one must succeed. The winner of the
    /// creates gives the version of the swaps, so a second create that the store has hidden lets none of them succeed.
    async fn race(&self, round: usize) -> Result<(), ProbeError> {
        let name = format!("race-{round}");
        let (_, first) = self.one_wins("race of creates", &name, None).await?;
        let (last, tag) = self.one_wins("race of swaps", &name, Some(&first)).await?;
        self.holds("race of swaps", &name, last.as_bytes(), &tag)
            .await
    }

    /// The bytes and the version of the winner.
    async fn one_wins(
        &self,
        check: &'static str,
        name: &str,
        from: Option<&Tag>,
    ) -> Result<(String, Tag), ProbeError> {
        for _ in 0..UNDECIDED_RACES {
            let mut winners = self.winners(check, name, from).await?;
            match winners.pop() {
                Some(winner) if winners.is_empty() => return Ok(winner),
                Some(_) => {
                    let count = winners.len() + 1;
                    return self.refused(check, format!("{count} of {WRITERS} writers succeeded"));
                }
                // Answers of 409 may have decided for nobody.
                None => {}
            }
        }
        self.refused(check, format!("none of {WRITERS} writers succeeded"))
    }

    /// The bytes and versions of the writers that succeeded.
    async fn winners(
        &self,
        check: &'static str,
        name: &str,
        from: Option<&Tag>,
    ) -> Result<Vec<(String, Tag)>, ProbeError> {
        let path = self.path(name);
        let condition = from.map_or(WriteCondition::Absent, WriteCondition::Is);
        let text = |writer| format!("{check} {writer}");
        let writers =
            (0..WRITERS).map(|writer| self.bucket.put_once(&path, text(writer).into(), condition));
        let mut winners = Vec::new();
        let mut unclear = None;
        for (writer, put) in join_all(writers).await.into_iter().enumerate() {
            match put {
                PutOnce::Done(tag) => winners.push((text(writer), tag)),
                PutOnce::Refused(_) => {}
                PutOnce::Failed(error) => unclear = Some(error),
            }
        }
        if unclear.is_none() && !winners.is_empty() {
            return Ok(winners);
        }
        // One whose answer was lost shows by its bytes.
        let found = self.bucket.read(&path, LARGEST).await?;
        let found = found.filter(|(_, tag)| Some(tag) != from);
        let found = found.and_then(|(bytes, tag)| {
            let mut texts = (0..WRITERS).map(text);
            Some((texts.find(|text| text.as_bytes() == bytes)?, tag))
        });
        match (found, unclear) {
            (Some(found), _) => {
                if !winners.iter().any(|(text, _)| *text == found.0) {
                    winners.push(found);
                }
                Ok(winners)
            }
            (None, Some(error)) => Err(error.into()),
            (None, None) => Ok(winners),
        }
    }

    async fn remove(&self) -> Result<(), BucketError> {
        let names = self.bucket.list(self.directory).await?;
        let paths: Vec<String> = names.iter().map(|entry| self.path(&entry.name)).collect();
        self.bucket.remove(&paths).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{StoreFault, StoreFaults, faulty, faulty_with};
    use crate::observe::Tally;

    #[tokio::test]
    async fn a_store_with_conditions_passes_and_is_left_empty() {
        let (bucket, faults, _) = faulty();
        faults.next_puts([StoreFault::AnswerLost; 40]);
        probe(&bucket, ROUNDS).await.unwrap();
        assert!(bucket.list("").await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_round_takes_33_requests_and_settles_lost_answers() {
        let requests = |tally: &Tally| tally.requests().iter().map(|(.., count)| count).sum();
        let (bucket, _, tally) = faulty();
        probe(&bucket, 0).await.unwrap();
        let without: u64 = requests(&tally);
        probe(&bucket, ROUNDS).await.unwrap();
        let rounds = requests(&tally) - 2 * without;
        // A store that removes one object at a time takes one more.
        assert_eq!(rounds, (33 + 1) * ROUNDS as u64);
        // The winner of a race hears 409, or nothing.
        for fault in [StoreFault::AnswerLost, StoreFault::Conflict] {
            let (bucket, faults, _) = faulty();
            let directory = "probe/x";
            let run = Probe {
                bucket: &bucket,
                directory,
            };
            faults.next_puts([fault; WRITERS]);
            run.race(0).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_store_that_ignores_conditions_is_refused_by_name() {
        let (bucket, _, _) = faulty_with(StoreFaults {
            ignores_conditions: true,
            ..StoreFaults::default()
        });
        let refused = probe(&bucket, 1).await.unwrap_err();
        let ProbeError::Refused { check, .. } = &refused else {
            panic!("{refused}");
        };
        assert_eq!(*check, "create twice");
        assert!(bucket.list("").await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_race_with_two_winners_is_refused() {
        let (bucket, _, _) = faulty_with(StoreFaults {
            ignores_conditions: true,
            ..StoreFaults::default()
        });
        let run = Probe {
            bucket: &bucket,
            directory: "probe/x",
        };
        let refused = run.race(0).await.unwrap_err().to_string();
        assert!(
            refused.contains("\"race of creates\"") && refused.contains("16 of 16"),
            "{refused}"
        );
    }

    #[tokio::test]
    async fn a_store_that_fails_is_not_called_wrong() {
        let (bucket, faults, _) = faulty();
        faults.next_puts([StoreFault::Unavailable]);
        let failed = probe(&bucket, 1).await.unwrap_err();
        assert!(matches!(failed, ProbeError::Store(_)), "{failed}");
    }
}
