//! The test that each bucket must pass before anything relies on it: conditional writes, and reads and lists that see the
//! last write. Some servers ignore conditions, or check them without a lock.

use bytes::Bytes;
use futures_util::future::join_all;

use crate::bucket::{Bucket, Put, Tag, WriteCondition};
use crate::error::{BucketError, BucketErrorKind};
use crate::record::random;

/// Rounds of each race at an endpoint that has passed before.
pub const ROUNDS: usize = 8;
/// Rounds of each race at a new endpoint.
pub const NEW_ENDPOINT_ROUNDS: usize = 100;
/// Writers in one round of a race.
const WRITERS: usize = 16;
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

    /// One round: writers create one object, then swap its version. Each time exactly one must succeed.
    async fn race(&self, round: usize) -> Result<(), ProbeError> {
        let name = format!("race-{round}");
        let first = self.one_wins("race of creates", &name, None).await?;
        self.one_wins("race of swaps", &name, Some(&first)).await?;
        Ok(())
    }

    async fn one_wins(
        &self,
        check: &'static str,
        name: &str,
        from: Option<&Tag>,
    ) -> Result<Tag, ProbeError> {
        let path = self.path(name);
        let text = |writer| format!("{check} {writer}");
        let writers = (0..WRITERS).map(|writer| {
            let condition = from.map_or(WriteCondition::Absent, WriteCondition::Is);
            self.bucket.put_if(&path, text(writer).into(), condition)
        });
        let mut winners = Vec::new();
        for (writer, put) in join_all(writers).await.into_iter().enumerate() {
            if let Put::Done(tag) = put? {
                winners.push((writer, tag));
            }
        }
        match winners.pop() {
            Some((writer, tag)) if winners.is_empty() => {
                self.holds(check, name, text(writer).as_bytes(), &tag)
                    .await?;
                Ok(tag)
            }
            None => self.refused(check, format!("none of {WRITERS} writers succeeded")),
            Some(_) => self.refused(
                check,
                format!("{} of {WRITERS} writers succeeded", winners.len() + 1),
            ),
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

    #[tokio::test]
    async fn a_store_with_conditions_passes_and_is_left_empty() {
        let (bucket, faults, _) = faulty();
        faults.next_puts([StoreFault::AnswerLost; 40]);
        probe(&bucket, ROUNDS).await.unwrap();
        assert!(bucket.list("").await.unwrap().is_empty());
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
