//! An issuer of JWTs, as `auth_file` describes it, and the source of its keys.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Uri;
use serde::Deserialize;

use super::file::TOKEN_STARTS;
use super::jwks::{Algorithm, KEY_SET_BYTES, KeySet, ParsedKeys};
use super::rules::Principal;
use crate::offline::escaped;
use crate::reload::{Fault, Secrecy, read_file};

/// The table `[jwt.NAME]` as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IssuerTable {
    issuer: String,
    audience: String,
    jwks_file: Option<PathBuf>,
    jwks_url: Option<String>,
    jwks_ca: Option<PathBuf>,
    jwks_token_file: Option<PathBuf>,
    algorithms: Vec<String>,
}

/// An issuer.
pub(super) struct Issuer {
    /// Its name in the file.
    pub(super) name: String,
    /// The claim `iss` of its tokens.
    pub(super) issuer: String,
    /// The claim `aud` of tokens for this server.
    pub(super) audience: String,
    pub(super) algorithms: Vec<Algorithm>,
    pub(super) source: KeySource,
    /// Principals by the claim `sub`.
    pub(super) subjects: HashMap<String, Arc<Principal>>,
}

/// The place of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeySource {
    File(PathBuf),
    Url(KeyUrl),
}

/// An https URL with keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeyUrl {
    pub(super) url: Uri,
    /// CA certificates that the server is verified with. `None`: the CAs of the system.
    pub(super) ca: Option<PathBuf>,
    /// The token that the server requires: the API server of Kubernetes answers no stranger.
    pub(super) token: Option<PathBuf>,
}

impl Issuer {
    /// The issuer of a table, without subjects.
    ///
    /// # Errors
    /// A sentence about the first fault.
    pub(super) fn new(name: &str, table: &IssuerTable) -> Result<Self, String> {
        let at = format!("jwt {name}");
        for (key, value) in [("issuer", &table.issuer), ("audience", &table.audience)] {
            if value.is_empty() {
                return Err(format!("{at}: {key} is empty"));
            }
        }
        let mut algorithms = Vec::new();
        for name in &table.algorithms {
            let Some(algorithm) = Algorithm::parse(name) else {
                let known = Algorithm::ALL.map(Algorithm::name).join(", ");
                return Err(format!("{at}: algorithms: {name:?} is not one of {known}"));
            };
            algorithms.push(algorithm);
        }
        if algorithms.is_empty() {
            return Err(format!(
                "{at}: algorithms is empty; list those that the issuer signs with, such as [\"RS256\"]"
            ));
        }
        for (key, path) in [
            ("jwks_file", &table.jwks_file),
            ("jwks_ca", &table.jwks_ca),
            ("jwks_token_file", &table.jwks_token_file),
        ] {
            let text = path.as_ref().and_then(|path| path.to_str());
            let is_token = |text: &str| TOKEN_STARTS.iter().any(|start| text.starts_with(start));
            // The fault of a file repeats its path.
            if text.is_some_and(is_token) {
                return Err(format!(
                    "{at}: {key}: expected the path of a file, and not a token"
                ));
            }
        }
        let has_more = table.jwks_ca.is_some() || table.jwks_token_file.is_some();
        let source = match (&table.jwks_file, &table.jwks_url) {
            (Some(_), None) if has_more => {
                return Err(format!(
                    "{at}: jwks_ca and jwks_token_file belong to jwks_url, and there is none"
                ));
            }
            (Some(path), None) => KeySource::File(path.clone()),
            (None, Some(url)) => KeySource::Url(KeyUrl {
                url: https(url).ok_or_else(|| {
                    // The value may have a password.
                    format!(
                        "{at}: jwks_url: expected https://HOST/PATH without a name and a password; if the server requires a \
                         token, name its file as jwks_token_file"
                    )
                })?,
                ca: table.jwks_ca.clone(),
                token: table.jwks_token_file.clone(),
            }),
            _ => return Err(format!("{at}: give jwks_file or jwks_url, one of them")),
        };
        Ok(Self {
            name: name.to_owned(),
            issuer: table.issuer.clone(),
            audience: table.audience.clone(),
            algorithms,
            source,
            subjects: HashMap::new(),
        })
    }
}

/// A URL with https, a host and nobody's password.
fn https(text: &str) -> Option<Uri> {
    let url: Uri = text.parse().ok()?;
    let authority = url.authority()?;
    let is_good = url.scheme_str() == Some("https")
        && !authority.host().is_empty()
        && !authority.as_str().contains('@');
    is_good.then_some(url)
}

/// Reads a file with keys.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn read_keys(path: &Path) -> Result<Vec<u8>, Fault> {
    read_file("jwks_file", path, KEY_SET_BYTES, Secrecy::Public)
}

/// Checks the contents of a file with keys.
///
/// # Errors
/// If it has no usable key.
pub(super) fn parse_keys(path: &Path, contents: &[u8]) -> Result<ParsedKeys, Fault> {
    // A fault may repeat a name of the file, which an operator reads on a terminal.
    KeySet::parse(contents).map_err(|why| Fault::new("jwks_file", path, escaped(&why)))
}
