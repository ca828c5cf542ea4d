//! The contents of an `auth_file` that passed its check: tenants, principals, their credentials and their rights.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use wald_storage::Timestamp;

use super::issuer::{Issuer, KeySource};
use super::jwks::KeySet;
use super::limits::TenantLimits;
use super::names::CertNames;
use super::right::{LogRight, LogRights, Scope, ServerRight};
use super::tenant::TenantUsage;
use super::token::{PresentedToken, SecretDigest, TokenId};
use crate::admission::GroupShare;

/// A program or person with rights of its own.
#[derive(Debug)]
pub(crate) struct Principal {
    /// Its name in the file.
    pub(crate) name: String,
    /// The tenant that it belongs to. The principals of a tenant share one value.
    pub(crate) tenant: Option<Arc<Tenant>>,
    /// The share of its tenant in the memory of requests, or its own.
    pub(super) share: Arc<GroupShare>,
    /// Whether it may pass on the tokens of other principals.
    pub(super) is_proxy: bool,
    /// Its rights on logs.
    pub(crate) grants: Vec<Grant>,
    /// Its rights to operate the server.
    pub(crate) server_rights: Vec<ServerRight>,
}

/// Principals whose logs have a prefix of their own, and who share limits.
#[derive(Debug)]
pub(crate) struct Tenant {
    /// Its name in the file.
    pub(crate) name: String,
    /// The beginning of the names of all its logs. Ends with a slash, and is no beginning of another tenant's prefix.
    pub(crate) prefix: String,
    pub(crate) limits: TenantLimits,
    /// Stays when the file changes.
    pub(crate) usage: Arc<TenantUsage>,
}

/// Rights on the logs of a scope.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) rights: LogRights,
    pub(crate) scope: Scope,
}

impl Principal {
    /// Scopes on which it has the right.
    pub(crate) fn scopes(&self, right: LogRight) -> impl Iterator<Item = &Scope> + Clone {
        let grants = self.grants.iter();
        grants
            .filter(move |grant| grant.rights.contains(right))
            .map(|grant| &grant.scope)
    }
}

/// A token of the file.
pub(super) struct KnownToken {
    pub(super) digest: SecretDigest,
    pub(super) expires: Timestamp,
    pub(super) principal: Arc<Principal>,
}

/// Everything that decides about callers.
#[derive(Clone, Default)]
pub(crate) struct Rules {
    pub(super) file: Arc<FileRules>,
    /// Keys of issuers of JWTs, by the claim `iss`. There are none as long as they were not fetched.
    pub(super) keys: BTreeMap<String, Arc<KeySet>>,
    /// Rises with each change.
    pub(super) generation: u64,
}

impl Rules {
    /// The keys of an issuer, if they are from this source.
    pub(super) fn keys_from(&self, issuer: &str, source: &KeySource) -> Option<&Arc<KeySet>> {
        let keys = self.keys.get(issuer)?;
        (self.file.issuers.get(issuer)?.source == *source).then_some(keys)
    }

    /// Replaces the keys of an issuer, which its claim `iss` names, by the keys of the source. Returns whether they
    /// have changed.
    pub(super) fn set_keys(
        rules: &mut Arc<Self>,
        issuer: &str,
        source: &KeySource,
        keys: KeySet,
    ) -> bool {
        // The file may have changed while they were read: keys of an earlier source must not come back.
        let known = rules.file.issuers.get(issuer);
        let is_known = known.is_some_and(|issuer| issuer.source == *source);
        let is_same = match rules.keys.get(issuer) {
            Some(earlier) => **earlier == keys,
            None => keys == KeySet::default(),
        };
        if is_same || !is_known {
            return false;
        }
        let changed = Arc::make_mut(rules);
        changed.keys.insert(issuer.to_owned(), Arc::new(keys));
        changed.generation += 1;
        true
    }
}

/// Everything that the file says.
#[derive(Default)]
pub(crate) struct FileRules {
    /// Whether it has any.
    pub(super) has_principals: bool,
    pub(super) tokens: HashMap<TokenId, KnownToken>,
    /// By whole names.
    pub(super) certificates: HashMap<String, Arc<Principal>>,
    /// By URIs up to their last segment, with the slash.
    pub(super) certificate_segments: HashMap<String, Arc<Principal>>,
    /// By name.
    pub(super) tenants: BTreeMap<String, Arc<Tenant>>,
    /// Shares of the principals without a tenant, by their names.
    pub(super) shares: HashMap<String, Arc<GroupShare>>,
    /// Issuers of JWTs, by the claim `iss`.
    pub(super) issuers: HashMap<String, Issuer>,
}

/// The reason why a token does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenFault {
    /// Unknown, wrong or revoked.
    Bad,
    /// It was right until then.
    Expired(Timestamp),
    /// No keys of its issuer are in force.
    NoKeys,
}

impl FileRules {
    /// The contents of a good file.
    #[cfg(test)]
    pub(super) fn of(text: &str) -> Self {
        let earlier = super::file::Earlier {
            rules: &Self::default(),
            read_places: 1,
        };
        let checked = super::file::check(text, &earlier);
        checked.map(|checked| checked.rules).unwrap()
    }

    /// Puts the limits of the tenants in force.
    pub(super) fn limit_tenants(&self) {
        for tenant in self.tenants.values() {
            tenant.usage.limit(&tenant.limits);
        }
    }

    /// The use of each tenant, in the order of their names.
    pub(super) fn usages(&self) -> Vec<Arc<TenantUsage>> {
        let tenants = self.tenants.values();
        tenants.map(|tenant| Arc::clone(&tenant.usage)).collect()
    }

    /// The principal of a certificate: the first of its names that the file has, whole names before segments.
    pub(super) fn of_certificate(&self, names: &CertNames) -> Option<&Arc<Principal>> {
        let whole = names.iter().find_map(|name| self.certificates.get(name));
        whole.or_else(|| {
            names.iter().find_map(|name| {
                let (before, last) = name.rsplit_once('/')?;
                if last.is_empty() {
                    return None;
                }
                self.certificate_segments.get(&name[..=before.len()])
            })
        })
    }

    /// The token of the file that the caller has sent. Takes as long for an unknown id as for a wrong secret.
    pub(super) fn of_token(
        &self,
        sent: &PresentedToken,
        now: Timestamp,
    ) -> Result<&KnownToken, TokenFault> {
        let known = self.tokens.get(&sent.id);
        let digest = known.map_or(&SecretDigest::OF_NOBODY, |known| &known.digest);
        let matches = sent.digest.matches(digest);
        match known {
            Some(known) if matches && known.expires <= now => {
                Err(TokenFault::Expired(known.expires))
            }
            Some(known) if matches => Ok(known),
            _ => Err(TokenFault::Bad),
        }
    }
}
