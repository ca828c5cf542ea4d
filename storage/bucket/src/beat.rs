//! A record that its writer rewrites regularly, so that others see that it lives.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::bucket::Bucket;
use crate::record::BucketRecord;

/// A record with beats.
pub(crate) trait Beating: Clone + Serialize + DeserializeOwned {
    /// Whether one process has written both.
    fn is_by_writer_of(&self, other: &Self) -> bool;
}

/// Progress of the beats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BeatProgress {
    /// Begin of the last beat that succeeded, by the clock of the beats.
    pub(crate) began: Duration,
    /// Whether another process has replaced the record.
    pub(crate) lost: bool,
}

/// Time since the start of the machine, with the time that it slept.
pub(crate) fn boottime() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// The beats of one record.
pub(crate) struct Beats<T> {
    pub(crate) bucket: Bucket,
    pub(crate) path: String,
    /// The newest version of this process.
    pub(crate) record: BucketRecord<T>,
    /// Time between two beats.
    pub(crate) pause: Duration,
    pub(crate) clock: fn() -> Duration,
    pub(crate) progress: watch::Sender<BeatProgress>,
}

impl<T: Beating> Beats<T> {
    /// Rewrites the record until it is another's. `next` makes the next version of it. A change of `early` makes a beat at
    /// once.
    pub(crate) async fn run<E>(mut self, next: impl Fn(&mut T), mut early: watch::Receiver<E>) {
        let mut pause = self.pause;
        loop {
            let changed = async {
                if early.changed().await.is_err() {
                    std::future::pending().await
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = changed => {}
            }
            // A request that hangs must not silence the rest.
            let beat = tokio::time::timeout(self.pause / 2, self.beat(&next));
            match beat.await {
                Ok(Some(true)) => pause = self.pause,
                Ok(Some(false)) => {
                    self.progress.send_modify(|progress| progress.lost = true);
                    return;
                }
                // The next one comes soon.
                Ok(None) | Err(_) => pause = self.pause / 4,
            }
        }
    }

    /// Makes one beat. Returns whether the record is still this process's; `None` if it is not beaten, and the bucket says
    /// nothing else.
    async fn beat(&mut self, next: &impl Fn(&mut T)) -> Option<bool> {
        let began = (self.clock)();
        let mut value = self.record.value.clone();
        next(&mut value);
        let written = self.record.swap(&self.bucket, &self.path, value).await;
        if let Ok(Some(now)) = written {
            self.record = now;
            self.progress.send_modify(|progress| progress.began = began);
            return Some(true);
        }
        // An earlier beat, whose answer was an error, may have arrived late. It is this process's, too.
        match BucketRecord::read(&self.bucket, &self.path).await {
            Ok(Some(now)) if self.record.value.is_by_writer_of(&now.value) => {
                self.record = now;
                None
            }
            Ok(_) => Some(false),
            Err(_) => None,
        }
    }
}
