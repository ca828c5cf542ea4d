//! Settings of the client, and the file of credentials.
//!
//! Without a file the credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`) or from the
//! identity of the machine or the pod. `renew.rs` reads the file again.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Maximum bytes of a file of credentials.
const LARGEST_FILE: u64 = 64 << 10;

/// Settings of the client of a bucket.
#[derive(Debug, Clone, Default)]
pub struct BucketSettings {
    /// Base URL of the store; `None` = the environment's, or the public one of the provider.
    pub endpoint: Option<String>,
    /// Region; `None` = the environment's, or us-east-1. Only S3 has regions.
    pub region: Option<String>,
    /// File with credentials.
    pub credentials_file: Option<PathBuf>,
    /// Whether requests and credentials may cross the network without TLS.
    pub insecure: bool,
}

/// Rights of every user in the mode of a file.
const OTHERS: u32 = 0o007;

/// The content of a file of credentials.
pub(crate) enum Credentials {
    /// A key of a Google service account, in JSON.
    ServiceAccount(String),
    /// Names as in the environment, in lower case, with their values.
    Pairs(Vec<(String, String)>),
}

/// Reads a file of credentials: lines `NAME = VALUE`, as in AWS's file of credentials or as for the environment,
/// or the JSON key of a Google service account.
///
/// # Errors
/// If the file cannot be read, if every user may read it, if it is larger than 64 KiB, or has another line.
pub(crate) fn read_credentials(path: &Path) -> Result<Credentials, String> {
    let told = |what: String| format!("the file of credentials {}: {what}", path.display());
    let failed = |error: std::io::Error| told(error.to_string());
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode();
    if mode & OTHERS != 0 {
        return Err(told(format!(
            "every user of this machine may open it (mode {:04o}); chmod 600 changes that",
            mode & 0o7777
        )));
    }
    let mut text = String::new();
    file.take(LARGEST_FILE + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > LARGEST_FILE {
        return Err(told("it has more than 64 KiB".to_owned()));
    }
    if text.trim_start().starts_with('{') {
        return Ok(Credentials::ServiceAccount(text));
    }
    let mut pairs = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') || line.eq_ignore_ascii_case("[default]") {
            continue;
        }
        // A line may be a secret, so it is not shown.
        let refused = |what: &str| Err(told(format!("line {} {what}", number + 1)));
        if line.starts_with('[') {
            return refused("begins another profile; leave only [default]");
        }
        let Some((name, value)) = line.split_once('=') else {
            return refused("is not NAME = VALUE");
        };
        let name = name.trim().trim_start_matches("export ").trim();
        pairs.push((
            name.to_ascii_lowercase(),
            value.trim().trim_matches('"').to_owned(),
        ));
    }
    if pairs.is_empty() {
        return Err(told("it has no line NAME = VALUE".to_owned()));
    }
    Ok(Credentials::Pairs(pairs))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    fn read(text: &str) -> Result<Credentials, String> {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("credentials");
        std::fs::write(&path, text).unwrap();
        let rights = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        rights(0o644);
        let refused = read_credentials(&path).err().unwrap();
        assert!(refused.contains("mode 0644"), "{refused}");
        rights(0o440);
        read_credentials(&path)
    }

    #[test]
    fn files_of_three_forms_are_read() {
        let pairs = |text| match read(text).unwrap() {
            Credentials::Pairs(pairs) => pairs,
            Credentials::ServiceAccount(_) => panic!("no JSON"),
        };
        let expected = [
            ("aws_access_key_id", "k"),
            ("aws_secret_access_key", "s=/+"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(
            pairs("# mine\n[default]\naws_access_key_id = k\naws_secret_access_key=s=/+\n"),
            expected
        );
        assert_eq!(
            pairs("export AWS_ACCESS_KEY_ID=k\nAWS_SECRET_ACCESS_KEY=\"s=/+\""),
            expected
        );
        assert!(matches!(
            read("\n{\"type\": \"service_account\"}"),
            Ok(Credentials::ServiceAccount(_))
        ));
    }

    #[test]
    fn a_bad_line_is_named_without_its_content() {
        for (text, place) in [
            ("hunter2", "line 1 is not"),
            ("a=b\n[other]\nsecret=x", "line 2 begins"),
            ("", "no line"),
        ] {
            let refused = read(text).err().unwrap();
            assert!(refused.contains(place), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
        let large = "x".repeat(70_000);
        assert!(read(&large).err().unwrap().contains("64 KiB"));
    }
}
