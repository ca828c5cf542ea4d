//! Keys of issuers of JWTs behind URLs: one task fetches them, off the path of requests.
//!
//! ```text
//! every 5 minutes ──────────┐
//! token with unknown `kid` ─┼─▶ at most once a minute ─▶ https ─▶ parsed ─▶ Rules in force
//! SIGHUP ── at once ────────┘                               │ a fault: the earlier keys stay, for 24 hours
//! ```
//!
//! Rule: a request never waits for a fetch. Issuers publish a key before they sign with it, so the fetch every 5 minutes
//! has it in time. Callers cannot make the server fetch more often than once a minute, whatever tokens they send. They
//! wake the task at most once between two fetches.

pub(super) mod https;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::join_all;
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::issuer::{KeySource, KeyUrl};
use super::jwks::{KeySet, ParsedKeys};
use super::rules::Rules;
use super::source;
use crate::audit::AuditLog;
use crate::metrics::ReloadMetrics;
use crate::offline::escaped;
use crate::reload::{Fault, FileKind, digest};

/// Pause between two fetches without a reason.
const REFRESH: Duration = Duration::from_secs(300);
/// Least pause between two fetches from one issuer, unless the operator asks for one by SIGHUP.
const LEAST_PAUSE: Duration = Duration::from_secs(60);
/// Time that keys stay in force after the last fetch that succeeded.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Requests for a fetch.
#[derive(Default)]
pub(crate) struct KeyRequests {
    notify: Notify,
    at_once: AtomicBool,
    /// Whether the task knows of an unknown key since the last fetch.
    unknown_key: AtomicBool,
}

impl KeyRequests {
    /// A token names a key that its issuer does not have. The number of such tokens does not matter.
    pub(super) fn unknown_key(&self) {
        if !self.unknown_key.swap(true, Ordering::Relaxed) {
            self.notify.notify_one();
        }
    }

    /// Fetches from all issuers now.
    pub(crate) fn at_once(&self) {
        self.at_once.store(true, Ordering::Relaxed);
        self.notify.notify_one();
    }
}

/// Fetches keys.
pub(crate) struct KeyFetcher {
    rules: watch::Sender<Arc<Rules>>,
    requests: Arc<KeyRequests>,
    metrics: ReloadMetrics,
    /// `None`: there is no audit log.
    audit: Option<Arc<AuditLog>>,
    /// By the names of issuers.
    issuers: BTreeMap<String, FetchState>,
}

/// The fetches from one issuer.
struct FetchState {
    /// The claim `iss` of the issuer.
    issuer: String,
    source: KeyUrl,
    /// Time of the last fetch.
    attempted: Option<Instant>,
    /// Whether something asked for a fetch since then.
    wanted: bool,
    /// Whether it is for the operator.
    at_once: bool,
    /// Time until which the keys stay in force.
    kept_until: Instant,
    /// Fault of the last fetch, so that the log has each only once.
    fault: Option<Fault>,
}

impl FetchState {
    fn new(issuer: &str, source: &KeyUrl, now: Instant) -> Self {
        Self {
            issuer: issuer.to_owned(),
            source: source.clone(),
            attempted: None,
            wanted: false,
            at_once: false,
            kept_until: now + KEPT,
            fault: None,
        }
    }

    /// Time of the next fetch.
    fn due(&self, now: Instant) -> Instant {
        let pause = match self.wanted || self.fault.is_some() {
            true => LEAST_PAUSE,
            false => REFRESH,
        };
        match self.attempted {
            Some(attempted) if !self.at_once => attempted + pause,
            _ => now,
        }
    }

    fn begin(&mut self, now: Instant) {
        self.attempted = Some(now);
        self.wanted = false;
        self.at_once = false;
    }
}

impl KeyFetcher {
    pub(super) fn new(
        rules: watch::Sender<Arc<Rules>>,
        requests: Arc<KeyRequests>,
        metrics: &ReloadMetrics,
    ) -> Self {
        Self {
            rules,
            requests,
            metrics: metrics.clone(),
            audit: None,
            issuers: BTreeMap::new(),
        }
    }

    /// Records changed keys from now on.
    pub(super) fn record(&mut self, audit: &Arc<AuditLog>) {
        self.audit = Some(Arc::clone(audit));
    }

    /// Fetches keys for as long as the daemon runs.
    pub(crate) async fn run(mut self) {
        let mut rules = self.rules.subscribe();
        loop {
            rules.mark_unchanged();
            let next = self.fetch_due().await;
            tokio::select! {
                () = sleep_until(next) => {}
                () = self.requests.notify.notified() => self.requested(),
                // The sender is a field of this value.
                _ = rules.changed() => {}
            }
        }
    }

    fn requested(&mut self) {
        let at_once = self.requests.at_once.swap(false, Ordering::Relaxed);
        for state in self.issuers.values_mut() {
            state.wanted = true;
            state.at_once |= at_once;
        }
    }

    /// Fetches from all issuers whose time has come, at the same time. Returns the time of the next fetch.
    pub(crate) async fn fetch_due(&mut self) -> Instant {
        let now = Instant::now();
        self.take_issuers(now);
        let due = self
            .issuers
            .iter_mut()
            .filter(|(_, state)| state.due(now) <= now);
        let fetches = due.map(|(name, state)| {
            self.requests.unknown_key.store(false, Ordering::Relaxed);
            state.begin(now);
            let (name, source) = (name.clone(), state.source.clone());
            async move { (name, https::get(&source).await) }
        });
        let fetched = join_all(fetches).await;
        if !fetched.is_empty() {
            for (name, fetched) in fetched {
                self.fetched(&name, fetched);
            }
            if self.issuers.values().all(|state| state.fault.is_none()) {
                self.metrics.reloaded(FileKind::JwksUrl, SystemTime::now());
            }
        }
        let now = Instant::now();
        let times = self.issuers.values().map(|state| state.due(now));
        times.min().unwrap_or(now + REFRESH)
    }

    /// Takes over the issuers of the rules in force.
    fn take_issuers(&mut self, now: Instant) {
        let rules = Arc::clone(&self.rules.borrow());
        let issuers = rules.file.issuers.values();
        let named = issuers.filter_map(|issuer| match &issuer.source {
            KeySource::Url(source) => Some((&issuer.name, &issuer.issuer, source)),
            KeySource::File(_) => None,
        });
        let mut earlier = std::mem::take(&mut self.issuers);
        let had_issuers = !earlier.is_empty();
        for (name, issuer, source) in named {
            let state = earlier.remove(name);
            let state = state.filter(|state| state.source == *source && state.issuer == *issuer);
            let state = state.unwrap_or_else(|| FetchState::new(issuer, source, now));
            self.issuers.insert(name.clone(), state);
        }
        match (had_issuers, self.issuers.is_empty()) {
            (_, true) => self.metrics.absent(FileKind::JwksUrl),
            // The alert about old keys must also come if no fetch ever succeeds.
            (false, false) => self.metrics.reloaded(FileKind::JwksUrl, SystemTime::now()),
            (true, false) => {}
        }
    }

    /// Puts fetched keys in force, or reports the fault.
    fn fetched(&mut self, name: &str, fetched: Result<Bytes, String>) {
        let Some(state) = self.issuers.get_mut(name) else {
            return;
        };
        let audit = self.audit.as_ref();
        let source = KeySource::Url(state.source.clone());
        let parsed = fetched.and_then(|bytes| Ok((digest(&bytes), KeySet::parse(&bytes)?)));
        let now = Instant::now();
        match parsed {
            Ok((digest, ParsedKeys { keys, left_out })) => {
                state.kept_until = now + KEPT;
                let had_fault = state.fault.take().is_some();
                let set = |rules: &mut _| Rules::set_keys(rules, &state.issuer, &source, keys);
                let changed = self.rules.send_if_modified(set);
                if changed {
                    source::warn_of_left_out(name, &left_out);
                }
                if changed || had_fault {
                    tracing::info!(issuer = name, "{}", FileKind::JwksUrl.in_force());
                    record_fetch(audit, name, Some(&digest), Ok(()));
                }
            }
            Err(why) => {
                let url = state.source.url.to_string();
                let fault = Fault::new("jwks_url", Path::new(&url), escaped(&why));
                self.metrics.failed(FileKind::JwksUrl);
                let is_new = state.fault.as_ref() != Some(&fault);
                let is_over = state.kept_until <= now;
                state.fault = Some(fault.clone());
                if is_new {
                    tracing::error!(issuer = name, %fault, "{}", FileKind::JwksUrl.unusable());
                    record_fetch(audit, name, None, Err(&fault));
                }
                let none = |rules: &mut _| {
                    Rules::set_keys(rules, &state.issuer, &source, KeySet::default())
                };
                if is_over && self.rules.send_if_modified(none) {
                    tracing::error!(
                        issuer = name,
                        "no fetch has succeeded for 24 hours: the keys of the issuer are no longer in force, and all its \
                         tokens are refused"
                    );
                }
            }
        }
    }
}

fn record_fetch(
    audit: Option<&Arc<AuditLog>>,
    issuer: &str,
    digest: Option<&str>,
    result: Result<(), &dyn std::fmt::Display>,
) {
    if let Some(audit) = audit {
        let details = json!({
            "files": FileKind::JwksUrl.name(),
            "in_force": { format!("jwt.{issuer}.jwks_url"): digest },
        });
        audit.event("reload", details, result);
    }
}

#[cfg(test)]
mod tests;
