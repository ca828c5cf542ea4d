//! Keys of issuers of JWTs in files, which the thread `wald-reload` reads again. The file of one issuer has no effect on
//! the others: a fault in one must not keep a withdrawn key of another in force.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;

use super::issuer::{KeySource, parse_keys, read_keys};
use super::rules::Rules;
use super::source;
use crate::metrics::ReloadMetrics;
use crate::reload::{Fault, FileKind, ReloadedFiles, Reloader, digest};

/// The files, and the rules that have their keys.
pub(crate) struct KeyFiles(watch::Sender<Arc<Rules>>);

/// The file of an issuer.
#[derive(PartialEq)]
pub(crate) struct KeyFile {
    /// The claim `iss` of the issuer.
    issuer: String,
    path: PathBuf,
    contents: Result<Vec<u8>, Fault>,
}

impl KeyFiles {
    /// Reads the files of all issuers.
    ///
    /// # Errors
    /// With the first fault.
    pub(super) fn start(
        rules: watch::Sender<Arc<Rules>>,
        metrics: &ReloadMetrics,
    ) -> Result<Reloader<Self>, Fault> {
        Reloader::start(metrics, || {
            let (mut files, mut contents) = (Self(rules.clone()), BTreeMap::new());
            files.put_in_force(files.read()?, &mut contents)?;
            Ok((files, contents))
        })
    }
}

impl ReloadedFiles for KeyFiles {
    const KIND: FileKind = FileKind::JwksFile;
    /// By the names of issuers.
    type Contents = BTreeMap<String, KeyFile>;

    fn has_files(contents: &Self::Contents) -> bool {
        !contents.is_empty()
    }

    fn read(&self) -> Result<Self::Contents, Fault> {
        let rules = Arc::clone(&self.0.borrow());
        let files = rules.file.issuers.values().filter_map(|issuer| {
            let KeySource::File(path) = &issuer.source else {
                return None;
            };
            let file = KeyFile {
                issuer: issuer.issuer.clone(),
                contents: read_keys(path),
                path: path.clone(),
            };
            Some((issuer.name.clone(), file))
        });
        Ok(files.collect())
    }

    fn digests(&self, contents: &Self::Contents) -> Vec<(Cow<'static, str>, String)> {
        let readable = contents
            .iter()
            .filter_map(|(issuer, file)| Some((issuer, file.contents.as_ref().ok()?)));
        readable
            .map(|(issuer, bytes)| (format!("jwt.{issuer}.jwks_file").into(), digest(bytes)))
            .collect()
    }

    fn put_in_force(
        &mut self,
        contents: Self::Contents,
        in_force: &mut Self::Contents,
    ) -> Result<(), Fault> {
        // Keys of an earlier source have ended with it.
        in_force.retain(|name, earlier| {
            let now = contents.get(name);
            now.is_some_and(|now| now.issuer == earlier.issuer && now.path == earlier.path)
        });
        let mut result = Ok(());
        for (name, file) in contents {
            let bytes = file.contents.as_ref().map_err(Fault::clone);
            match bytes.and_then(|bytes| parse_keys(&file.path, bytes)) {
                Ok(parsed) => {
                    let keys = parsed.keys;
                    let source = KeySource::File(file.path.clone());
                    let set = |rules: &mut _| Rules::set_keys(rules, &file.issuer, &source, keys);
                    if self.0.send_if_modified(set) {
                        source::warn_of_left_out(&name, &parsed.left_out);
                    }
                    in_force.insert(name, file);
                }
                Err(fault) => result = result.and(Err(fault)),
            }
        }
        result
    }
}
