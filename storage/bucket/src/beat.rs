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
        loop {
            let changed = async {
                if early.changed().await.is_err() {
                    std::future::pending().await
                }
            };
            tokio::select! {
                () = tokio::time::sleep(self.pause) => {}
                () = changed => {}
            }
            if !self.beat(&next).await {
                self.progress.send_modify(|progress| progress.lost = true);
                return;
            }
        }
    }

    /// Whether the record is still this process's, as far as the bucket says.
    async fn beat(&mut self, next: &impl Fn(&mut T)) -> bool {
        let began = (self.clock)();
        let mut value = self.record.value.clone();
        next(&mut value);
        let written = self.record.swap(&self.bucket, &self.path, value).await;
        if let Ok(Some(now)) = written {
            self.record = now;
            self.progress.send_modify(|progress| progress.began = began);
            return true;
        }
        // An earlier beat, whose answer was an error, may have arrived late. It is this process's, too.
        match BucketRecord::read(&self.bucket, &self.path).await {
            Ok(Some(now)) if self.record.value.is_by_writer_of(&now.value) => {
                self.record = now;
                true
            }
            Ok(_) => false,
            Err(_) => true,
        }
    }
}
