//! A client whose file of credentials is read again: on request, and after an answer that refuses the credentials.
//!
//! ```text
//! request ─▶ 403 ─▶ file, at most once in 5 s ─▶ new client ─▶ the same request, once more
//! ```
//!
//! Credentials of the environment do not change while a process runs. Credentials of the machine or the pod are renewed by
//! `object_store`, before they expire.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt as _, StreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use tokio::time::Instant;

use crate::error::{BucketError, BucketErrorKind, store_words};

/// Minimum time between two reads of the file after refusals.
const RENEW_PAUSE: Duration = Duration::from_secs(5);

/// Makes a client with the present content of the file.
type MakeClient = dyn Fn() -> Result<Arc<dyn ObjectStore>, BucketError> + Send + Sync;

/// The client with the newest credentials. Clones are the same client.
#[derive(Clone)]
pub(crate) struct Renewed(Arc<Renewing>);

struct Renewing {
    make: Box<MakeClient>,
    /// Held while the file is read: a request that is refused meanwhile waits for the newer client.
    reading: Mutex<()>,
    client: Mutex<RenewedClient>,
}

struct RenewedClient {
    store: Arc<dyn ObjectStore>,
    /// Counts up with each client.
    generation: u64,
    /// The last read after a refusal.
    asked: Option<Instant>,
}

impl fmt::Debug for Renewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Renewed")
    }
}

impl fmt::Display for Renewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.current().0, f)
    }
}

/// Whether the store refuses the credentials.
fn is_denied(error: &Error) -> bool {
    let kind = BucketError::of("", "", error).kind();
    matches!(kind, BucketErrorKind::Denied | BucketErrorKind::Expired)
}

impl Renewed {
    /// Makes the first client.
    ///
    /// # Errors
    /// If the file or the settings cannot be used.
    pub(crate) fn open(
        make: impl Fn() -> Result<Arc<dyn ObjectStore>, BucketError> + Send + Sync + 'static,
    ) -> Result<Self, BucketError> {
        let client = RenewedClient {
            store: make()?,
            generation: 0,
            asked: None,
        };
        Ok(Self(Arc::new(Renewing {
            make: Box::new(make),
            reading: Mutex::default(),
            client: Mutex::new(client),
        })))
    }

    fn client(&self) -> std::sync::MutexGuard<'_, RenewedClient> {
        self.0.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> (Arc<dyn ObjectStore>, u64) {
        let client = self.client();
        (Arc::clone(&client.store), client.generation)
    }

    /// Reads the file now. Requests that have begun keep the earlier credentials.
    ///
    /// # Errors
    /// If the file cannot be used. The earlier credentials stay.
    pub(crate) fn renew(&self) -> Result<(), BucketError> {
        let _reading = self.reading();
        self.read_again()
    }

    fn reading(&self) -> std::sync::MutexGuard<'_, ()> {
        self.0
            .reading
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn read_again(&self) -> Result<(), BucketError> {
        let store = (self.0.make)()?;
        let mut client = self.client();
        client.store = store;
        client.generation += 1;
        Ok(())
    }

    /// The error, or a newer client than the refused one, with which the request is repeated.
    fn after(&self, error: Error, generation: u64) -> Result<Arc<dyn ObjectStore>, Error> {
        if !is_denied(&error) {
            return Err(error);
        }
        let _reading = self.reading();
        {
            let mut client = self.client();
            if client.generation != generation {
                return Ok(Arc::clone(&client.store));
            }
            let now = Instant::now();
            if client.asked.is_some_and(|asked| now < asked + RENEW_PAUSE) {
                return Err(error);
            }
            client.asked = Some(now);
        }
        match self.read_again() {
            Ok(()) => Ok(self.current().0),
            Err(unusable) => Err(Error::PermissionDenied {
                path: String::new(),
                source: format!(
                    "the credentials cannot be read again: {unusable}; the store said: {}",
                    store_words(&error)
                )
                .into(),
            }),
        }
    }

    /// Sends a request, and once more with newer credentials if they are refused.
    async fn send<T, F>(
        &self,
        request: impl Fn(Arc<dyn ObjectStore>) -> F + Send + Sync,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let (store, generation) = self.current();
        match request(store).await {
            Ok(answer) => Ok(answer),
            Err(error) => request(self.after(error, generation)?).await,
        }
    }

    /// Sends a list, and once more with newer credentials if its first page is refused.
    fn listed(
        &self,
        list: impl Fn(Arc<dyn ObjectStore>) -> BoxStream<'static, Result<ObjectMeta, Error>>
        + Send
        + 'static,
    ) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        let renewed = self.clone();
        async move {
            let (store, generation) = renewed.current();
            let mut names = list(store);
            match names.next().await {
                Some(Err(error)) => match renewed.after(error, generation) {
                    Ok(store) => list(store),
                    Err(error) => stream::once(async { Err(error) }).boxed(),
                },
                Some(first) => stream::once(async { first }).chain(names).boxed(),
                None => stream::empty().boxed(),
            }
        }
        .flatten_stream()
        .boxed()
    }
}

#[async_trait]
impl ObjectStore for Renewed {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult, Error> {
        self.send(|store| {
            let (payload, options) = (payload.clone(), options.clone());
            async move { store.put_opts(location, payload, options).await }
        })
        .await
    }

    /// A part that is refused fails the upload: the caller sends the file again.
    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>, Error> {
        self.send(|store| {
            let options = options.clone();
            async move { store.put_multipart_opts(location, options).await }
        })
        .await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult, Error> {
        self.send(|store| {
            let options = options.clone();
            async move { store.get_opts(location, options).await }
        })
        .await
    }

    /// A removal that is refused is not repeated: the next one has the newer credentials.
    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path, Error>>,
    ) -> BoxStream<'static, Result<Path, Error>> {
        let ((store, generation), renewed) = (self.current(), self.clone());
        store
            .delete_stream(locations)
            .map(move |removed| {
                removed.map_err(|error| {
                    let shown = store_words(&error);
                    match renewed.after(error, generation) {
                        Err(error) => error,
                        Ok(_) => Error::PermissionDenied {
                            path: String::new(),
                            source: shown.into(),
                        },
                    }
                })
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        let prefix = prefix.cloned();
        self.listed(move |store| store.list(prefix.as_ref()))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        let (prefix, offset) = (prefix.cloned(), offset.clone());
        self.listed(move |store| store.list_with_offset(prefix.as_ref(), &offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult, Error> {
        self.send(|store| async move { store.list_with_delimiter(prefix).await })
            .await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<(), Error> {
        self.send(|store| {
            let options = options.clone();
            async move { store.copy_opts(from, to, options).await }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use object_store::ObjectStoreExt as _;
    use object_store::memory::InMemory;

    use super::*;
    use crate::faults::{Faulty, StoreFaults};

    /// A store that takes the key of one client only.
    struct Keys {
        renewed: Renewed,
        /// Reads of the file.
        reads: Arc<AtomicUsize>,
        /// Whether the file can be read.
        is_there: Arc<AtomicBool>,
        /// The faults of each client.
        clients: Arc<Mutex<Vec<Arc<StoreFaults>>>>,
    }

    fn keys() -> Keys {
        let inner = Arc::new(InMemory::new());
        let reads = Arc::new(AtomicUsize::new(0));
        let is_there = Arc::new(AtomicBool::new(true));
        let clients: Arc<Mutex<Vec<Arc<StoreFaults>>>> = Arc::default();
        let made = (
            Arc::clone(&reads),
            Arc::clone(&is_there),
            Arc::clone(&clients),
        );
        let renewed = Renewed::open(move || {
            let (reads, is_there, clients) = &made;
            reads.fetch_add(1, Ordering::Relaxed);
            if !is_there.load(Ordering::Relaxed) {
                let what = "the file of credentials: it is gone";
                return Err(BucketError::new(BucketErrorKind::Settings, "s3://b", what));
            }
            let faults = Arc::new(StoreFaults::default());
            clients.lock().unwrap().push(Arc::clone(&faults));
            let inner = Arc::clone(&inner);
            Ok(Arc::new(Faulty { inner, faults }) as _)
        });
        Keys {
            renewed: renewed.unwrap(),
            reads,
            is_there,
            clients,
        }
    }

    impl Keys {
        /// Refuses the keys of all clients so far.
        fn refuse(&self) {
            for client in &*self.clients.lock().unwrap() {
                client.denied.store(true, Ordering::Relaxed);
            }
        }

        fn reads(&self) -> usize {
            self.reads.load(Ordering::Relaxed)
        }
    }

    #[tokio::test]
    async fn requests_refused_together_get_the_same_newer_client() {
        use std::sync::mpsc::channel;
        let (begun, begins) = channel();
        let (go_on, goes_on) = channel::<()>();
        let made = Mutex::new((0, goes_on));
        let renewed = Renewed::open(move || {
            let mut made = made.lock().unwrap();
            made.0 += 1;
            if made.0 > 1 {
                begun.send(made.0).unwrap();
                made.1.recv().unwrap();
            }
            Ok(Arc::new(InMemory::new()) as _)
        });
        let renewed = renewed.unwrap();
        let refused = || {
            let renewed = renewed.clone();
            let denied = Error::PermissionDenied {
                path: String::new(),
                source: "403".into(),
            };
            std::thread::spawn(move || renewed.after(denied, 0).is_ok())
        };
        let first = refused();
        assert_eq!(begins.recv().unwrap(), 2);
        // The first one reads the file now. The second waits for it, and reads nothing.
        let second = refused();
        // Time for a second one that does not wait: it would fail.
        let until = std::time::Instant::now() + Duration::from_millis(100);
        while !second.is_finished() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        go_on.send(()).unwrap();
        assert!(first.join().unwrap() && second.join().unwrap());
        assert!(begins.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn each_kind_of_request_is_repeated_with_newer_credentials() {
        let keys = keys();
        let (store, path) = (&keys.renewed, Path::from("a/b"));
        store.put(&path, "x".into()).await.unwrap();
        let mut reads = 1;
        for request in 0..5 {
            keys.refuse();
            match request {
                0 => drop(store.put(&path, "y".into()).await.unwrap()),
                1 => drop(store.get(&path).await.unwrap()),
                2 => assert_eq!(store.list(None).count().await, 1),
                3 => assert_eq!(store.list_with_offset(None, &path).count().await, 0),
                _ => drop(store.put_multipart(&path).await.unwrap()),
            }
            reads += 1;
            assert_eq!(keys.reads(), reads);
            tokio::time::advance(RENEW_PAUSE).await;
        }
        keys.refuse();
        assert!(is_denied(&store.delete(&path).await.unwrap_err()));
        store.delete(&path).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn file_is_read_once_in_5_s_however_many_requests_are_refused() {
        let keys = keys();
        let path = Path::from("a");
        keys.is_there.store(false, Ordering::Relaxed);
        keys.refuse();
        for _ in 0..100 {
            let refused = keys.renewed.put(&path, "x".into()).await.unwrap_err();
            assert!(is_denied(&refused));
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        assert_eq!(keys.reads(), 1 + 2, "in 10 s");
        tokio::time::advance(RENEW_PAUSE).await;
        let refused = keys.renewed.put(&path, "x".into()).await.unwrap_err();
        // The message has both reasons, although the store's answer is XML.
        let shown = BucketError::of("s3://b", "write a", &refused).to_string();
        assert!(shown.contains("it is gone"), "{shown}");
        assert!(shown.contains("ExpiredToken: The provided"), "{shown}");
        // A request is heard at once.
        keys.is_there.store(true, Ordering::Relaxed);
        keys.renewed.renew().unwrap();
        keys.renewed.put(&path, "x".into()).await.unwrap();
    }
}
