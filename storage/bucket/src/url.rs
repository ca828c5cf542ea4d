//! The place of a bucket: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`.

use std::fmt;
use std::str::FromStr;

/// The answer of a program without the feature `object` to such a URL.
pub const NOT_BUILT: &str = "this program is built without object stores; use the released binary or the image, or build \
                             it with --features object";

/// Maximum bytes of a prefix. Object names may have 1,024 bytes, and the longest name below a prefix has 80.
const LONGEST_PREFIX: usize = 900;

/// A kind of object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Amazon S3, or a server that is compatible with it.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
}

impl Scheme {
    fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Az => "az",
        }
    }
}

/// A bucket, and the prefix of all names that Wald uses in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketUrl {
    /// The kind of store.
    pub scheme: Scheme,
    /// The bucket; in Azure the container.
    pub bucket: String,
    /// The prefix without slashes around it; empty for the whole bucket.
    pub prefix: String,
}

/// A URL that names no bucket, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{url:?} {why}; expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX")]
pub struct BadUrl {
    url: String,
    why: &'static str,
}

/// Whether a place is written as a URL, and not as a directory.
pub fn is_url(place: &str) -> bool {
    place.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.bucket)?;
        match self.prefix.is_empty() {
            true => Ok(()),
            false => write!(f, "/{}", self.prefix),
        }
    }
}

impl FromStr for BucketUrl {
    type Err = BadUrl;

    fn from_str(url: &str) -> Result<Self, BadUrl> {
        let bad = |why| BadUrl {
            url: url.to_owned(),
            why,
        };
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(bad("is no URL"));
        };
        let scheme = [Scheme::S3, Scheme::Gs, Scheme::Az]
            .into_iter()
            .find(|known| scheme.eq_ignore_ascii_case(known.name()))
            .ok_or_else(|| bad("has another scheme"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let of_a_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if bucket.is_empty() || bucket.len() > 222 || !bucket.chars().all(of_a_name) {
            return Err(bad("has no name of a bucket"));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_odd = |part: &str| matches!(part, "" | "." | "..");
        // Stores and proxies disagree about other characters.
        let allowed = |c: char| of_a_name(c) || "/=+@,:".contains(c);
        if !prefix.is_empty() && (prefix.split('/').any(is_odd) || !prefix.chars().all(allowed)) {
            return Err(bad(
                "has a prefix with an empty or dotted part, or with a character other than letters, \
                 digits and . - _ = + @ , :",
            ));
        }
        if prefix.len() > LONGEST_PREFIX {
            return Err(bad("has a prefix of more than 900 bytes"));
        }
        Ok(Self {
            scheme,
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read_and_written() {
        for (text, scheme, bucket, prefix) in [
            ("s3://wald/backups/eu", Scheme::S3, "wald", "backups/eu"),
            ("gs://wald", Scheme::Gs, "wald", ""),
            ("az://wald.logs/a=1", Scheme::Az, "wald.logs", "a=1"),
        ] {
            let url: BucketUrl = text.parse().unwrap();
            assert_eq!(
                (url.scheme, &*url.bucket, &*url.prefix),
                (scheme, bucket, prefix)
            );
            assert_eq!(url.to_string(), text);
            assert_eq!(format!("{text}/").parse(), Ok(url));
            assert!(is_url(text));
        }
    }

    #[test]
    fn other_places_are_refused_by_name() {
        for text in [
            "s3://",
            "s3:///prefix",
            "s3://wald//x",
            "s3://wald/../x",
            "s3://wald/a b",
            // The client would write it as %7E.
            "s3://wald/~x",
            "s3://wald/x?versionId=1",
            "s3://user@wald/x",
            "file:///backups",
            "https://wald.s3.amazonaws.com/x",
        ] {
            let refused = text.parse::<BucketUrl>().unwrap_err().to_string();
            assert!(refused.starts_with(&format!("{text:?}")), "{refused}");
            assert!(is_url(text));
        }
        assert!(
            format!("s3://b/{}", "x".repeat(901))
                .parse::<BucketUrl>()
                .is_err()
        );
        for directory in ["/backups", "s3:/backups", "./a://b/c", "backups", "://x"] {
            assert!(!is_url(directory), "{directory}");
        }
    }
}
