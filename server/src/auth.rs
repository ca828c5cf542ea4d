//! Identities of callers, and their rights.
//!
//! ```text
//! auth_file ──every 10 s, SIGHUP──▶ thread wald-reload: changed? ─▶ checked (file.rs) ─▶ Rules in force
//!
//! head of a call: certificate, `authorization` ─▶ Authority::identify ─▶ Caller ─┐ UNAUTHENTICATED
//! its message:    names of logs ─▶ Caller::allow ─▶ Permitted<request> ──▶ Engine  │ NOT_ALLOWED
//! its stream:     Lease: judged again with each new file, and when the credential expires
//! ```
//!
//! Rule: RPCs and console reach the engine through [`Engine`] alone. It takes [`Permitted`] requests, which only a
//! [`Caller`] makes, so no path to the logs leads around the check. The table in `methods.rs` says which right a
//! method needs. The check comes before the lookup: the answer to a log of others is that to a log that does not
//! exist.
//!
//! Without `auth_file` every caller may do everything.
//!
//! | file | purpose |
//! |---|---|
//! | `file.rs` | reads and checks the text of `auth_file` |
//! | `rules.rs` | its contents in force |
//! | `limits.rs`, `tenant.rs` | limits of a tenant, and its use of them |
//! | `quotas.rs` | those limits that the engine enforces |
//! | `right.rs` | rights and scopes |
//! | `token.rs`, `names.rs`, `jwt.rs` | the three kinds of credentials |
//! | `issuer.rs`, `jwks.rs` | issuers of JWTs, and their keys |
//! | `key_files.rs`, `key_fetch.rs` | the sources of keys: files, and URLs |
//! | `last.rs` | the caller of the last call of a connection |
//! | `permitted.rs` | checks the logs that a request names |
//! | `engine.rs` | the engine behind the check |
//! | `sessions.rs` | logins at the console |
//! | `lease.rs` | ends streams whose right has ended |
//! | `commands.rs` | `wald token` |

mod commands;
mod engine;
mod file;
mod issuer;
mod jwks;
mod jwt;
mod key_fetch;
mod key_files;
mod last;
mod lease;
mod limits;
mod names;
mod permitted;
mod quotas;
mod right;
mod rules;
mod sessions;
mod tenant;
mod token;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use tokio::sync::watch;
use tonic::Status;
use wald_proto::v1::Reason;
use wald_storage::{Clock as _, SystemClock, Timestamp};

use crate::audit::{AuditLog, CallFacts, ShownCredential, Trail};
use crate::config::Config;
use crate::methods::{self, Class, Need, Rpc};
use crate::metrics::{AuthFailure, AuthMetrics, Metrics};
use crate::offline::escaped;
use crate::reload::{Fault, FileKind, Reload, ReloadedFiles, Reloader, Secrecy, digest, read_file};
use crate::status;
pub(crate) use commands::{command, run};
pub(crate) use engine::Engine;
use file::{CheckedFile, Earlier};
use issuer::{KeySource, parse_keys, read_keys};
use jwks::KeySet;
pub(crate) use jwt::VerifiedJwt;
use jwt::{PresentedJwt, SignatureFault};
pub(crate) use key_fetch::{KeyFetcher, KeyRequests};
use key_files::KeyFiles;
pub(crate) use last::LastCaller;
pub(crate) use lease::{HeldRight, Lease, leased};
pub(crate) use limits::TenantLimits;
pub(crate) use names::CertNames;
pub(crate) use permitted::Permitted;
pub(crate) use quotas::{keep as keep_quotas, rows as quota_rows};
pub(crate) use right::{LogRight, Right, Scope, ServerRight};
use rules::{FileRules, Principal, Rules, TokenFault};
pub(crate) use sessions::{CookieSession, SESSION_LIFE, Sessions};
pub(crate) use tenant::{Amount, ConnectionTenants, CountedUse, OverRate, TenantUsage};
use token::PresentedToken;
pub(crate) use token::TokenId;

/// Maximum size of `auth_file`, bytes.
const FILE_BYTES: u64 = 4 << 20;

/// Knows the callers.
#[derive(Clone)]
pub(crate) enum Authority {
    /// No `auth_file`: every caller may do everything.
    Open,
    /// The rules of a file.
    File(Arc<FileAuthority>),
}

/// The rules in force, and all that judges by them.
pub(crate) struct FileAuthority {
    rules: watch::Receiver<Arc<Rules>>,
    clock: ExpiryClock,
    metrics: AuthMetrics,
    keys: Arc<KeyRequests>,
}

/// The system's clock, without its jumps back: a credential that has expired stays so.
#[derive(Debug, Default)]
struct ExpiryClock(AtomicI64);

impl ExpiryClock {
    fn now(&self) -> Timestamp {
        let now = SystemClock.now().micros();
        Timestamp::from_micros(self.0.fetch_max(now, Ordering::Relaxed).max(now))
    }
}

/// The credentials of one call.
#[derive(Clone)]
struct SentCredentials {
    token: Option<SentToken>,
    names: Option<Arc<CertNames>>,
}

/// A token that a caller sent.
#[derive(Clone)]
enum SentToken {
    Wald(PresentedToken),
    Jwt(Arc<VerifiedJwt>),
}

impl SentCredentials {
    /// The credential without its secret.
    fn shown(&self) -> ShownCredential {
        match (&self.token, &self.names) {
            (Some(SentToken::Wald(token)), _) => ShownCredential::Token(token.id),
            (Some(SentToken::Jwt(jwt)), _) => ShownCredential::Jwt(Arc::clone(jwt)),
            (None, Some(_)) => ShownCredential::Certificate,
            (None, None) => ShownCredential::None,
        }
    }
}

/// A principal that a call has shown to be its caller.
pub(crate) struct Identity {
    authority: Arc<FileAuthority>,
    principal: Arc<Principal>,
    /// The credential that counted.
    credential: ShownCredential,
    expires: Option<Timestamp>,
    sent: SentCredentials,
    generation: u64,
}

impl Identity {
    pub(crate) fn principal(&self) -> &Principal {
        &self.principal
    }

    pub(crate) fn credential(&self) -> &ShownCredential {
        &self.credential
    }

    /// Time at which the credential expires.
    pub(crate) fn expires(&self) -> Option<Timestamp> {
        self.expires
    }

    /// Whether the credential has not expired, and the rules have not changed, since they were judged.
    fn is_current(&self) -> bool {
        let is_expired = (self.expires).is_some_and(|at| at <= self.authority.clock.now());
        !is_expired && self.authority.rules.borrow().generation == self.generation
    }
}

/// The reason why a person is not logged in.
pub(crate) enum LoginRefusal {
    /// There is no `auth_file`.
    NotNeeded,
    /// Too many logins of the address have failed.
    Wait,
    /// The token does not count, or its principal lacks the right.
    Refused(Status),
}

/// The reason why a call has no principal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unknown {
    NoCredential,
    Bad,
    /// The token is right, and the certificate beside it is not of its principal.
    Mismatch,
    Expired(Timestamp),
    /// No keys of the issuer are in force. The credential may be right.
    NoKeys,
}

impl Unknown {
    fn failure(self) -> AuthFailure {
        match self {
            Self::NoCredential => AuthFailure::NoCredential,
            Self::Bad | Self::Mismatch => AuthFailure::Bad,
            Self::Expired(_) => AuthFailure::Expired,
            Self::NoKeys => AuthFailure::NoKeys,
        }
    }

    /// The reason as clients get it.
    fn reason(self) -> &'static str {
        match self {
            Self::NoCredential => Reason::NoCredential.as_str(),
            Self::Bad | Self::Mismatch => Reason::BadCredential.as_str(),
            Self::Expired(_) => Reason::CredentialExpired.as_str(),
            Self::NoKeys => Reason::Starting.as_str(),
        }
    }

    fn status(self, rpc: Rpc) -> Status {
        match self {
            Self::NoCredential => status::no_credential(rpc.access),
            Self::Bad => status::bad_credential(rpc.access),
            Self::Mismatch => status::credentials_differ(rpc.access),
            Self::Expired(at) => status::credential_expired(&file::show_time(at), rpc.access),
            Self::NoKeys => status::no_keys(rpc.access),
        }
    }
}

impl Authority {
    /// The caller of a call, from its head and the names in the certificate of its connection. `trail`: the origin of
    /// the call, for the audit log.
    ///
    /// # Errors
    /// UNAUTHENTICATED, or NOT_ALLOWED if the method needs a right to operate the server that the caller lacks.
    pub(crate) fn identify(
        &self,
        headers: &HeaderMap,
        names: Option<&Arc<CertNames>>,
        rpc: Rpc,
        trail: Trail,
    ) -> Result<Caller, Status> {
        let find = |authority: &Arc<FileAuthority>| {
            let value = authorization(headers).map_err(RefusedCredential::before_credential)?;
            authority.find(value, names)
        };
        self.judge(find, rpc, trail)
    }

    /// The caller of a call, as [`Authority::identify`] finds it. `last`: the caller of the call before on this
    /// connection, whose names never change.
    ///
    /// # Errors
    /// As [`Authority::identify`].
    pub(crate) fn identify_next(
        &self,
        last: &mut LastCaller,
        headers: &HeaderMap,
        names: Option<&Arc<CertNames>>,
        rpc: Rpc,
        trail: Trail,
    ) -> Result<Caller, Status> {
        let find = |authority: &Arc<FileAuthority>| {
            let value = authorization(headers).map_err(RefusedCredential::before_credential)?;
            if let Some(identity) = last.find(value) {
                return Ok(identity);
            }
            let identity = authority.find(value, names)?;
            last.keep(value, &identity);
            Ok(identity)
        };
        self.judge(find, rpc, trail)
    }

    /// The caller of a request from a browser: from its head, or else from its session.
    ///
    /// # Errors
    /// UNAUTHENTICATED or NOT_ALLOWED, as [`Authority::identify`] would give.
    pub(crate) fn identify_person(
        &self,
        headers: &HeaderMap,
        names: Option<&Arc<CertNames>>,
        (sessions, cookie): (&Sessions, &str),
        rpc: Rpc,
        trail: Trail,
    ) -> Result<Caller, Status> {
        if !headers.contains_key(AUTHORIZATION)
            && let Some(sent) = sessions.find(headers, cookie)
        {
            // The certificate of this connection counts, not that of the login.
            let names = names.cloned();
            let sent = SentCredentials { names, ..sent };
            return self.judge(|authority| authority.identify(sent), rpc, trail);
        }
        self.identify(headers, names, rpc, trail)
    }

    /// Opens a session for a person with a token, and returns the value of its cookie.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub(crate) fn log_in(
        &self,
        token: &str,
        names: Option<Arc<CertNames>>,
        (address, trail): (IpAddr, Trail),
        sessions: &Sessions,
    ) -> Result<String, LoginRefusal> {
        if let Self::Open = self {
            return Err(LoginRefusal::NotNeeded);
        }
        let find = |authority: &Arc<FileAuthority>| {
            let token = authority.read_token(token.as_bytes());
            let token = Some(token.map_err(RefusedCredential::before_credential)?);
            authority.identify(SentCredentials { token, names })
        };
        let rpc = methods::of_http(ServerRight::Console);
        match self.judge(find, rpc, trail) {
            Ok(caller) => {
                let sent = caller.identity.as_ref().map(|known| known.sent.clone());
                let opened = sent.and_then(|sent| sessions.open(sent));
                let failed = || LoginRefusal::Refused(Status::internal("no random numbers"));
                opened.ok_or_else(failed)
            }
            // A right token is let in at once: others may share the address.
            Err(_) if sessions.has_to_wait(address) => Err(LoginRefusal::Wait),
            Err(status) => {
                sessions.failed(address);
                Err(LoginRefusal::Refused(status))
            }
        }
    }

    fn judge(
        &self,
        find: impl FnOnce(&Arc<FileAuthority>) -> Result<Arc<Identity>, RefusedCredential>,
        rpc: Rpc,
        mut trail: Trail,
    ) -> Result<Caller, Status> {
        let authority = match self {
            Self::File(authority) if rpc.need != Need::Nothing => authority,
            _ => {
                trail.begin(rpc, None);
                return Ok(Caller {
                    identity: None,
                    rpc,
                    trail,
                });
            }
        };
        let identity =
            find(authority).map_err(|refused| authority.refuse(&refused, rpc, &trail, None))?;
        trail.begin(rpc, Some(&identity));
        let caller = Caller {
            identity: Some(identity),
            rpc,
            trail,
        };
        if let Need::Server(right) = rpc.need {
            caller.check_server(right)?;
        }
        Ok(caller)
    }
}

/// A credential that does not count.
struct RefusedCredential {
    unknown: Unknown,
    shown: ShownCredential,
}

impl RefusedCredential {
    /// There is no credential, or none whose signature or form is right.
    fn before_credential(unknown: Unknown) -> Self {
        Self {
            unknown,
            shown: ShownCredential::None,
        }
    }
}

impl FileAuthority {
    /// The caller with these credentials: the value of `authorization`, and the names in the certificate.
    fn find(
        self: &Arc<Self>,
        authorization: Option<&HeaderValue>,
        names: Option<&Arc<CertNames>>,
    ) -> Result<Arc<Identity>, RefusedCredential> {
        let token = authorization.map(|value| self.read_token(bearer(value)?));
        let token = token
            .transpose()
            .map_err(RefusedCredential::before_credential)?;
        self.identify(SentCredentials {
            token,
            names: names.cloned(),
        })
    }

    /// Reads a token. The signature of a JWT is checked here, and only here.
    fn read_token(&self, text: &[u8]) -> Result<SentToken, Unknown> {
        if text.starts_with(token::START.as_bytes()) {
            let token = PresentedToken::parse(text).ok_or(Unknown::Bad)?;
            return Ok(SentToken::Wald(token));
        }
        let rules = Arc::clone(&self.rules.borrow());
        if rules.file.issuers.is_empty() {
            return Err(Unknown::Bad);
        }
        let presented = PresentedJwt::parse(text).ok_or(Unknown::Bad)?;
        let is_fetched = presented.has_fetched_keys(&rules);
        match presented.verify(&rules) {
            Ok(jwt) => Ok(SentToken::Jwt(Arc::new(jwt))),
            Err(SignatureFault::Bad) => Err(Unknown::Bad),
            Err(SignatureFault::NoKeys) => Err(Unknown::NoKeys),
            Err(SignatureFault::UnknownKey) => {
                // A file is read every 10 s, whatever callers send.
                if is_fetched {
                    self.keys.unknown_key();
                }
                Err(Unknown::Bad)
            }
        }
    }

    fn identify(
        self: &Arc<Self>,
        sent: SentCredentials,
    ) -> Result<Arc<Identity>, RefusedCredential> {
        let rules = Arc::clone(&self.rules.borrow());
        let credential = sent.shown();
        match self.principal_of(&sent, &rules) {
            Ok((principal, expires)) => Ok(Arc::new(Identity {
                authority: Arc::clone(self),
                principal: Arc::clone(principal),
                credential,
                expires,
                sent,
                generation: rules.generation,
            })),
            Err(unknown) => Err(RefusedCredential {
                unknown,
                shown: credential,
            }),
        }
    }

    /// The principal of the credentials, and the time at which they expire.
    fn principal_of<'r>(
        &self,
        sent: &SentCredentials,
        rules: &'r Rules,
    ) -> Result<(&'r Arc<Principal>, Option<Timestamp>), Unknown> {
        let of_certificate =
            (sent.names.as_deref()).and_then(|names| rules.file.of_certificate(names));
        let now = self.clock.now();
        let known = match &sent.token {
            None => {
                return of_certificate
                    .map(|known| (known, None))
                    .ok_or(Unknown::NoCredential);
            }
            Some(SentToken::Wald(token)) => {
                let known = rules.file.of_token(token, now);
                known.map(|known| (&known.principal, known.expires))
            }
            Some(SentToken::Jwt(jwt)) => jwt.judge(rules, now),
        };
        let (principal, expires) = known.map_err(|fault| match fault {
            TokenFault::Bad => Unknown::Bad,
            TokenFault::Expired(at) => Unknown::Expired(at),
            TokenFault::NoKeys => Unknown::NoKeys,
        })?;
        // With a certificate the token is worth nothing to a thief who has another certificate.
        let agrees = sent.names.is_none()
            || of_certificate.is_some_and(|other| other.is_proxy || Arc::ptr_eq(other, principal));
        match agrees {
            true => Ok((principal, Some(expires))),
            false => Err(Unknown::Mismatch),
        }
    }

    /// The answer to a call whose credential does not count. `identity`: the caller for whom it counted before.
    fn refuse(
        &self,
        refused: &RefusedCredential,
        rpc: Rpc,
        trail: &Trail,
        identity: Option<&Identity>,
    ) -> Status {
        let RefusedCredential { unknown, shown } = refused;
        self.metrics.failed(unknown.failure());
        trail.unauthenticated(rpc, shown, unknown.reason(), identity);
        unknown.status(rpc)
    }
}

/// The value of `authorization`. `None`: there is none.
fn authorization(headers: &HeaderMap) -> Result<Option<&HeaderValue>, Unknown> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let value = all.next();
    match all.next() {
        None => Ok(value),
        Some(_) => Err(Unknown::Bad),
    }
}

/// The token in a value of `authorization`.
fn bearer(value: &HeaderValue) -> Result<&[u8], Unknown> {
    let scheme = value.as_bytes().split_first_chunk::<7>();
    let token = scheme.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "));
    token.map(|(_, token)| token).ok_or(Unknown::Bad)
}

/// The caller of one call: its principal, and the rights that the method needs.
#[derive(Clone)]
pub(crate) struct Caller {
    /// `None`: without `auth_file`, or the method needs nothing.
    identity: Option<Arc<Identity>>,
    rpc: Rpc,
    trail: Trail,
}

impl Caller {
    /// A caller without an `auth_file`.
    #[cfg(test)]
    pub(crate) fn anyone() -> Self {
        Self {
            identity: None,
            rpc: crate::methods::of(wald_proto::Method::Scan),
            trail: Trail::default(),
        }
    }

    /// Its principal and credential. `None` without `auth_file`.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_deref()
    }

    /// The trail of the call, for the audit log.
    pub(crate) fn trail(&self) -> &Trail {
        &self.trail
    }

    /// Whether the call is a session of appends.
    pub(crate) fn is_session(&self) -> bool {
        self.rpc.class == Class::AppendSession
    }

    /// Adds facts to the line of the call in the audit log, if it gets one.
    pub(crate) fn note(&self, add: impl FnOnce(&mut CallFacts)) {
        self.trail.note(add);
    }

    /// Whether it has a right to operate the server.
    pub(crate) fn may_operate(&self, right: ServerRight) -> bool {
        (self.identity.as_ref())
            .is_none_or(|identity| identity.principal.server_rights.contains(&right))
    }

    /// Whether it has a right on the log of this name.
    pub(crate) fn may(&self, right: LogRight, log: &str) -> bool {
        self.identity.as_ref().is_none_or(|identity| {
            let mut scopes = identity.principal.scopes(right);
            scopes.any(|scope| scope.covers(log))
        })
    }

    /// Checks a right to operate the server.
    ///
    /// # Errors
    /// NOT_ALLOWED.
    pub(crate) fn check_server(&self, right: ServerRight) -> Result<(), Status> {
        match self.may_operate(right) {
            true => Ok(()),
            false => Err(self.denied(right.into(), None)),
        }
    }

    /// The answer to a request for which the caller lacks a right. `asked`: the field of the request, and its value.
    pub(crate) fn denied(&self, right: Right, asked: Option<(&str, &str)>) -> Status {
        let principal = match &self.identity {
            Some(identity) => {
                identity.authority.metrics.denied(right);
                self.trail.denied(identity, self.rpc, right, asked);
                identity.principal.name.as_str()
            }
            None => "nobody",
        };
        status::not_allowed(principal, right.name(), asked, self.rpc.access)
    }

    fn is_current(&self) -> bool {
        self.identity
            .as_ref()
            .is_none_or(|identity| identity.is_current())
    }

    /// The caller by the rules in force. The message of a request can come long after its head.
    ///
    /// # Errors
    /// UNAUTHENTICATED if the credential does not count any more.
    pub(crate) fn current(&self) -> Result<Cow<'_, Self>, Status> {
        if self.is_current() {
            return Ok(Cow::Borrowed(self));
        }
        let mut renewed = self.clone();
        renewed.renew()?;
        Ok(Cow::Owned(renewed))
    }

    /// Judges the credential again if it has expired, or the file has changed.
    ///
    /// # Errors
    /// UNAUTHENTICATED if it does not count any more.
    pub(crate) fn renew(&mut self) -> Result<(), Status> {
        let Some(identity) = self.identity.as_ref().filter(|_| !self.is_current()) else {
            return Ok(());
        };
        let authority = &identity.authority;
        match authority.identify(identity.sent.clone()) {
            Ok(identity) => {
                self.identity = Some(identity);
                Ok(())
            }
            Err(refused) => Err(authority.refuse(&refused, self.rpc, &self.trail, Some(identity))),
        }
    }
}

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

/// Checks the contents of the file alone: a command can also change a file whose keys are elsewhere.
fn check(path: &Path, contents: &[u8]) -> Result<(), Fault> {
    checked_alone(path, contents).map(|_| ())
}

/// Checks the contents and the files that they name, as a daemon does. Returns warnings.
fn check_all(path: &Path, contents: &[u8]) -> Result<Vec<String>, Fault> {
    let checked = checked_alone(path, contents)?;
    first_keys(&checked.rules, &Rules::default())?;
    Ok(checked.warnings)
}

/// Keys of issuers, by the claim `iss`.
type IssuerKeys = BTreeMap<String, Arc<KeySet>>;

/// Reads the files of issuers that have no keys of their source in force yet. Later `jwks_file` and `jwks_url` alone
/// change the keys: a fault of theirs must not keep the rest of `auth_file` from coming into force.
fn first_keys(file: &FileRules, in_force: &Rules) -> Result<IssuerKeys, Fault> {
    let mut first = IssuerKeys::new();
    for (iss, issuer) in &file.issuers {
        match &issuer.source {
            source if in_force.keys_from(iss, source).is_some() => {}
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
fn warn_of_left_out(issuer: &str, left_out: &[String]) {
    for why in left_out {
        tracing::warn!(issuer, "{}", escaped(why));
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Fault> {
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

    fn put_in_force(&mut self, contents: &Vec<u8>, _: &Vec<u8>) -> Result<(), Fault> {
        let in_force = Arc::clone(&self.rules.borrow());
        let earlier = Earlier {
            rules: &in_force.file,
            read_places: self.read_places,
        };
        let CheckedFile { rules, warnings } = checked(&self.path, contents, &earlier)?;
        let first = first_keys(&rules, &in_force)?;
        for warning in warnings {
            tracing::warn!(path = %self.path.display(), "auth_file: {warning}");
        }
        rules.limit_tenants();
        let file = Arc::new(rules);
        self.rules.send_modify(|in_force| {
            // A fetch may have changed them since then. Keys of an earlier source end here.
            let keys = file.issuers.iter().filter_map(|(iss, issuer)| {
                let kept = in_force.keys_from(iss, &issuer.source);
                let keys = kept.or_else(|| first.get(iss))?;
                Some((iss.clone(), Arc::clone(keys)))
            });
            *in_force = Arc::new(Rules {
                keys: keys.collect(),
                generation: in_force.generation + 1,
                file: Arc::clone(&file),
            });
        });
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
        let contents = read(path)?;
        let mut source = AuthSource {
            path: path.to_owned(),
            rules: watch::channel(Arc::new(Rules::default())).0,
            read_places: (config.reader_threads / 2).max(1),
        };
        source.put_in_force(&contents, &Vec::new())?;
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
