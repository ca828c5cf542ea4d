//! The one writer of a prefix: a record that its holder rewrites every third of `ttl`.
//!
//! ```text
//! holder   beat ─ ttl/3 ─ beat ─ ttl/3 ─ (dies)     sure until its last beat + 2/3 ttl
//! other            sees the same version for ttl ──────────────▶ takes it
//! ```
//!
//! Nobody compares clocks of two machines. A holder that is no longer sure must write nothing. Between its last sure moment
//! and the other's begin lies ttl/3. A removal must end within ttl/4.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::beat::{BeatProgress, Beating, Beats, boottime};
use crate::bucket::Bucket;
use crate::error::{BucketError, BucketErrorKind};
use crate::record::{BucketRecord, random};

/// Objects that are removed between two checks.
const REMOVED_AT_ONCE: usize = 100;

/// The content of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct HoldRecord {
    /// Text for people.
    name: String,
    /// Different for each hold.
    id: String,
    /// Counts up, so that each beat is another version.
    beat: u64,
    /// Whether the holder is done.
    free: bool,
}

impl Beating for HoldRecord {
    fn is_by_writer_of(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

/// Result of [`Hold::take`].
pub enum Taken {
    /// This process is the writer.
    Mine(Hold),
    /// Another one is, with this name.
    InUse(String),
}

/// The exclusive right to write and remove below a prefix, as long as [`Hold::check`] returns no error.
pub struct Hold {
    bucket: Bucket,
    path: String,
    id: String,
    ttl: Duration,
    clock: fn() -> Duration,
    progress: watch::Receiver<BeatProgress>,
    beats: JoinHandle<()>,
}

impl Hold {
    /// Becomes the writer, or names the other one. If that one seems dead, `waits` gets its name, and the answer takes up to
    /// `ttl` and a sixth of it.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn take(
        bucket: &Bucket,
        path: &str,
        name: &str,
        ttl: Duration,
        waits: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Taken, BucketError> {
        Self::take_by(bucket, path, name, ttl, waits, boottime).await
    }

    async fn take_by(
        bucket: &Bucket,
        path: &str,
        name: &str,
        ttl: Duration,
        waits: &mut (dyn FnMut(&str) + Send),
        clock: fn() -> Duration,
    ) -> Result<Taken, BucketError> {
        let id = random(bucket.place())?;
        let mine = |beat| HoldRecord {
            name: name.to_owned(),
            id: id.clone(),
            beat,
            free: false,
        };
        let mut seen: Option<(BucketRecord<HoldRecord>, Duration)> = None;
        loop {
            let began = clock();
            let found = BucketRecord::<HoldRecord>::read(bucket, path).await?;
            let taken = match &found {
                None => BucketRecord::create(bucket, path, mine(0)).await?,
                Some(found) if found.value.free => found.swap(bucket, path, mine(0)).await?,
                Some(found) => match &seen {
                    Some((first, since)) if found.is_same_version(first) => {
                        match began.saturating_sub(*since) >= ttl {
                            true => found.swap(bucket, path, mine(0)).await?,
                            false => None,
                        }
                    }
                    Some(_) => return Ok(Taken::InUse(found.value.name.clone())),
                    None => {
                        waits(&found.value.name);
                        seen = Some((found.clone(), clock()));
                        None
                    }
                },
            };
            if let Some(record) = taken {
                return Ok(Taken::Mine(Self::begin(
                    bucket,
                    path,
                    record,
                    ttl,
                    (began, clock),
                )));
            }
            if seen.is_some() {
                tokio::time::sleep(ttl / 6).await;
            }
        }
    }

    fn begin(
        bucket: &Bucket,
        path: &str,
        record: BucketRecord<HoldRecord>,
        ttl: Duration,
        (beat_began, clock): (Duration, fn() -> Duration),
    ) -> Self {
        let id = record.value.id.clone();
        let (progress, seen) = watch::channel(BeatProgress {
            began: beat_began,
            lost: false,
        });
        let beats = Beats {
            bucket: bucket.clone(),
            path: path.to_owned(),
            record,
            pause: ttl / 3,
            clock,
            progress,
        };
        // Nothing but time makes a beat.
        let (_, early) = watch::channel(());
        Self {
            bucket: bucket.clone(),
            path: path.to_owned(),
            id,
            ttl,
            clock,
            progress: seen,
            beats: tokio::spawn(beats.run(|record| record.beat += 1, early)),
        }
    }

    /// Call before each write or removal that nobody may do at the same time.
    ///
    /// # Errors
    /// If another process is the writer, or could be.
    pub fn check(&self) -> Result<(), BucketError> {
        let progress = *self.progress.borrow();
        let age = (self.clock)().saturating_sub(progress.began);
        if !progress.lost && age < self.ttl / 3 * 2 {
            return Ok(());
        }
        let what = format!(
            "this process could not renew {} for {} seconds, so that another may write here; nothing more is written",
            self.path,
            age.as_secs()
        );
        Err(BucketError::new(
            BucketErrorKind::Unavailable,
            self.bucket.place(),
            what,
        ))
    }

    /// Removes objects, 100 at a time, each time after [`Hold::check`]. Such a removal ends within a quarter of `ttl`, even if
    /// the store is slow: the next writer may count on these objects.
    ///
    /// # Errors
    /// If another process could be the writer, or the store fails or is too slow. Some of the objects may be removed then.
    pub async fn remove(&self, paths: &[String]) -> Result<(), BucketError> {
        for paths in paths.chunks(REMOVED_AT_ONCE) {
            self.check()?;
            let removal = self.bucket.remove(paths);
            let Ok(removed) = tokio::time::timeout(self.ttl / 4, removal).await else {
                let what = format!(
                    "the store did not remove {} objects within {:?}",
                    paths.len(),
                    self.ttl / 4
                );
                return Err(BucketError::new(
                    BucketErrorKind::Unavailable,
                    self.bucket.place(),
                    what,
                ));
            };
            removed?;
        }
        Ok(())
    }

    /// Lets the next writer begin at once.
    ///
    /// # Errors
    /// If the store fails; the next writer then waits for `ttl`.
    pub async fn release(self) -> Result<(), BucketError> {
        self.beats.abort();
        // A beat may have ended after its task was stopped, so the version is read again.
        let is_own = |record: &HoldRecord| record.id == self.id && !record.free;
        let free = |record: &mut HoldRecord| record.free = true;
        BucketRecord::change(&self.bucket, &self.path, is_own, free).await
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.beats.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{StoreFault, StoreFaults, faulty, faulty_with, paused_clock};

    const TTL: Duration = Duration::from_secs(30);

    async fn take(bucket: &Bucket, name: &str) -> Taken {
        Hold::take_by(bucket, "WRITER", name, TTL, &mut |_| {}, paused_clock)
            .await
            .unwrap()
    }

    fn mine(taken: Taken) -> Hold {
        match taken {
            Taken::Mine(hold) => hold,
            Taken::InUse(name) => panic!("in use by {name}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_living_holder_keeps_its_right_and_a_released_one_is_free() {
        paused_clock();
        let (bucket, faults, _) = faulty();
        let first = mine(take(&bucket, "first").await);
        tokio::time::sleep(10 * TTL).await;
        first.check().unwrap();
        let Taken::InUse(name) = take(&bucket, "second").await else {
            panic!("two holders");
        };
        assert_eq!(name, "first");
        // Beats whose answers are lost, or that fail once, take nothing away.
        faults.next_puts([
            StoreFault::AnswerLost,
            StoreFault::Unavailable,
            StoreFault::AnswerLost,
        ]);
        tokio::time::sleep(TTL).await;
        first.check().unwrap();
        let began = paused_clock();
        first.release().await.unwrap();
        mine(take(&bucket, "second").await).check().unwrap();
        assert_eq!(paused_clock(), began, "without a wait");
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_holder_is_replaced_after_ttl_and_knows_it() {
        paused_clock();
        let (bucket, faults, _) = faulty();
        let first = mine(take(&bucket, "first").await);
        // No beat gets through.
        faults.next_puts([StoreFault::Unavailable; 100]);
        tokio::time::sleep(TTL / 2).await;
        first.check().unwrap();
        tokio::time::sleep(TTL / 6 + TTL / 30).await;
        assert!(first.check().is_err(), "sure for 2/3 ttl only");
        drop(first);
        faults.puts.lock().unwrap().clear();
        let began = paused_clock();
        let second = mine(take(&bucket, "second").await);
        assert!(paused_clock() - began >= TTL && paused_clock() - began <= TTL + TTL / 3);
        second.check().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_removal_ends_before_another_writer_may_begin() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let paths: Vec<String> = (0..250).map(|number| format!("files/{number}")).collect();
        for path in &paths {
            bucket.put(path, "x".into()).await.unwrap();
        }
        let hold = mine(take(&bucket, "first").await);
        hold.remove(&paths).await.unwrap();
        assert!(bucket.list("files").await.unwrap().is_empty());

        let (bucket, _, _) = faulty_with(StoreFaults {
            slow_removals: true,
            ..StoreFaults::default()
        });
        let hold = mine(take(&bucket, "first").await);
        let began = paused_clock();
        let refused = hold.remove(&paths).await.unwrap_err();
        assert_eq!(refused.kind(), BucketErrorKind::Unavailable);
        assert!(paused_clock() - began <= TTL / 3, "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_that_was_replaced_stops() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let first = mine(take(&bucket, "first").await);
        let record = BucketRecord::<HoldRecord>::read(&bucket, "WRITER")
            .await
            .unwrap()
            .unwrap();
        let other = HoldRecord {
            id: "other".to_owned(),
            ..record.value.clone()
        };
        record
            .swap(&bucket, "WRITER", other)
            .await
            .unwrap()
            .unwrap();
        tokio::time::sleep(TTL / 2).await;
        assert!(
            first
                .check()
                .unwrap_err()
                .to_string()
                .contains("another may write")
        );
        assert!(first.remove(&["files/x".to_owned()]).await.is_err());
        // It does not release the right of the other.
        first.release().await.unwrap();
        let now = BucketRecord::<HoldRecord>::read(&bucket, "WRITER")
            .await
            .unwrap()
            .unwrap();
        assert!(now.value.id == "other" && !now.value.free);
    }
}
