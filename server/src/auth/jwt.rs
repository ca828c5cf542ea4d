//! JSON Web Tokens of other issuers, such as the service accounts of Kubernetes (RFC 7519, in the compact form of
//! RFC 7515).
//!
//! ```text
//! text ─▶ PresentedJwt ─its issuer, a key of the issuer─▶ VerifiedJwt ─rules in force─▶ principal
//!         (parsed)        (the signature is right)          (judged again after each change)
//! ```
//!
//! Rule: nothing in a token selects how the token is checked. `alg` must be one that `auth_file` lists for the issuer, a
//! `kid` names a key of the issuer's set, and keys or links in the token are ignored. The text of a token is dropped
//! after the check of its signature: a [`VerifiedJwt`] has only claims, and the key that signed them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer};
use wald_storage::Timestamp;

use super::file::show_time;
use super::issuer::KeySource;
use super::jwks::{Algorithm, Key};
use super::rules::{Principal, Rules, TokenFault};

/// Maximum length of a token, bytes. A token of Kubernetes has about 1,000.
const TOKEN_BYTES: usize = 8 << 10;
/// Longest time between now and the expiry of a token, seconds. A stolen token counts no longer.
const LONGEST_LIFE: i64 = 24 * 3600;
/// Allowed difference between the clocks of issuer and server, seconds.
const LEEWAY: i64 = 30;
/// Maximum length of a `jti` that is shown, bytes.
const SHOWN_JTI_BYTES: usize = 100;

/// The words of a text that is no JWT at all.
const NO_JWT: &str = "the text is no JWT: three parts in base64url with dots between them";

/// The reason why a credential does not count. It is for operators alone, because it can show parts of `auth_file`.
pub(super) type CredentialFault = Cow<'static, str>;

/// The head of a token. Everything else in it is ignored.
#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    kid: Option<String>,
    typ: Option<String>,
    /// Extensions that the receiver must know. Wald knows none.
    #[serde(default, deserialize_with = "present")]
    crit: bool,
}

/// The claims of a token that Wald knows.
#[derive(Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    aud: Audience,
    exp: NumericDate,
    nbf: Option<NumericDate>,
    jti: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Several(Vec<String>),
}

impl Audience {
    fn has(&self, audience: &str) -> bool {
        match self {
            Self::One(only) => only == audience,
            Self::Several(all) => all.iter().any(|one| one == audience),
        }
    }
}

impl fmt::Display for Audience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(only) => write!(f, "{only:?}"),
            Self::Several(all) => write!(f, "{all:?}"),
        }
    }
}

/// A time in whole seconds since 1970. Parts of a second are cut off.
#[derive(Clone, Copy)]
struct NumericDate(i64);

impl<'de> Deserialize<'de> for NumericDate {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let seconds = f64::deserialize(input)?;
        let seconds = Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)?;
        // Times stay below the bound of a timestamp in microseconds.
        let seconds = u32::try_from(seconds.as_secs()).map_err(serde::de::Error::custom)?;
        Ok(Self(seconds.into()))
    }
}

impl NumericDate {
    fn time(self) -> Timestamp {
        Timestamp::from_micros(self.0 * 1_000_000)
    }

    fn shown(self) -> String {
        show_time(self.time())
    }
}

fn present<'de, D: Deserializer<'de>>(input: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(input).map(|_| true)
}

/// A token that a caller sent. Nobody has checked its signature.
pub(super) struct PresentedJwt<'a> {
    algorithm: Algorithm,
    kid: Option<String>,
    claims: Claims,
    signed: &'a [u8],
    signature: Vec<u8>,
}

/// The reason why a signature does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignatureFault {
    /// The issuer is known, and has no key of this name. It may have a new one.
    UnknownKey,
    /// The issuer is known, and none of its keys are in force.
    NoKeys,
    /// The issuer is not known, or the signature is wrong.
    Bad,
}

impl<'a> PresentedJwt<'a> {
    /// Reads a token.
    ///
    /// # Errors
    /// The reason why Wald could not accept it, for operators.
    pub(super) fn parse(text: &'a [u8]) -> Result<Self, CredentialFault> {
        if text.len() > TOKEN_BYTES {
            return Err("the token has more than 8 KiB".into());
        }
        let last_dot = text.iter().rposition(|byte| *byte == b'.').ok_or(NO_JWT)?;
        let (signed, signature) = (&text[..last_dot], &text[last_dot + 1..]);
        let first_dot = signed.iter().position(|byte| *byte == b'.').ok_or(NO_JWT)?;
        let header: JwtHeader = object(&signed[..first_dot]).ok_or(NO_JWT)?;
        let is_token = header.typ.as_deref().is_none_or(|typ| {
            let typ = typ.to_ascii_lowercase();
            matches!(
                typ.strip_prefix("application/").unwrap_or(&typ),
                "jwt" | "at+jwt"
            )
        });
        if header.crit {
            return Err(
                "the head of the JWT has `crit`, an extension that Wald does not know".into(),
            );
        }
        if !is_token {
            return Err("`typ` of the JWT is neither JWT nor at+jwt".into());
        }
        let claims = object(&signed[first_dot + 1..]).ok_or(
            "the claims of the JWT cannot be read: it needs iss, sub and aud as texts and exp as a number",
        )?;
        Ok(Self {
            algorithm: Algorithm::parse(&header.alg)
                .ok_or_else(|| format!("Wald accepts no JWT with alg {:?}", header.alg))?,
            kid: header.kid,
            claims,
            signed,
            signature: URL_SAFE_NO_PAD.decode(signature).map_err(|_| NO_JWT)?,
        })
    }

    /// Whether the keys of its issuer come from a URL.
    pub(super) fn has_fetched_keys(&self, rules: &Rules) -> bool {
        let issuer = rules.file.issuers.get(&self.claims.iss);
        issuer.is_some_and(|issuer| matches!(issuer.source, KeySource::Url(_)))
    }

    /// Checks the signature.
    ///
    /// # Errors
    /// The reason why it does not count, also in words for operators.
    pub(super) fn verify(
        self,
        rules: &Rules,
    ) -> Result<VerifiedJwt, (SignatureFault, CredentialFault)> {
        let bad = |why: String| (SignatureFault::Bad, why.into());
        let iss = &self.claims.iss;
        let issuer = rules.file.issuers.get(iss);
        let issuer = issuer.ok_or_else(|| bad(format!("no [jwt.NAME] has the issuer {iss:?}")))?;
        let name = &issuer.name;
        if !issuer.algorithms.contains(&self.algorithm) {
            let why = format!(
                "algorithms of [jwt.{name}] lack the {} of the JWT",
                self.algorithm.name()
            );
            return Err(bad(why));
        }
        let keys = rules.keys.get(&issuer.issuer);
        let keys = keys.filter(|keys| !keys.is_empty());
        let keys = keys.ok_or_else(|| {
            let why = format!("no keys of [jwt.{name}] are in force");
            (SignatureFault::NoKeys, why.into())
        })?;
        let key = keys.find(self.kid.as_deref(), self.algorithm);
        let key = key.ok_or_else(|| {
            let algorithm = self.algorithm.name();
            let why = match &self.kid {
                Some(kid) => format!("[jwt.{name}] has no key for {algorithm} with kid {kid:?}"),
                None => {
                    format!("the JWT has no kid, and [jwt.{name}] has no only key for {algorithm}")
                }
            };
            (SignatureFault::UnknownKey, why.into())
        })?;
        if !key.verifies(self.algorithm, self.signed, &self.signature) {
            return Err(bad(format!(
                "the signature is not of the key of [jwt.{name}]"
            )));
        }
        let jti = self.claims.jti.as_deref().filter(|jti| is_showable(jti));
        let id = match jti {
            Some(jti) => format!("{}/{jti}", issuer.name),
            None => issuer.name.clone(),
        };
        Ok(VerifiedJwt {
            id,
            algorithm: self.algorithm,
            key: Arc::clone(key),
            claims: self.claims,
        })
    }
}

/// Reads a part of a token: a JSON object in base64url.
fn object<T: DeserializeOwned>(part: &[u8]) -> Option<T> {
    let json = URL_SAFE_NO_PAD.decode(part).ok()?;
    // A struct could also be read from an array.
    let is_object = json.trim_ascii_start().starts_with(b"{");
    is_object.then(|| serde_json::from_slice(&json).ok())?
}

/// Whether lines and answers may show the id that an issuer gave a token.
fn is_showable(jti: &str) -> bool {
    (1..=SHOWN_JTI_BYTES).contains(&jti.len()) && jti.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A token whose signature is right.
pub(crate) struct VerifiedJwt {
    id: String,
    algorithm: Algorithm,
    key: Arc<Key>,
    claims: Claims,
}

impl VerifiedJwt {
    /// The name of its issuer in `auth_file`, and after a slash its `jti`, if it has one. It is no secret.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Its principal by these rules, and the time at which it expires.
    ///
    /// # Errors
    /// The reason why it does not count, also in words for operators.
    pub(super) fn judge<'r>(
        &self,
        rules: &'r Rules,
        now: Timestamp,
    ) -> Result<(&'r Arc<Principal>, Timestamp), (TokenFault, CredentialFault)> {
        let claims = &self.claims;
        let bad = |why: String| Err((TokenFault::Bad, why.into()));
        let issuer = rules.file.issuers.get(&claims.iss);
        let issuer = issuer.filter(|issuer| issuer.algorithms.contains(&self.algorithm));
        let Some(issuer) = issuer else {
            return bad("auth_file no longer accepts the JWTs of this issuer".to_owned());
        };
        let name = &issuer.name;
        if !claims.aud.has(&issuer.audience) {
            let (has, wanted) = (&claims.aud, &issuer.audience);
            return bad(format!(
                "aud of the JWT is {has}; [jwt.{name}] wants {wanted:?}"
            ));
        }
        match rules.keys.get(&issuer.issuer) {
            Some(keys) if keys.contains(&self.key) => {}
            Some(keys) if !keys.is_empty() => {
                return bad(format!(
                    "the key of the JWT is no longer one of [jwt.{name}]"
                ));
            }
            _ => {
                let why = format!("no keys of [jwt.{name}] are in force");
                return Err((TokenFault::NoKeys, why.into()));
            }
        }
        let seconds = now.micros().div_euclid(1_000_000);
        if let Some(nbf) = claims.nbf.filter(|nbf| nbf.0 > seconds + LEEWAY) {
            return bad(format!("the JWT is not valid before {}", nbf.shown()));
        }
        if claims.exp.0 > seconds + LONGEST_LIFE + LEEWAY {
            let exp = claims.exp.shown();
            return bad(format!(
                "the JWT expires at {exp}, more than 24 hours from now"
            ));
        }
        let Some(principal) = issuer.subjects.get(&claims.sub) else {
            let sub = &claims.sub;
            return bad(format!(
                "no principal has jwt with issuer {name:?} and sub {sub:?}"
            ));
        };
        let expires = claims.exp.time();
        match expires <= now {
            true => {
                let why = format!("the JWT expired at {}", claims.exp.shown());
                Err((TokenFault::Expired(expires), why.into()))
            }
            false => Ok((principal, expires)),
        }
    }
}

impl fmt::Debug for VerifiedJwt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VerifiedJwt").field(&self.id).finish()
    }
}

#[cfg(test)]
mod tests;
