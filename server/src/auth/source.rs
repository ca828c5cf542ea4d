//! `auth_file` and the files that it names: read at the start, and again when they change.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

use super::file::{self, CheckedFile, Earlier};
use super::issuer::{KeySource, parse_keys, read_keys};
use super::jwks::KeySet;
use super::key_fetch::{self, KeyFetcher, KeyRequests};
use super::key_files::KeyFiles;
use super::rules::{FileRules, Rules};
use super::{Authority, ExpiryClock, FileAuthority};
use crate::audit::AuditLog;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::offline::escaped;
use crate::reload::{Fault, FileKind, Reload, ReloadedFiles, Reloader, Secrecy, digest, read_file};

/// Maximum size of `auth_file`, bytes.
const FILE_BYTES: u64 = 4 << 20;

/// The file, and the rules made of it.
pub(crate) struct AuthSource {
    path: PathBuf,
    rules: watch::Sender<Arc<Rules>>,
    /// Most reads of one tenant that are at work at the same time.
    read_places: usize,
}

/// Checks the contents of the file alone.
fn checked(path: &Path, contents: &[u8], earlier: &Earlier<'_>) -> Result<CheckedFile, Fault> {
    // A fault may repeat a name of the file, which an operator reads on a terminal.
    let fault = |why: String| Fault::new("auth_file", path, escaped(&why));
    let text = std::str::from_utf8(contents).map_err(|_| fault("it is not UTF-8".to_owned()))?;
    file::check(text, earlier).map_err(fault)
}

/// Checks the contents as a start would.
fn checked_alone(path: &Path, contents: &[u8]) -> Result<CheckedFile, Fault> {
    let earlier = Earlier {
        rules: &FileRules::default(),
        read_places: 1,
    };
    checked(path, contents, &earlier)
}

/// Checks the contents of the file alone: a command can also check or change a file whose keys are elsewhere. Returns
/// warnings.
pub(super) fn check(path: &Path, contents: &[u8]) -> Result<Vec<String>, Fault> {
    checked_alone(path, contents).map(|checked| checked.warnings)
}

/// Checks the contents and the files that they name, as a daemon does. Returns warnings.
pub(super) fn check_all(path: &Path, contents: &[u8]) -> Result<Vec<String>, Fault> {
    let checked = checked_alone(path, contents)?;
    first_keys(&checked.rules, &Rules::default())?;
    Ok(checked.warnings)
}

/// Keys of issuers, by the claim `iss`.
type IssuerKeys = BTreeMap<String, Arc<KeySet>>;

/// Reads the files of issuers whose source is new. Later `jwks_file` and `jwks_url` alone change the keys: a fault of
/// theirs must not keep the rest of `auth_file` from coming into force.
fn first_keys(file: &FileRules, in_force: &Rules) -> Result<IssuerKeys, Fault> {
    let mut first = IssuerKeys::new();
    for (iss, issuer) in &file.issuers {
        let earlier = in_force.file.issuers.get(iss);
        match &issuer.source {
            source if earlier.is_some_and(|earlier| earlier.source == *source) => {}
            KeySource::File(path) => {
                let parsed = parse_keys(path, &read_keys(path)?)?;
                warn_of_left_out(&issuer.name, &parsed.left_out);
                first.insert(iss.clone(), Arc::new(parsed.keys));
            }
            KeySource::Url(url) => key_fetch::https::check_files(url)?,
        }
    }
    Ok(first)
}

/// Reports keys of an issuer that are not used.
pub(super) fn warn_of_left_out(issuer: &str, left_out: &[String]) {
    for why in left_out {
        tracing::warn!(issuer, "{}", escaped(why));
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, Fault> {
    read_file("auth_file", path, FILE_BYTES, Secrecy::Secret)
}

impl ReloadedFiles for AuthSource {
    const KIND: FileKind = FileKind::Auth;
    type Contents = Vec<u8>;

    fn read(&self) -> Result<Vec<u8>, Fault> {
        read(&self.path)
    }

    fn digests(&self, contents: &Vec<u8>) -> Vec<(Cow<'static, str>, String)> {
        vec![("auth_file".into(), digest(contents))]
    }

    fn put_in_force(&mut self, contents: Vec<u8>, in_force: &mut Vec<u8>) -> Result<(), Fault> {
        let before = Arc::clone(&self.rules.borrow());
        let earlier = Earlier {
            rules: &before.file,
            read_places: self.read_places,
        };
        let CheckedFile { rules, warnings } = checked(&self.path, &contents, &earlier)?;
        if before.file.has_principals && !rules.has_principals {
            let why = "it has no [principal.NAME] any more, as a file that is half written; to lock the last principal out, \
                       keep its table and remove its credentials";
            return Err(Fault::new("auth_file", &self.path, why));
        }
        let first = first_keys(&rules, &before)?;
        for warning in warnings {
            tracing::warn!(path = %self.path.display(), "auth_file: {warning}");
        }
        rules.limit_tenants();
        let file = Arc::new(rules);
        self.rules.send_modify(|known| {
            // A fetch may have changed them since then. Keys of an earlier source end here.
            let keys = file.issuers.iter().filter_map(|(iss, issuer)| {
                let kept = known.keys_from(iss, &issuer.source);
                let keys = kept.or_else(|| first.get(iss))?;
                Some((iss.clone(), Arc::clone(keys)))
            });
            *known = Arc::new(Rules {
                keys: keys.collect(),
                generation: known.generation + 1,
                file: Arc::clone(&file),
            });
        });
        *in_force = contents;
        Ok(())
    }
}

/// Sources of the rules, which change while the daemon runs.
pub(crate) struct AuthSources {
    file: Reloader<AuthSource>,
    key_files: Reloader<KeyFiles>,
    key_urls: KeyFetcher,
    key_requests: Arc<KeyRequests>,
}

impl AuthSources {
    /// Records reloads from now on, and the files that are in force.
    pub(crate) fn record(&mut self, audit: &Arc<AuditLog>) {
        self.file.record(audit);
        self.key_files.record(audit);
        self.key_urls.record(audit);
    }

    /// Fetches keys from all URLs. Takes at most 5 s: without the keys the server starts, too.
    pub(crate) async fn fetch_keys(&mut self) {
        self.key_urls.fetch_due().await;
    }

    /// The files, the fetches, and the requests for a fetch.
    pub(crate) fn into_parts(self) -> ([Box<dyn Reload>; 2], KeyFetcher, Arc<KeyRequests>) {
        // New issuers come before the keys of all.
        let files = [
            Box::new(self.file) as Box<dyn Reload>,
            Box::new(self.key_files),
        ];
        (files, self.key_urls, self.key_requests)
    }
}

/// Reads and checks `auth_file`. Without that setting every caller may do everything.
///
/// # Errors
/// A sentence with the file and the fault.
pub(crate) fn start(
    config: &Config,
    metrics: &Metrics,
) -> Result<(Authority, Option<AuthSources>), String> {
    if config.auth_file.is_empty() {
        return Ok((Authority::Open, None));
    }
    let path = Path::new(&config.auth_file);
    let sentence = |fault: Fault| fault.to_string();
    let file = Reloader::start(&metrics.reloads, || {
        let mut source = AuthSource {
            path: path.to_owned(),
            rules: watch::channel(Arc::new(Rules::default())).0,
            read_places: (config.reader_threads / 2).max(1),
        };
        let mut contents = Vec::new();
        source.put_in_force(read(path)?, &mut contents)?;
        Ok((source, contents))
    });
    let file = file.map_err(sentence)?;
    let rules = file.files.rules.clone();
    let key_requests = Arc::new(KeyRequests::default());
    let watched = rules.subscribe();
    metrics.watch_tenants(move || watched.borrow().file.usages());
    let authority = FileAuthority {
        rules: rules.subscribe(),
        clock: ExpiryClock::default(),
        metrics: metrics.auth.clone(),
        keys: Arc::clone(&key_requests),
    };
    let sources = AuthSources {
        file,
        key_files: KeyFiles::start(rules.clone(), &metrics.reloads).map_err(sentence)?,
        key_urls: KeyFetcher::new(rules, Arc::clone(&key_requests), &metrics.reloads),
        key_requests,
    };
    Ok((Authority::File(Arc::new(authority)), Some(sources)))
}
