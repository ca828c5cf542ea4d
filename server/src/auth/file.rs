//! Reads and checks the text of `auth_file`. Every sentence about a fault names its place, and none repeats a
//! credential: someone may have put a token where its digest belongs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use wald_storage::{Clock as _, SystemClock, Timestamp};

use super::issuer::{Issuer, IssuerTable};
use super::limits::TenantLimits;
use super::names::DNS;
use super::right::{LogRights, Right, Scope};
use super::rules::{FileRules, Grant, KnownToken, Principal, Tenant};
use super::tenant::TenantUsage;
use super::token::{self, SecretDigest, TokenId};
use crate::admission::GroupShare;

/// Maximum length of the name of a principal or a tenant, bytes.
const NAME_BYTES: usize = 100;
/// Maximum number of tenants.
const MOST_TENANTS: usize = 10_000;
/// Maximum number of tokens of one principal that have not expired: the one in use, and the next.
const LIVE_TOKENS: usize = 2;
/// Maximum number of issuers of JWTs. The daemon keeps up to 1 MiB of keys for each.
const MOST_ISSUERS: usize = 16;

/// First characters of a token of Wald, and of a JWT: `{"` in base64url.
pub(super) const TOKEN_STARTS: [&str; 2] = [token::START, "eyJ"];

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AuthFile {
    #[serde(default)]
    tenant: BTreeMap<String, TenantTable>,
    #[serde(default)]
    principal: BTreeMap<String, PrincipalTable>,
    #[serde(default)]
    jwt: BTreeMap<String, IssuerTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantTable {
    prefix: String,
    #[serde(default)]
    limits: BTreeMap<String, toml::Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrincipalTable {
    tenant: Option<String>,
    #[serde(default)]
    cert: Vec<String>,
    #[serde(default)]
    token: Vec<String>,
    #[serde(default)]
    jwt: Subjects,
    #[serde(default)]
    proxy: bool,
    #[serde(default)]
    allow: Vec<AllowTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowTable {
    r#do: Vec<String>,
    logs: Option<String>,
    log: Option<String>,
}

/// Identities in JWTs: `{ issuer = "NAME", sub = "SUBJECT" }`, or several of them.
#[derive(Default)]
struct Subjects(Vec<SubjectTable>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubjectTable {
    issuer: String,
    sub: String,
}

impl<'de> Deserialize<'de> for Subjects {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;
        // An untagged enum would name no field in its errors.
        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Subjects;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("{ issuer = NAME, sub = SUBJECT }, or a list of them")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Subjects, A::Error> {
                let one = SubjectTable::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Subjects(vec![one]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Subjects, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = seq.next_element()? {
                    all.push(one);
                }
                Ok(Subjects(all))
            }
        }
        input.deserialize_any(OneOrSeveral)
    }
}

/// A file that passed.
pub(super) struct CheckedFile {
    pub(super) rules: FileRules,
    /// Sentences about lines that are allowed and most likely wrong.
    pub(super) warnings: Vec<String>,
}

/// One entry of `token`: id, digest of the secret, expiry.
pub(super) struct TokenEntry {
    pub(super) id: TokenId,
    pub(super) digest: SecretDigest,
    pub(super) expires: Timestamp,
}

impl TokenEntry {
    /// Reads an entry such as `k7Qp2mXa sha256:9f3c… 2027-03-01`.
    ///
    /// # Errors
    /// A sentence that does not repeat the entry.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let mut parts = text.split_ascii_whitespace();
        let (Some(id), Some(digest), Some(expires), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err("expected \"ID sha256:DIGEST EXPIRY\", as `wald token create` writes it");
        };
        Ok(Self {
            id: TokenId::parse(id).ok_or("the id must have 8 letters or digits")?,
            digest: (digest.strip_prefix("sha256:"))
                .and_then(SecretDigest::parse)
                .ok_or(
                    "the digest must be sha256: and 64 hexadecimal digits; a token itself never \
                     belongs in this file",
                )?,
            expires: parse_time(expires)
                .ok_or("the expiry must be a day such as 2027-03-01, or a time in UTC such as 2027-03-01T12:00:00Z")?,
        })
    }

    /// The entry as the file has it.
    pub(super) fn show(&self) -> String {
        format!(
            "{} sha256:{} {}",
            self.id,
            self.digest.hex(),
            show_time(self.expires)
        )
    }
}

/// Reads a day (its first moment, UTC) or a time.
fn parse_time(text: &str) -> Option<Timestamp> {
    let time: jiff::Timestamp = match text.parse::<jiff::civil::Date>() {
        Ok(day) if text.len() == 10 => day.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp(),
        _ => text.parse().ok()?,
    };
    Some(Timestamp::from_micros(time.as_microsecond()))
}

/// A time in UTC, to the second.
pub(super) fn show_time(time: Timestamp) -> String {
    jiff::Timestamp::from_second(time.micros().div_euclid(1_000_000))
        .map_or_else(|_| "an unknown time".to_owned(), |time| time.to_string())
}

/// The rules that a file replaces, and a bound of the server.
pub(super) struct Earlier<'a> {
    pub(super) rules: &'a FileRules,
    /// Most reads of one tenant that are at work at the same time.
    pub(super) read_places: usize,
}

/// Reads and checks the text of a file. Tenants and principals keep their use of the earlier rules.
///
/// # Errors
/// A sentence with the place of the first fault.
pub(super) fn check(text: &str, earlier: &Earlier<'_>) -> Result<CheckedFile, String> {
    let mut checked = check_text(text, earlier).map_err(|why| without_tokens(&why))?;
    for warning in &mut checked.warnings {
        *warning = without_tokens(warning);
    }
    Ok(checked)
}

/// Checks the text. Sentences may repeat tokens that stand in the wrong place.
fn check_text(text: &str, earlier: &Earlier<'_>) -> Result<CheckedFile, String> {
    let file: AuthFile = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(0, |span| {
            text[..span.start.min(text.len())].matches('\n').count() + 1
        });
        format!("line {line}: {}", first_line(error.message()))
    })?;
    let mut checked = CheckedFile {
        rules: FileRules {
            has_principals: !file.principal.is_empty(),
            tenants: tenants(&file.tenant, earlier)?,
            ..FileRules::default()
        },
        warnings: Vec::new(),
    };
    checked.issuers(&file.jwt)?;
    for (name, table) in &file.principal {
        check_name("principal", name)?;
        let principal = Arc::new(checked.principal(name, table, earlier)?);
        checked.credentials(table, &principal)?;
        checked.subjects(&table.jwt, &principal)?;
    }
    for issuer in checked.rules.issuers.values() {
        if issuer.subjects.is_empty() {
            checked.warnings.push(format!(
                "jwt {}: no principal has a jwt of this issuer",
                issuer.name
            ));
        }
    }
    Ok(checked)
}

/// The text without tokens: a message about a wrong value repeats the value.
fn without_tokens(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    let begins = |rest: &str| {
        let starts = TOKEN_STARTS.map(|start| rest.find(start));
        starts.into_iter().flatten().min()
    };
    while let Some(at) = begins(rest) {
        let (before, from) = rest.split_at(at);
        let is_digit =
            |character: char| character.is_ascii_alphanumeric() || "_-.".contains(character);
        let end = from.find(|character| !is_digit(character));
        shown += before;
        shown += "(a token)";
        rest = &from[end.unwrap_or(from.len())..];
    }
    shown + rest
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn check_name(kind: &str, name: &str) -> Result<(), String> {
    let is_good =
        |character: char| character.is_ascii_alphanumeric() || "._-@:/".contains(character);
    if name.is_empty() || name.len() > NAME_BYTES || !name.chars().all(is_good) {
        return Err(format!(
            "{kind} {name:?}: a name has 1 to {NAME_BYTES} letters, digits and . _ - @ : /"
        ));
    }
    Ok(())
}

/// The tenants by name. No tenant lies in another.
fn tenants(
    tables: &BTreeMap<String, TenantTable>,
    earlier: &Earlier<'_>,
) -> Result<BTreeMap<String, Arc<Tenant>>, String> {
    if tables.len() > MOST_TENANTS {
        return Err(format!(
            "it has {} tenants, and at most {MOST_TENANTS} may be there",
            tables.len()
        ));
    }
    let mut tenants = BTreeMap::new();
    for (name, table) in tables {
        check_name("tenant", name)?;
        if !table.prefix.ends_with('/') {
            return Err(format!(
                "tenant {name}: the prefix {:?} must end with a slash; without it, the tenant would also have logs \
                 such as {:?}",
                table.prefix,
                format!("{}-other", table.prefix)
            ));
        }
        let limits = TenantLimits::parse(&table.limits);
        let usage = (earlier.rules.tenants.get(name)).map_or_else(
            || Arc::new(TenantUsage::new(name, earlier.read_places)),
            |tenant| Arc::clone(&tenant.usage),
        );
        let tenant = Tenant {
            name: name.clone(),
            prefix: table.prefix.clone(),
            limits: limits.map_err(|why| format!("tenant {name}: {why}"))?,
            usage,
        };
        tenants.insert(name.clone(), Arc::new(tenant));
    }
    // In order of their prefixes, a prefix comes right before the first one that lies in it.
    let mut ordered: Vec<_> = tables.iter().collect();
    ordered.sort_by_key(|(name, table)| (&table.prefix, *name));
    for pair in ordered.windows(2) {
        if let [(name, outer), (other, inner)] = pair
            && inner.prefix.starts_with(&outer.prefix)
        {
            return Err(format!(
                "tenant {other}: its prefix {:?} lies in the prefix {:?} of tenant {name}",
                inner.prefix, outer.prefix
            ));
        }
    }
    Ok(tenants)
}

impl CheckedFile {
    /// Adds the issuers of JWTs.
    fn issuers(&mut self, tables: &BTreeMap<String, IssuerTable>) -> Result<(), String> {
        if tables.len() > MOST_ISSUERS {
            return Err(format!(
                "jwt: there are {} issuers, at most {MOST_ISSUERS} are allowed",
                tables.len()
            ));
        }
        for (name, table) in tables {
            check_name("jwt", name)?;
            let issuer = Issuer::new(name, table)?;
            let replaced = self.rules.issuers.insert(issuer.issuer.clone(), issuer);
            if let Some(other) = replaced {
                return Err(format!(
                    "jwt {name}: jwt {} has the issuer {:?}, too",
                    other.name, other.issuer
                ));
            }
        }
        Ok(())
    }

    /// Adds the identities of a principal in JWTs.
    fn subjects(&mut self, table: &Subjects, principal: &Arc<Principal>) -> Result<(), String> {
        for (number, subject) in (1..).zip(&table.0) {
            let at = format!("principal {}: jwt {number}", principal.name);
            let mut issuers = self.rules.issuers.values_mut();
            let issuer = issuers.find(|issuer| issuer.name == subject.issuer);
            let issuer = issuer.ok_or_else(|| {
                format!(
                    "{at}: there is no issuer {:?}; add [jwt.{}]",
                    subject.issuer, subject.issuer
                )
            })?;
            if subject.sub.is_empty() {
                return Err(format!("{at}: sub is empty"));
            }
            let principal = Arc::clone(principal);
            if let Some(other) = issuer.subjects.insert(subject.sub.clone(), principal) {
                return Err(format!(
                    "{at}: principal {} has the sub {:?} of this issuer already",
                    other.name, subject.sub
                ));
            }
        }
        Ok(())
    }

    /// The principal of a table, without its credentials.
    fn principal(
        &mut self,
        name: &str,
        table: &PrincipalTable,
        earlier: &Earlier<'_>,
    ) -> Result<Principal, String> {
        let tenant = match &table.tenant {
            None => None,
            Some(tenant) => Some(self.rules.tenants.get(tenant).ok_or_else(|| {
                format!("principal {name}: there is no tenant {tenant:?}; add [tenant.{tenant}]")
            })?),
        };
        let tenant = tenant.cloned();
        let share = match &tenant {
            Some(tenant) => Arc::clone(tenant.usage.share()),
            None => {
                let share = earlier.rules.shares.get(name).cloned();
                let new = || Arc::new(GroupShare::new(format!("principal {name}")));
                let share = share.unwrap_or_else(new);
                let shares = &mut self.rules.shares;
                shares.insert(name.to_owned(), Arc::clone(&share));
                share
            }
        };
        let mut principal = Principal {
            name: name.to_owned(),
            tenant,
            share,
            is_proxy: table.proxy,
            grants: Vec::new(),
            server_rights: Vec::new(),
        };
        for (number, allow) in (1..).zip(&table.allow) {
            let at = format!("principal {name}: entry {number} of allow");
            self.allow(&mut principal, allow, &at)?;
        }
        if table.cert.is_empty() && table.token.is_empty() && table.jwt.0.is_empty() {
            self.warnings.push(format!(
                "principal {name} has no credential, so nobody can be it"
            ));
        }
        Ok(principal)
    }

    /// Adds the rights of one entry of `allow`, which `at` describes.
    fn allow(
        &mut self,
        principal: &mut Principal,
        allow: &AllowTable,
        at: &str,
    ) -> Result<(), String> {
        let mut rights = LogRights::default();
        let mut server_rights = Vec::new();
        for name in &allow.r#do {
            match Right::parse(name) {
                Some(Right::Log(right)) => rights.insert(right),
                Some(Right::Server(right)) => server_rights.push(right),
                None => {
                    let known: Vec<_> = Right::all().map(Right::name).collect();
                    let known = known.join(", ");
                    return Err(format!(
                        "{at}: {name:?} is no right; the rights are {known}"
                    ));
                }
            }
        }
        let scope = match (&allow.logs, &allow.log) {
            (Some(_), Some(_)) => return Err(format!("{at}: give logs or log, not both")),
            (Some(prefix), None) => Some(Scope::Prefix(prefix.as_str().into())),
            (None, Some(name)) => Some(Scope::Exact(name.as_str().into())),
            (None, None) => None,
        };
        let has_log_rights = rights != LogRights::default();
        match scope {
            _ if allow.r#do.is_empty() => return Err(format!("{at}: do names no right")),
            Some(_) if !server_rights.is_empty() => {
                let names: Vec<_> = server_rights.iter().map(|right| right.name()).collect();
                return Err(format!(
                    "{at}: {} holds for the server and takes no logs; give it an entry of its own",
                    names.join(", ")
                ));
            }
            None if has_log_rights => {
                return Err(format!(
                    "{at}: it names no logs; give logs = \"PREFIX\", or log = \"NAME\" (logs = \"\" is all logs)"
                ));
            }
            Some(scope) => {
                if let Some(tenant) = &principal.tenant {
                    check_in_tenant(&scope, &tenant.prefix, at)?;
                }
                if let Scope::Prefix(prefix) = &scope
                    && !prefix.is_empty()
                    && !prefix.ends_with('/')
                {
                    self.warnings.push(format!(
                        "{at}: logs = {prefix:?} also covers logs such as {:?}; end it with a slash, or use log for \
                         one name",
                        format!("{prefix}-other")
                    ));
                }
                if let Scope::Exact(name) = &scope
                    && name.ends_with('/')
                {
                    self.warnings.push(format!(
                        "{at}: log = {name:?} is one log whose name ends with a slash; logs = {name:?} is all below it"
                    ));
                }
                principal.grants.push(Grant { rights, scope });
            }
            None => {}
        }
        principal.server_rights.append(&mut server_rights);
        Ok(())
    }

    /// Adds the credentials of a table.
    fn credentials(
        &mut self,
        table: &PrincipalTable,
        principal: &Arc<Principal>,
    ) -> Result<(), String> {
        let name = &principal.name;
        let now = SystemClock.now();
        let mut live = 0;
        for (number, entry) in (1..).zip(&table.token) {
            let entry = TokenEntry::parse(entry)
                .map_err(|why| format!("principal {name}: token {number}: {why}"))?;
            live += usize::from(entry.expires > now);
            let known = KnownToken {
                digest: entry.digest,
                expires: entry.expires,
                principal: Arc::clone(principal),
            };
            if self.rules.tokens.insert(entry.id, known).is_some() {
                return Err(format!(
                    "principal {name}: token {number}: another token has the id {}",
                    entry.id
                ));
            }
        }
        if live > LIVE_TOKENS {
            return Err(format!(
                "principal {name}: it has {live} live tokens, at most {LIVE_TOKENS} are allowed; remove one that no \
                 client uses, for example with `wald token revoke ID`"
            ));
        }
        for certificate in &table.cert {
            let (map, key) = match certificate.strip_suffix('*') {
                _ if certificate.starts_with(DNS) => (
                    &mut self.rules.certificates,
                    certificate.to_ascii_lowercase(),
                ),
                Some(before) if before.ends_with('/') => {
                    (&mut self.rules.certificate_segments, before.to_owned())
                }
                _ => (&mut self.rules.certificates, certificate.clone()),
            };
            let is_uri = key
                .split_once(':')
                .is_some_and(|(scheme, rest)| !scheme.is_empty() && !rest.is_empty());
            if !is_uri || key.contains('*') {
                return Err(format!(
                    "principal {name}: cert {certificate:?}: expected a URI such as spiffe://prod/writer, one with a \
                     last segment of * alone, or dns:NAME"
                ));
            }
            if map.insert(key, Arc::clone(principal)).is_some() {
                return Err(format!(
                    "principal {name}: cert {certificate:?}: another principal has it"
                ));
            }
        }
        Ok(())
    }
}

/// Checks that the scope is a part of the tenant's logs.
fn check_in_tenant(scope: &Scope, tenant: &str, at: &str) -> Result<(), String> {
    let text = scope.text();
    if !text.starts_with(tenant) {
        return Err(format!(
            "{at}: {text:?} does not lie in the prefix {tenant:?} of its tenant"
        ));
    }
    match scope {
        Scope::Prefix(prefix) if !prefix.ends_with('/') => Err(format!(
            "{at}: logs = {prefix:?} must end with a slash; use log for one name"
        )),
        _ => Ok(()),
    }
}
