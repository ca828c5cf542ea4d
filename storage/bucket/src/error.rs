//! Errors of a bucket: one sentence with the place, the event and the store's own words.

use std::error::Error;

/// Maximum characters of the store's own words in a message.
const LONGEST_DETAIL: usize = 300;

/// Codes with which S3 refuses temporary credentials that have expired. Their status is 400.
const EXPIRED: [&str; 2] = ["ExpiredToken", "TokenRefreshRequired"];
/// The code with which S3 refuses temporary credentials that it does not know. Its status is 400.
const UNKNOWN: &str = "InvalidToken";
/// The code with which S3 refuses each request of a machine whose clock is off by more than 15 minutes. Its status is 403.
const SKEWED: &str = "RequestTimeTooSkewed";

/// Class of an error. Programs choose their exit code by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BucketErrorKind {
    /// The settings cannot be used. Nothing was sent.
    Settings,
    /// The bucket or the object does not exist.
    NotFound,
    /// The store refuses the credentials, or there are none.
    Denied,
    /// The credentials have expired. Newer ones may come.
    Expired,
    /// The store cannot be reached, or fails after all retries.
    Unavailable,
    /// The stored bytes are not the expected ones.
    Damaged,
}

/// An error of a bucket.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub struct BucketError {
    kind: BucketErrorKind,
    place: String,
    what: String,
}

impl BucketError {
    /// An error of this crate.
    pub fn new(kind: BucketErrorKind, place: impl ToString, what: impl Into<String>) -> Self {
        Self {
            kind,
            place: place.to_string(),
            what: what.into(),
        }
    }

    /// The class.
    pub fn kind(&self) -> BucketErrorKind {
        self.kind
    }

    /// An error of the store during `action`.
    pub(crate) fn of(place: impl ToString, action: &str, error: &object_store::Error) -> Self {
        let detail = store_words(error);
        // Errors of lists have no variant of their own.
        let status = |code: &str| error.to_string().contains(&format!("status code: {code}"));
        let (kind, what) = match error {
            object_store::Error::NotFound { .. } => (
                BucketErrorKind::NotFound,
                match detail.contains("NoSuchKey") || detail.contains("BlobNotFound") {
                    true => "there is no such object",
                    false => "there is no such bucket, or no such object in it",
                },
            ),
            _ if status("404") => (BucketErrorKind::NotFound, "there is no such bucket"),
            // As an outage, it passes: once the clock is right.
            _ if detail.starts_with(SKEWED) => (
                BucketErrorKind::Unavailable,
                "the store refuses the clock of this machine; check its synchronisation",
            ),
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => (
                BucketErrorKind::Denied,
                "the store refuses the credentials, or they do not allow this",
            ),
            _ if EXPIRED.iter().any(|code| detail.starts_with(code)) => (
                BucketErrorKind::Expired,
                "the store refuses the credentials, which have expired",
            ),
            _ if status("403") || status("401") || detail.starts_with(UNKNOWN) => (
                BucketErrorKind::Denied,
                "the store refuses the credentials, or they do not allow this",
            ),
            _ if detail.contains("Unable to extract metadata from headers") => (
                BucketErrorKind::Damaged,
                "the store's answer lacks a header",
            ),
            _ if detail.contains("//169.254.") || detail.contains("//metadata") => (
                BucketErrorKind::Denied,
                "no credentials were given, and this machine has no identity at the provider",
            ),
            _ => (BucketErrorKind::Unavailable, "the store fails"),
        };
        Self::new(kind, place, format!("cannot {action}: {what} ({detail})"))
    }
}

/// The store's own words: code and message of an XML answer, else the error with its causes. At most 300 characters.
pub(crate) fn store_words(error: &dyn Error) -> String {
    let whole = error.to_string();
    let mut text = match (tagged(&whole, "Code"), tagged(&whole, "Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => {
            let mut text = whole.clone();
            let mut cause = error.source();
            while let Some(inner) = cause {
                let said = inner.to_string();
                if !text.contains(&said) {
                    text = format!("{text}: {said}");
                }
                cause = inner.source();
            }
            text
        }
    };
    text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = text.char_indices().nth(LONGEST_DETAIL) {
        text.truncate(end);
        text.push('…');
    }
    text
}

fn tagged<'a>(text: &'a str, tag: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{tag}>"))?;
    let (inner, _) = rest.split_once(&format!("</{tag}>"))?;
    Some(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_s_words_are_taken_out_of_its_answer() {
        let source = "Server returned non-2xx status code: 403 Forbidden: <?xml?><Error><Code>SignatureDoesNotMatch\
                      </Code><Message>Wrong\n signature</Message><Key>x</Key></Error>";
        let error = object_store::Error::PermissionDenied {
            path: "x".to_owned(),
            source: source.into(),
        };
        let error = BucketError::of("s3://b/p", "list backups/", &error);
        assert_eq!(error.kind(), BucketErrorKind::Denied);
        assert_eq!(
            error.to_string(),
            "s3://b/p: cannot list backups/: the store refuses the credentials, or they do not allow this \
             (SignatureDoesNotMatch: Wrong signature)"
        );
    }

    #[test]
    fn errors_of_lists_are_classified_by_their_status() {
        for (status, code, kind) in [
            ("404 Not Found", "NoSuchBucket", BucketErrorKind::NotFound),
            (
                "403 Forbidden",
                "InvalidAccessKeyId",
                BucketErrorKind::Denied,
            ),
            (
                "403 Forbidden",
                "RequestTimeTooSkewed",
                BucketErrorKind::Unavailable,
            ),
            ("400 Bad Request", "ExpiredToken", BucketErrorKind::Expired),
            ("400 Bad Request", "InvalidToken", BucketErrorKind::Denied),
            (
                "400 Bad Request",
                "InvalidRequest",
                BucketErrorKind::Unavailable,
            ),
            (
                "500 Internal Server Error",
                "InternalError",
                BucketErrorKind::Unavailable,
            ),
        ] {
            let source = format!(
                "Server returned non-2xx status code: {status}: <Error><Code>{code}</Code></Error>"
            );
            let error = object_store::Error::Generic {
                store: "S3",
                source: source.into(),
            };
            let error = BucketError::of("s3://b", "list files/", &error);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(code), "{error}");
        }
    }

    #[test]
    fn an_answer_without_a_header_is_not_missing_credentials() {
        for (source, kind) in [
            (
                "Unable to extract metadata from headers: ETag Header missing from response",
                BucketErrorKind::Damaged,
            ),
            (
                "Error performing GET http://metadata.google.internal/computeMetadata/v1",
                BucketErrorKind::Denied,
            ),
            (
                "Error performing PUT http://169.254.169.254/latest/api/token",
                BucketErrorKind::Denied,
            ),
        ] {
            let error = object_store::Error::Generic {
                store: "GCS",
                source: source.into(),
            };
            assert_eq!(BucketError::of("gs://b", "write x", &error).kind(), kind);
        }
    }

    #[test]
    fn long_answers_are_cut() {
        let error = object_store::Error::Generic {
            store: "S3",
            source: "é".repeat(4_000).into(),
        };
        let error = BucketError::of("s3://b", "read x", &error);
        assert_eq!(error.kind(), BucketErrorKind::Unavailable);
        assert!(error.to_string().chars().count() < 400, "{error}");
    }
}
