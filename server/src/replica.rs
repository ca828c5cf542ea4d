//! The replica of this daemon's store in a bucket.
//!
//! ```text
//! probe ─▶ directory has a store ─────────────────┬▶ engine opens ─▶ claim, TERM, ship the rest ─▶ serve, ship
//!          └ empty ─▶ bucket has none ────────────┤
//!                  └▶ has one: --take-over fences the owner and fetches the store; else the start is refused
//!                              with stand_by the node waits until it may fence the owner
//! ```
//!
//! The thread that opens the store does all steps before the daemon serves. Then the shipper runs on a thread of its own,
//! so that no event loop waits for it. `none.rs` takes the place of this module in builds without object stores.

mod cluster;
mod copy;
mod diverged;
mod doubled;
mod events;
pub(crate) mod fetch;
mod keys;
mod manifests;
mod standby;
mod term;

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, timeout, timeout_at};
use wald_bucket::{
    Bucket, BucketUrl, FencedStore, Membership, NEW_ENDPOINT_ROUNDS, OwnerClaim, OwnerError,
    OwnerRecord, OwnerState, ProbeError, ROUNDS, ReplicaCopy, ReplicaOwner, ReplicaParts, ShipEnd,
    ShipError, ShipGap, ShipSettings, ShipSource, TailErrorKind, TakeOver, probe, probe_metadata,
    read_key_ring,
};
use wald_proto::v1;
use wald_storage::{
    KeptTerm, LocalEngine, Operate as _, RealDisk, Replica as _, RestoreError, RestoredAs,
    block_on, remove_kept_content,
};

use crate::backups::bucket::Remote;
use crate::backups::keys::{SigningKey, TrustedKeys};
use crate::backups::unusable;
use crate::bucket::{self, BucketRuntime};
use crate::config::{BucketGap, Config};
use crate::convert;
use crate::encryption::{KeyRing, shared};
use crate::host;
use crate::metrics::{Metrics, ReplicaMetrics};
use crate::serve::{Exit, StartFacts, StoreOwner, no_store};

use self::cluster::Cluster;
use self::events::{Events, Requests};
use self::fetch::{Fetch, FetchError};
use self::keys::OwnedKeys;
use self::manifests::ProtoManifests;

/// Makes a directory a store.
const STORE_MARK: &str = "FORMAT";

/// The bucket of a start, which has passed its probe.
pub(crate) struct ReplicaStart {
    remote: Arc<Remote>,
    claim: OwnerClaim,
    /// This process among the nodes of the store, if there may be several.
    membership: Option<Arc<Membership>>,
    cluster: Arc<Cluster>,
    /// Begin of a take-over as a stand-by.
    decided: Option<Instant>,
    /// The store of a take-over, in the term that the owner keeps.
    fenced: Option<FencedStore>,
    settings: ShipSettings,
    directory: PathBuf,
    metrics: Arc<ReplicaMetrics>,
    signing_key: Option<SigningKey>,
    /// `None`: the records are plain.
    keys: Option<Arc<KeyRing>>,
}

/// The replica of a daemon that serves.
pub(crate) struct RunningReplica {
    place: String,
    node: String,
    stop: watch::Sender<bool>,
    /// Announces the end.
    ends: watch::Sender<bool>,
    cluster: Arc<Cluster>,
    runs: JoinHandle<ShipEnd>,
    /// The end of the shipper, once it has come.
    end: Option<Result<ShipEnd, JoinError>>,
    membership: Option<Arc<Membership>>,
    metrics: Arc<ReplicaMetrics>,
    /// Its thread ends with it.
    remote: Arc<Remote>,
}

/// Describes the replica for as long as the process runs.
pub(crate) struct ReplicaWatch {
    place: String,
    node: String,
    endpoint: String,
    metrics: Arc<ReplicaMetrics>,
    cluster: Arc<Cluster>,
}

impl ReplicaWatch {
    /// The replica as it is now.
    pub(crate) fn now(&self) -> v1::ReplicaStatus {
        let figures = self.metrics.figures();
        let mut status = convert::replica_status(&self.place, &self.node, &figures);
        self.cluster.show(&mut status);
        status
    }

    /// This node as the owner of the store, in its term.
    pub(crate) fn owner(&self) -> StoreOwner {
        StoreOwner {
            endpoint: self.endpoint.clone(),
            term: self.metrics.term(),
            is_followed: true,
        }
    }
}

impl ReplicaStart {
    /// Shows the lag in metrics from now on.
    fn watch(&self, engine: &Arc<LocalEngine>) {
        let watched = Arc::downgrade(engine);
        let progress = move || {
            let engine = watched.upgrade();
            let now = engine.map(|engine| (engine.progress(), engine.lag_records()));
            now.unwrap_or_default()
        };
        self.metrics.watch(self.settings.max_lag, progress);
        let metrics = Arc::clone(&self.metrics);
        self.remote.runtime.spawn(async move {
            let mut samples = tokio::time::interval(SAMPLE_PAUSE);
            loop {
                samples.tick().await;
                metrics.sample();
            }
        });
    }

    /// Prepares the replica that the settings name: probes the bucket, and fetches a store that an empty directory takes
    /// over. `None` without one.
    ///
    /// # Errors
    /// If the bucket is refused or fails, or if directory and bucket do not fit each other.
    pub(crate) fn prepare(
        config: &Config,
        metrics: &Metrics,
        facts: &StartFacts,
        keys: Option<&Arc<KeyRing>>,
    ) -> Result<Option<Self>, Exit> {
        if !config.has_replica() {
            return Ok(None);
        }
        let node = node_name(config)?;
        let metrics = metrics.replica().map_err(|error| {
            let text = format!("metrics cannot be registered: {error}");
            Exit::new(Exit::SYSTEM, text)
        })?;
        let remote = Arc::new(remote(config, &metrics)?);
        keys::check(&remote, config, keys)?;
        let claim = OwnerClaim {
            endpoint: endpoint(config, &node, facts.address),
            node,
            kept_term: None,
            take_over: facts.take_over,
            inherits: None,
            process: String::new(),
        };
        let fetches = match facts.is_new && !config.stand_by {
            true => has_store(&remote, &config.data_dir, &claim)?,
            false => false,
        };
        if facts.is_new && !config.stand_by && !fetches && !config.create_store {
            return Err(no_store(&config.data_dir));
        }
        remote.runtime.block_on(probe_all(&remote.bucket))?;
        let mut start = Self {
            claim,
            settings: ShipSettings {
                gap: match config.bucket_gap {
                    BucketGap::Auto => ShipGap::Measured,
                    BucketGap::Fixed(gap) => ShipGap::Fixed(gap),
                },
                interval: config.replica_interval,
                max_lag: config.replica_max_lag.0,
                keep: config.replica_keep,
            },
            directory: config.data_dir.clone(),
            metrics,
            membership: None,
            cluster: Arc::default(),
            decided: None,
            fenced: None,
            signing_key: SigningKey::of(config).map_err(|fault| unusable(&fault))?,
            keys: keys.cloned(),
            remote,
        };
        let _ = facts.replica.set(ReplicaWatch {
            place: start.remote.bucket.place().to_owned(),
            node: start.claim.node.clone(),
            endpoint: start.claim.endpoint.clone(),
            metrics: Arc::clone(&start.metrics),
            cluster: Arc::clone(&start.cluster),
        });
        if fetches {
            start.fetch(config, false)?;
        } else if config.stand_by {
            start.stand_by(config, facts)?;
        }
        start.settle_keys()?;
        Ok(Some(start))
    }

    /// Gives the directory the key ring with which its store must be opened.
    fn settle_keys(&self) -> Result<(), Exit> {
        let Some(keys) = &self.keys else {
            return Ok(());
        };
        let bucket = &self.remote.bucket;
        let ring = self.remote.runtime.block_on(read_key_ring(bucket));
        let Some(ring) = ring.map_err(|error| exit(&error.into()))? else {
            return Ok(());
        };
        let has_store = self.directory.join(STORE_MARK).exists();
        let settled = keys.settle(bucket.place(), &ring, has_store);
        settled.map_err(|why| Exit::new(Exit::CONFIG, why))
    }

    /// Takes the store over, and fetches it into the empty directory, which may keep content already. `is_copied`: it keeps all
    /// content, and has read the rows before.
    fn fetch(&mut self, config: &Config, is_copied: bool) -> Result<(), Exit> {
        let (bucket, runtime) = (&self.remote.bucket, &self.remote.runtime);
        let place = bucket.place();
        let unfetched = |error: FetchError| Exit::new(fetch_code(&error), error.to_string());
        // A fetch that is refused must not end an owner that serves. A copy shows that the fetch will succeed, and each look
        // at the rows takes time that clients wait for.
        if !is_copied {
            let seen = Fetch::begin_with_kept(&self.remote, config, &self.directory, None);
            let mut seen = seen.map_err(unfetched)?;
            seen.may_restore(&self.directory).map_err(unfetched)?;
            let missing_bytes = seen.make_room(&self.directory).map_err(unfetched)?;
            host::check_fetch(config, &self.directory, missing_bytes)?;
        }
        keys::check(&self.remote, config, self.keys.as_ref())?;
        let fenced = runtime.block_on(ReplicaOwner::fence(bucket, &self.claim));
        let fenced = fenced.map_err(|error| {
            let is_lost = config.stand_by && is_lost(&error);
            exit(&error).or_again(is_lost)
        })?;
        let term = fenced.term();
        self.took_over(fenced.before());
        tracing::info!(
            place,
            term,
            "fetching the store from the bucket; no other node owns it any more"
        );
        let ring = self.take_keys(&fenced)?;
        let tail = Some(fenced.tail());
        let fetch = Fetch::begin_with_kept(&self.remote, config, &self.directory, tail);
        let mut fetch = fetch.map_err(unfetched)?;
        let store_id = fetch.store_id();
        let kept_term = KeptTerm { store_id, term };
        let mut repeats = |error: &FetchError| {
            tracing::warn!(place, %error, "the replica changed while it was fetched; fetching it again");
        };
        let restored = fetch
            .restore(
                &self.directory,
                RestoredAs::Store,
                // A directory with the store has its keys and its term, whenever the process ends.
                &mut |disk| {
                    if let Some(ring) = &ring {
                        shared::put(disk, ring, true)?;
                    }
                    let written = kept_term.write(disk);
                    written.map_err(|error| io::Error::new(error.kind(), format!("TERM: {error}")))
                },
                &mut |_| {},
                &mut repeats,
            )
            .map_err(unfetched)?;
        tracing::info!(
            files = restored.files,
            bytes = restored.bytes,
            records = restored.report.records,
            position = restored.position.get(),
            "the directory has the store of the bucket"
        );
        let put = match &ring {
            Some(ring) => RealDisk::open(&self.directory)
                .map_err(std::io::Error::other)
                .and_then(|disk| shared::put(&*disk, ring, false)),
            None => Ok(()),
        };
        put.map_err(|error| Exit::new(Exit::IO, format!("writing the key ring: {error}")))?;
        let kept = RealDisk::open(&self.directory).map_err(|error| unfetched(error.into()))?;
        remove_kept_content(&*kept).map_err(|error| unfetched(error.into()))?;
        self.fenced = Some(fenced);
        Ok(())
    }

    /// Takes the key ring of a fenced store over, so that the owner before writes it no more. `None`: the bucket has none.
    fn take_keys(&self, fenced: &FencedStore) -> Result<Option<Bytes>, Exit> {
        let Some(keys) = &self.keys else {
            return Ok(None);
        };
        let (bucket, term) = (&self.remote.bucket, fenced.term());
        let next = |found: &[u8]| {
            let next = keys.next_owner(found, term);
            next.map(Bytes::from)
        };
        let taken = (self.remote.runtime).block_on(fenced.take_keys(bucket, &next));
        taken.map_err(|error| exit(&error.into()))
    }

    /// Reports the owner before, if the operator took the store from it.
    fn took_over(&self, before: Option<&OwnerRecord>) {
        if let Some(before) = before {
            self.metrics.took_over();
            tracing::warn!(
                place = self.remote.bucket.place(),
                owner = before.node,
                endpoint = before.endpoint,
                term = before.term,
                "this node has taken the store over; the node that owned it stores nothing any more"
            );
        }
    }

    /// Becomes the owner of the store, and ships everything that is durable.
    ///
    /// # Errors
    /// If another node owns the store, if the directory is not its newest one, or if the bucket fails.
    pub(crate) fn begin(mut self, engine: &Arc<LocalEngine>) -> Result<RunningReplica, Exit> {
        let store_id = engine.profile().store_id;
        self.claim.kept_term = match term::kept(&self.directory, store_id) {
            Ok(kept) => kept,
            Err(unusable) => {
                let _ = block_on(engine.drain());
                return Err(unusable);
            }
        };
        let directory = self.directory.clone();
        let parts = ReplicaParts {
            source: Arc::clone(engine) as Arc<dyn ShipSource>,
            bucket: self.remote.bucket.clone(),
            settings: self.settings,
            // An owner counts on its manifest even if nobody signed it: it compares nothing of it with its own files.
            format: Arc::new(ProtoManifests {
                signing_key: self.signing_key.take().map(Arc::new),
                trusted: TrustedKeys::default(),
            }),
            observer: Arc::new(Events::new(
                &self.remote.bucket,
                Arc::clone(&self.metrics),
                Arc::clone(&self.cluster),
            )),
            keys: (self.keys.clone()).map(|ring| Arc::new(OwnedKeys { ring }) as _),
            claim: self.claim.clone(),
            membership: self.membership.clone(),
            keep_term: Arc::new(move |term| term::keep(&directory, store_id, term)),
        };
        let runtime = &self.remote.runtime;
        let has_fenced = self.fenced.is_some();
        let begins = ReplicaOwner::begin(parts, self.fenced.take());
        let owner = match runtime.block_on(begins) {
            Ok(owner) => owner,
            Err(error) => {
                // The next start is then a clean one.
                let _ = block_on(engine.drain());
                let is_lost = self.membership.is_some() && is_lost(&error);
                return Err(exit(&error).or_again(is_lost));
            }
        };
        if !has_fenced {
            self.took_over(owner.before());
        }
        self.cluster.note_role(v1::ReplicaRole::Owner);
        if let Some(decided) = self.decided {
            self.metrics.takeover_took(decided.elapsed());
        }
        self.cluster.note(owner.record(), None);
        self.watch(engine);
        let (stop, stopped) = watch::channel(false);
        let (ends, announced) = watch::channel(false);
        let runtime = &self.remote.runtime;
        Ok(RunningReplica {
            place: self.remote.bucket.place().to_owned(),
            node: self.claim.node,
            stop,
            ends,
            cluster: self.cluster,
            runs: runtime.spawn(owner.run(stopped, announced)),
            end: None,
            membership: self.membership,
            metrics: self.metrics,
            remote: self.remote,
        })
    }
}

/// Time for the announcement of an end to reach the stand-bys: through the bucket, and at their next look.
const NOTICE: Duration = standby::LOOK_PAUSE.saturating_add(Duration::from_millis(250));
/// Maximum time of the question whether another process has the name of this one.
const DOUBLED_TIME: Duration = Duration::from_secs(5);
/// Pause between two samples of the lag.
const SAMPLE_PAUSE: Duration = Duration::from_secs(1);

impl RunningReplica {
    /// Reads the file of credentials again, if there is one.
    pub(crate) fn reload(&self) {
        let place = &*self.place;
        match self.remote.bucket.renew_credentials() {
            Ok(true) => tracing::info!(place, "the credentials of the bucket were read again"),
            Ok(false) => {}
            Err(error) => tracing::error!(
                %error,
                "the credentials of the bucket were not read again; the earlier ones stay"
            ),
        }
    }

    /// Resolves with the end of this daemon when another node owns the store. A failure of the journal is not reported
    /// here. A call that is dropped loses nothing: the next one goes on.
    pub(crate) async fn moved(&mut self) -> Exit {
        let end = match self.end.take() {
            Some(end) => end,
            None => {
                let end = (&mut self.runs).await;
                if let Ok(ShipEnd::Fenced { .. }) = end {
                    self.metrics.fenced();
                }
                end
            }
        };
        match self.end.insert(end) {
            Ok(ShipEnd::Fenced { owner }) => {
                let is_one_of_several = self.membership.is_some();
                let exit = fenced(&self.place, owner.as_ref()).or_again(is_one_of_several);
                self.doubled().await.unwrap_or(exit)
            }
            Ok(_) => pending().await,
            Err(error) => {
                let text = format!("the shipper of the replica failed: {error}");
                Exit::new(Exit::SYSTEM, text)
            }
        }
    }

    /// The end, if another process has the name of this one among the nodes.
    async fn doubled(&self) -> Option<Exit> {
        let membership = Arc::clone(self.membership.as_ref()?);
        let (node, place) = (self.node.clone(), self.place.clone());
        let asks = async move { doubled::doubled(&membership, &node, &place).await };
        // A bucket that gives no answer must not keep this node from standing by.
        let answer = timeout(DOUBLED_TIME, self.remote.runtime.spawn(asks)).await;
        answer.ok()?.ok()?
    }

    /// Announces the end to the stand-bys, which look often from then on, so that calls find an owner again soon. Waits for `delay`, and
    /// at least until they have noticed. The owner must go on serving meanwhile.
    ///
    /// # Errors
    /// The end of this daemon, as soon as another node owns the store.
    pub(crate) async fn announce_end(&mut self, delay: Duration) -> Result<(), Exit> {
        let (cluster, ends) = (Arc::clone(&self.cluster), self.ends.clone());
        let announces = async move {
            // At last: looks cost requests.
            tokio::time::sleep(delay.saturating_sub(NOTICE)).await;
            let rest = match cluster.stand_bys() {
                0 => delay.min(NOTICE),
                _ => {
                    let _ = ends.send(true);
                    NOTICE
                }
            };
            tokio::time::sleep(rest).await;
        };
        tokio::select! {
            () = announces => Ok(()),
            // Somebody wants this process to end, so it does not begin again.
            exit = self.moved() => Err(exit.or_again(false)),
        }
    }

    /// Ships the rest and releases the store, until a time at most. The engine must have drained, or have failed to.
    ///
    /// # Errors
    /// If another node owns the store.
    pub(crate) async fn finish(mut self, until: Instant) -> Result<(), Exit> {
        let _ = self.stop.send(true);
        let end = match self.end.take() {
            None => timeout_at(until, &mut self.runs).await,
            Some(end @ Ok(ShipEnd::Fenced { .. })) => Ok(end),
            // The journal had failed, which the engine reports.
            Some(_) => return Ok(()),
        };
        match end {
            Ok(Ok(ShipEnd::Shipped)) => {
                tracing::info!(place = self.place, "the bucket has everything");
                if let Some(membership) = self.membership.take().and_then(Arc::into_inner) {
                    standby::leave(membership, until).await;
                }
                Ok(())
            }
            Ok(Ok(ShipEnd::Fenced { owner })) => Err(fenced(&self.place, owner.as_ref())),
            Ok(Ok(ShipEnd::Stopped(_) | ShipEnd::Journal) | Err(_)) | Err(_) => {
                tracing::warn!(
                    place = self.place,
                    "the bucket did not take the rest of the journal within shutdown_timeout; the next start ships it, so \
                     keep the data directory"
                );
                Ok(())
            }
        }
    }
}

/// The bucket that the settings name.
fn remote(config: &Config, metrics: &Arc<ReplicaMetrics>) -> Result<Remote, Exit> {
    let wrong = |text: String| Exit::new(Exit::CONFIG, format!("bucket_url: {text}"));
    let url: BucketUrl = config
        .bucket_url
        .parse()
        .map_err(|bad: wald_bucket::BadUrl| wrong(bad.to_string()))?;
    let opened = bucket::open(&url, config, Arc::new(Requests(Arc::clone(metrics))));
    let runtime = BucketRuntime::start()
        .map_err(|error| Exit::new(Exit::SYSTEM, format!("cannot start a thread: {error}")))?;
    Ok(Remote {
        bucket: opened
            .map_err(|error| Exit::new(bucket::exit_code(error.kind()), error.to_string()))?,
        runtime,
        trusted: TrustedKeys::of(config).map_err(|fault| unusable(&fault))?,
    })
}

/// Whether the bucket has the store of an empty directory, which takes it over.
///
/// # Errors
/// If directory and bucket do not fit each other.
fn has_store(remote: &Remote, directory: &Path, claim: &OwnerClaim) -> Result<bool, Exit> {
    let (bucket, runtime) = (&remote.bucket, &remote.runtime);
    let found = runtime.block_on(ReplicaCopy::store_of(bucket));
    let found = found.map_err(|error| exit(&error.into()))?;
    let (place, directory) = (bucket.place(), directory.display());
    let refused = match (found, claim.take_over) {
        (None, None) => return Ok(false),
        (Some(_), Some(TakeOver::Any)) => return Ok(true),
        (None, Some(_)) => format!(
            "{place} has no replica that {directory} could take over; start without --take-over to make a new store"
        ),
        (Some(_), named) => {
            let owner = runtime.block_on(OwnerRecord::read(bucket));
            let owner = owner.map_err(|error| exit(&error.into()))?;
            let owner = owner.map(|record| record.value);
            if owner.as_ref().is_some_and(|owner| claim.names(owner)) {
                return Ok(true);
            }
            let (owner, word) = match owner {
                None => ("no node owns".to_owned(), "--take-over".to_owned()),
                Some(owner) => {
                    let owns = match owner.state {
                        OwnerState::Released => "has left",
                        OwnerState::Opening | OwnerState::Serving => "owns",
                    };
                    let (node, endpoint, term) = (owner.node, owner.endpoint, owner.term);
                    (
                        format!("the node {node:?} ({endpoint}) {owns} in term {term}"),
                        format!("--take-over={term}"),
                    )
                }
            };
            let other = match named {
                Some(TakeOver::Term(term)) => format!(" (--take-over names the term {term})"),
                _ => String::new(),
            };
            format!(
                "{place} has the replica of a store, which {owner}{other}, and {directory} has none; if that node is gone \
                 for good, start with {word} to continue the store here; `wald restore {place} --data-dir DIR` makes a copy"
            )
        }
    };
    Err(Exit::new(Exit::CONFIG, refused))
}

/// Makes sure that the bucket has atomic conditional writes and keeps metadata.
async fn probe_all(bucket: &Bucket) -> Result<(), Exit> {
    let failed = |error: wald_bucket::BucketError| {
        Exit::new(bucket::exit_code(error.kind()), error.to_string())
    };
    let found = OwnerRecord::read(bucket).await.map_err(failed)?;
    let rounds = match found {
        None => NEW_ENDPOINT_ROUNDS,
        Some(_) => ROUNDS,
    };
    probe(bucket, rounds).await.map_err(|error| match error {
        ProbeError::Refused { .. } => Exit::new(Exit::CONFIG, error.to_string()),
        ProbeError::Store(error) => failed(error),
    })?;
    let kept = probe_metadata(bucket).await;
    kept.map_err(|error| exit(&OwnerError::from(error)))
}

/// The name of this node.
fn node_name(config: &Config) -> Result<String, Exit> {
    if !config.node_id.is_empty() {
        return Ok(config.node_id.clone());
    }
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    match name.as_deref().map(str::trim) {
        Ok(name) if crate::config::is_node_name(name) && !name.is_empty() => Ok(name.to_owned()),
        _ => Err(Exit::new(
            Exit::CONFIG,
            "this machine has no host name that can name a node in the bucket; set node_id",
        )),
    }
}

/// The address of this node for clients.
fn endpoint(config: &Config, node: &str, address: SocketAddr) -> String {
    match (&*config.advertise, address.ip().is_unspecified()) {
        ("", true) => format!("{node}:{}", address.port()),
        ("", false) => address.to_string(),
        (advertised, _) => advertised.to_owned(),
    }
}

/// The end of a daemon whose store another node owns.
fn fenced(place: &str, owner: Option<&OwnerRecord>) -> Exit {
    let owner = match owner {
        Some(owner) => format!(
            "the node {:?} ({}) owns the store in term {}",
            owner.node, owner.endpoint, owner.term
        ),
        None => "another node owns the store".to_owned(),
    };
    Exit::new(
        Exit::CONFIG,
        format!(
            "{place}: {owner}; this node has ended, and its data directory may hold records that were never REPLICATED"
        ),
    )
}

/// Whether another node owns the store, or was faster.
fn is_lost(error: &OwnerError) -> bool {
    matches!(
        error,
        OwnerError::Owned { .. } | OwnerError::Superseded { .. } | OwnerError::Contended { .. }
    )
}

/// The end of a start that could not become the owner.
fn exit(error: &OwnerError) -> Exit {
    let code = match error {
        OwnerError::Owned { .. } | OwnerError::Superseded { .. } | OwnerError::Contended { .. } => {
            Exit::CONFIG
        }
        OwnerError::Kept(_) => Exit::IO,
        OwnerError::Ship(error) => ship_code(error),
    };
    Exit::new(code, error.to_string())
}

fn ship_code(error: &ShipError) -> u8 {
    match error {
        ShipError::OtherStore { .. } | ShipError::Diverged { .. } | ShipError::Keys { .. } => {
            Exit::CONFIG
        }
        ShipError::Manifest { .. } | ShipError::Incomplete { .. } => Exit::BAD_DATA,
        ShipError::Backup(_) | ShipError::Journal(_) => Exit::IO,
        ShipError::Bucket(error) => bucket::exit_code(error.kind()),
        ShipError::Tail(error) => match error.kind() {
            TailErrorKind::Refused | TailErrorKind::Fenced => Exit::CONFIG,
            TailErrorKind::Unreachable | TailErrorKind::Changed | TailErrorKind::Stopped => {
                Exit::UNAVAILABLE
            }
            TailErrorKind::Damaged => Exit::BAD_DATA,
        },
    }
}

fn fetch_code(error: &FetchError) -> u8 {
    match error {
        FetchError::Ship(error) => ship_code(error),
        FetchError::Restore(RestoreError::NotEmpty { .. }) => Exit::CONFIG,
        FetchError::Empty { .. }
        | FetchError::Outside { .. }
        | FetchError::OnlyRows { .. }
        | FetchError::InRows { .. } => Exit::BAD_DATA,
        error if error.is_damage() => Exit::BAD_DATA,
        FetchError::Restore(_) | FetchError::Open(_) => Exit::IO,
    }
}
