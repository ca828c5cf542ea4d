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
//! | `right.rs` | rights and scopes |
//! | `token.rs`, `names.rs` | the two kinds of credentials |
//! | `permitted.rs` | checks the logs that a request names |
//! | `engine.rs` | the engine behind the check |
//! | `sessions.rs` | logins at the console |
//! | `lease.rs` | ends streams whose right has ended |
//! | `commands.rs` | `wald token` |

mod commands;
mod engine;
mod file;
mod lease;
mod limits;
mod names;
mod permitted;
mod right;
mod rules;
mod sessions;
mod tenant;
mod token;

use std::borrow::Cow;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use http::HeaderMap;
use http::header::AUTHORIZATION;
use tokio::sync::watch;
use tonic::Status;
use wald_proto::v1::Reason;
use wald_storage::{Clock as _, SystemClock, Timestamp};

use crate::audit::{CallFacts, ShownCredential, Trail};
use crate::config::Config;
use crate::methods::{self, Class, Need, Rpc};
use crate::metrics::{AuthFailure, AuthMetrics, Metrics};
use crate::offline::escaped;
use crate::reload::{Fault, FileKind, ReloadedFiles, Reloader, Secrecy, digest, read_file};
use crate::status;
pub(crate) use commands::{command, run};
pub(crate) use engine::Engine;
use file::{CheckedFile, Earlier};
pub(crate) use lease::{HeldRight, Lease, leased};
pub(crate) use limits::TenantLimits;
pub(crate) use names::CertNames;
pub(crate) use permitted::Permitted;
pub(crate) use right::{LogRight, Right, Scope, ServerRight};
use rules::{Principal, Rules, TokenFault};
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
    token: Option<PresentedToken>,
    names: Option<Arc<CertNames>>,
}

impl SentCredentials {
    /// The credential without its secret.
    fn shown(&self) -> ShownCredential {
        match (&self.token, &self.names) {
            (Some(token), _) => ShownCredential::Token(token.id),
            (None, Some(_)) => ShownCredential::Certificate,
            (None, None) => ShownCredential::None,
        }
    }
}

/// The credential that counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Credential {
    Certificate,
    Token(TokenId),
}

/// A principal that a call has shown to be its caller.
pub(crate) struct Identity {
    authority: Arc<FileAuthority>,
    principal: Arc<Principal>,
    credential: Credential,
    expires: Option<Timestamp>,
    sent: SentCredentials,
    generation: u64,
}

impl Identity {
    pub(crate) fn principal(&self) -> &Principal {
        &self.principal
    }

    pub(crate) fn credential(&self) -> Credential {
        self.credential
    }

    /// The id of its token.
    pub(crate) fn token_id(&self) -> Option<&str> {
        match &self.credential {
            Credential::Certificate => None,
            Credential::Token(id) => Some(id.as_str()),
        }
    }

    /// Time at which the credential expires.
    pub(crate) fn expires(&self) -> Option<Timestamp> {
        self.expires
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
}

impl Unknown {
    fn failure(self) -> AuthFailure {
        match self {
            Self::NoCredential => AuthFailure::NoCredential,
            Self::Bad | Self::Mismatch => AuthFailure::Bad,
            Self::Expired(_) => AuthFailure::Expired,
        }
    }

    /// The reason as clients get it.
    fn reason(self) -> &'static str {
        match self {
            Self::NoCredential => Reason::NoCredential.as_str(),
            Self::Bad | Self::Mismatch => Reason::BadCredential.as_str(),
            Self::Expired(_) => Reason::CredentialExpired.as_str(),
        }
    }

    fn status(self, rpc: Rpc) -> Status {
        match self {
            Self::NoCredential => status::no_credential(rpc.access),
            Self::Bad => status::bad_credential(rpc.access),
            Self::Mismatch => status::credentials_differ(rpc.access),
            Self::Expired(at) => status::credential_expired(&file::show_time(at), rpc.access),
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
        let sent = || {
            let token = bearer(headers)?;
            let names = names.cloned();
            Ok(SentCredentials { token, names })
        };
        self.judge(sent, rpc, trail)
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
            return self.judge(|| Ok(SentCredentials { names, ..sent }), rpc, trail);
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
        let token = PresentedToken::parse(token.as_bytes()).ok_or(Unknown::Bad);
        let sent = token.map(|token| SentCredentials {
            token: Some(token),
            names,
        });
        let rpc = methods::of_http(ServerRight::Console);
        match self.judge(|| sent.clone(), rpc, trail) {
            Ok(_) => {
                let opened = sent.ok().and_then(|sent| sessions.open(sent));
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
        sent: impl FnOnce() -> Result<SentCredentials, Unknown>,
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
        let refuse = |unknown, sent| authority.refuse(unknown, rpc, &trail, sent, None);
        let sent = sent().map_err(|unknown| refuse(unknown, ShownCredential::None))?;
        let shown = sent.shown();
        let identity = authority.identify(sent);
        let identity = Arc::new(identity.map_err(|unknown| refuse(unknown, shown))?);
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

impl FileAuthority {
    fn identify(self: &Arc<Self>, sent: SentCredentials) -> Result<Identity, Unknown> {
        let rules = Arc::clone(&self.rules.borrow());
        let of_certificate = (sent.names.as_deref()).and_then(|names| rules.of_certificate(names));
        let (principal, credential, expires) = match &sent.token {
            None => {
                let principal = of_certificate.ok_or(Unknown::NoCredential)?;
                (principal, Credential::Certificate, None)
            }
            Some(token) => {
                let known =
                    rules
                        .of_token(token, self.clock.now())
                        .map_err(|fault| match fault {
                            TokenFault::Bad => Unknown::Bad,
                            TokenFault::Expired(at) => Unknown::Expired(at),
                        })?;
                let principal = &known.principal;
                // With a certificate the token is worth nothing to a thief who has another certificate.
                let agrees = sent.names.is_none()
                    || of_certificate
                        .is_some_and(|other| other.is_proxy || Arc::ptr_eq(other, principal));
                if !agrees {
                    return Err(Unknown::Mismatch);
                }
                (principal, Credential::Token(token.id), Some(known.expires))
            }
        };
        Ok(Identity {
            authority: Arc::clone(self),
            principal: Arc::clone(principal),
            credential,
            expires,
            sent,
            generation: rules.generation,
        })
    }

    /// The answer to a call whose credential does not count. `identity`: the caller for whom it counted before.
    fn refuse(
        &self,
        unknown: Unknown,
        rpc: Rpc,
        trail: &Trail,
        sent: ShownCredential,
        identity: Option<&Identity>,
    ) -> Status {
        self.metrics.failed(unknown.failure());
        trail.unauthenticated(rpc, sent, unknown.reason(), identity);
        unknown.status(rpc)
    }
}

/// The token of a call. `None`: it has none.
fn bearer(headers: &HeaderMap) -> Result<Option<PresentedToken>, Unknown> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = all.next() else {
        return Ok(None);
    };
    if all.next().is_some() {
        return Err(Unknown::Bad);
    }
    let value = value.as_bytes();
    let scheme = value.split_first_chunk::<7>();
    let token = scheme.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "));
    let token = token.and_then(|(_, token)| PresentedToken::parse(token));
    token.map(Some).ok_or(Unknown::Bad)
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

    /// Whether the credential has not expired, and the file has not changed, since they were judged.
    fn is_current(&self) -> bool {
        self.identity.as_ref().is_none_or(|identity| {
            let authority = &identity.authority;
            let is_expired = (identity.expires).is_some_and(|at| at <= authority.clock.now());
            !is_expired && authority.rules.borrow().generation == identity.generation
        })
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
                self.identity = Some(Arc::new(identity));
                Ok(())
            }
            Err(unknown) => {
                let sent = identity.sent.shown();
                Err(authority.refuse(unknown, self.rpc, &self.trail, sent, Some(identity)))
            }
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

/// Checks the contents.
fn checked(path: &Path, contents: &[u8], earlier: &Earlier<'_>) -> Result<CheckedFile, Fault> {
    // A fault may repeat a name of the file, which an operator reads on a terminal.
    let fault = |why: String| Fault::new("auth_file", path, escaped(&why));
    let text = std::str::from_utf8(contents).map_err(|_| fault("it is not UTF-8".to_owned()))?;
    file::check(text, earlier).map_err(fault)
}

/// Checks the contents, and returns warnings.
fn check(path: &Path, contents: &[u8]) -> Result<Vec<String>, Fault> {
    let earlier = Earlier {
        rules: &Rules::default(),
        read_places: 1,
    };
    checked(path, contents, &earlier).map(|checked| checked.warnings)
}

/// The rules of these contents, whose limits are in force. Warnings go to the log.
fn rules_of(path: &Path, contents: &[u8], earlier: &Earlier<'_>) -> Result<Arc<Rules>, Fault> {
    let checked = checked(path, contents, earlier)?;
    for warning in checked.warnings {
        tracing::warn!(path = %path.display(), "auth_file: {warning}");
    }
    checked.rules.limit_tenants();
    Ok(Arc::new(checked.rules))
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

    fn digests(&self, contents: &Vec<u8>) -> Vec<(&'static str, String)> {
        vec![("auth_file", digest(contents))]
    }

    fn put_in_force(&mut self, contents: &Vec<u8>, _: &Vec<u8>) -> Result<(), Fault> {
        let earlier = Arc::clone(&self.rules.borrow());
        let earlier = Earlier {
            rules: &earlier,
            read_places: self.read_places,
        };
        let rules = rules_of(&self.path, contents, &earlier)?;
        self.rules.send_replace(rules);
        Ok(())
    }
}

/// Reads and checks `auth_file`. Without that setting every caller may do everything.
///
/// # Errors
/// A sentence with the file and the fault.
pub(crate) fn start(
    config: &Config,
    metrics: &Metrics,
) -> Result<(Authority, Option<Reloader<AuthSource>>), String> {
    if config.auth_file.is_empty() {
        return Ok((Authority::Open, None));
    }
    let path = Path::new(&config.auth_file);
    let reloader = Reloader::start(&metrics.reloads, || {
        let contents = read(path)?;
        let earlier = Earlier {
            rules: &Rules::default(),
            read_places: (config.reader_threads / 2).max(1),
        };
        let source = AuthSource {
            path: path.to_owned(),
            rules: watch::channel(rules_of(path, &contents, &earlier)?).0,
            read_places: earlier.read_places,
        };
        Ok((source, contents))
    });
    let reloader = reloader.map_err(|fault| fault.to_string())?;
    let rules = reloader.files.rules.subscribe();
    metrics.watch_tenants(move || rules.borrow().usages());
    let authority = FileAuthority {
        rules: reloader.files.rules.subscribe(),
        clock: ExpiryClock::default(),
        metrics: metrics.auth.clone(),
    };
    Ok((Authority::File(Arc::new(authority)), Some(reloader)))
}
