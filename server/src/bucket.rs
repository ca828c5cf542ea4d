//! The client of a bucket in this program: its settings, the runtime of its requests, exit codes.

use std::ops::Deref;
use std::sync::Arc;

use tokio::runtime::Runtime;
use wald_bucket::{Bucket, BucketError, BucketErrorKind, BucketUrl, RequestObserver};

use crate::config::Config;
use crate::serve::Exit;

/// Makes the client. The first request shows whether the bucket exists.
///
/// # Errors
/// If the settings cannot be used.
pub(crate) fn open(
    url: &BucketUrl,
    config: &Config,
    observer: Arc<dyn RequestObserver>,
) -> Result<Bucket, BucketError> {
    Bucket::open(url, &config.bucket_settings(), observer)
}

/// The exit code of a daemon whose bucket fails.
pub(crate) fn exit_code(kind: BucketErrorKind) -> u8 {
    match kind {
        BucketErrorKind::Settings | BucketErrorKind::NotFound | BucketErrorKind::Denied => {
            Exit::CONFIG
        }
        // Newer credentials may come: a service manager starts the daemon again.
        BucketErrorKind::Unavailable | BucketErrorKind::Expired => Exit::UNAVAILABLE,
        BucketErrorKind::Damaged => Exit::BAD_DATA,
    }
}

/// A runtime with one thread for requests to a bucket. Its end waits for no task, so that it may end anywhere.
pub(crate) struct BucketRuntime(Option<Runtime>);

impl BucketRuntime {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system refuses it.
    pub(crate) fn start() -> std::io::Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let named = runtime.worker_threads(1).thread_name("wald-bucket");
        Ok(Self(Some(named.enable_all().build()?)))
    }
}

impl Deref for BucketRuntime {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        self.0.as_ref().expect("only the end takes it")
    }
}

impl Drop for BucketRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
