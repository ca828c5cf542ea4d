//! The client of each kind of store. Timeouts and retries are here and nowhere else.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig};
use tokio::time::timeout;

use crate::error::{BucketError, BucketErrorKind};
use crate::settings::{BucketSettings, Credentials, read_credentials};
use crate::url::{BucketUrl, Scheme};

/// Maximum time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for one request, with its body, if the body is not larger than [`USUAL_BODY`].
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest body of most requests, bytes: a part of a file. It needs 140 KiB/s.
const USUAL_BODY: u64 = 8 << 20;
/// Bytes a second that a connection to the store carries at least.
pub(crate) const SLOWEST: u64 = 140 << 10;
/// Maximum time for a request with the largest body: a manifest, or the rows of a group.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum number of retries of a request, after 5xx, 429, a failed connection, or a timeout of a request that may
/// be repeated. The pauses grow from 0.1 to 5 s: 12 s at most together.
const RETRIES: usize = 6;
/// No retry begins later than this after the first attempt.
const RETRY_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum time for one request with a body of this size.
pub(crate) fn request_timeout(bytes: u64) -> Duration {
    let beyond = bytes.saturating_sub(USUAL_BODY);
    let time = REQUEST_TIMEOUT + Duration::from_millis(beyond.saturating_mul(1000) / SLOWEST);
    time.min(LONGEST_TIMEOUT)
}

/// Connects clients whose time for a request depends on the size of its body.
#[derive(Debug, Default)]
struct BySize;

impl HttpConnector for BySize {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let connector = ReqwestConnector::default();
        let longer = options.clone().with_timeout(LONGEST_TIMEOUT);
        Ok(HttpClient::new(SizedRequests {
            usual: connector.connect(options)?,
            large: connector.connect(&longer)?,
        }))
    }
}

/// Two clients: the timeout of `reqwest` belongs to a client, and `object_store` cannot set that of a request.
#[derive(Debug)]
struct SizedRequests {
    usual: HttpClient,
    large: HttpClient,
}

#[async_trait]
impl HttpService for SizedRequests {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let bytes = request.body().content_length() as u64;
        if bytes <= USUAL_BODY {
            return self.usual.execute(request).await;
        }
        let answer = timeout(request_timeout(bytes), self.large.execute(request)).await;
        answer.unwrap_or_else(|late| Err(HttpError::new(HttpErrorKind::Timeout, late)))
    }
}

/// Makes the client. Sends nothing.
///
/// # Errors
/// If the settings cannot be used.
pub(crate) fn open(
    url: &BucketUrl,
    settings: &BucketSettings,
) -> Result<Arc<dyn ObjectStore>, BucketError> {
    let refused = |what: String| BucketError::new(BucketErrorKind::Settings, url, what);
    // The process has one provider of TLS. If a caller has installed it, this call changes nothing.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let credentials = settings.credentials_file.as_deref().map(read_credentials);
    let credentials = credentials.transpose().map_err(refused)?;
    let failed = |error: object_store::Error| refused(error.to_string());
    let options = with_roots(ClientOptions::new())
        .with_allow_http(settings.insecure)
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_timeout(REQUEST_TIMEOUT);
    let retries = RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            base: 2.0,
        },
        max_retries: RETRIES,
        retry_timeout: RETRY_TIMEOUT,
    };
    match url.scheme {
        Scheme::S3 => {
            let mut builder = AmazonS3Builder::from_env();
            for (key, value) in pairs::<AmazonS3ConfigKey>(credentials, url)? {
                builder = builder.with_config(key, value);
            }
            if let Some(region) = &settings.region {
                builder = builder.with_region(region);
            }
            if let Some(endpoint) = &settings.endpoint {
                // The variable for S3 alone would win over an endpoint of another name.
                builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
            }
            let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
                .iter()
                .find_map(|key| builder.get_config_value(key));
            check_endpoint(url, endpoint.as_deref(), settings)?;
            let builder = builder
                .with_client_options(options)
                .with_http_connector(BySize)
                .with_retry(retries)
                .with_bucket_name(&url.bucket);
            Ok(Arc::new(builder.build().map_err(failed)?))
        }
        Scheme::Gs => {
            let mut builder = GoogleCloudStorageBuilder::from_env();
            if let Some(Credentials::ServiceAccount(key)) = credentials {
                builder = builder.with_service_account_key(key);
            } else {
                for (key, value) in pairs::<GoogleConfigKey>(credentials, url)? {
                    builder = builder.with_config(key, value);
                }
            }
            if let Some(endpoint) = &settings.endpoint {
                builder = builder.with_base_url(endpoint);
            }
            let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
            check_endpoint(url, endpoint.as_deref(), settings)?;
            let builder = builder
                .with_client_options(options)
                .with_http_connector(BySize)
                .with_retry(retries)
                .with_bucket_name(&url.bucket);
            Ok(Arc::new(builder.build().map_err(failed)?))
        }
        Scheme::Az => {
            let mut builder = MicrosoftAzureBuilder::from_env();
            for (key, value) in pairs::<AzureConfigKey>(credentials, url)? {
                builder = builder.with_config(key, value);
            }
            if let Some(endpoint) = &settings.endpoint {
                builder = builder.with_endpoint(endpoint.clone());
            }
            let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
            check_endpoint(url, endpoint.as_deref(), settings)?;
            let builder = builder
                .with_client_options(options)
                .with_http_connector(BySize)
                .with_retry(retries)
                .with_container_name(&url.bucket);
            Ok(Arc::new(builder.build().map_err(failed)?))
        }
    }
}

/// Adds Mozilla's root certificates if this machine has none. The image has no files but the programs.
fn with_roots(options: ClientOptions) -> ClientOptions {
    if !rustls_native_certs::load_native_certs().certs.is_empty() {
        return options;
    }
    let roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter();
    let roots = roots.filter_map(|root| Certificate::from_der(root).ok());
    roots.fold(options, ClientOptions::with_root_certificate)
}

/// The settings of a file of credentials; none without a file.
fn pairs<K: FromStr>(
    file: Option<Credentials>,
    url: &BucketUrl,
) -> Result<Vec<(K, String)>, BucketError> {
    let refused = |what: String| BucketError::new(BucketErrorKind::Settings, url, what);
    let pairs = match file {
        None => return Ok(Vec::new()),
        Some(Credentials::Pairs(pairs)) => pairs,
        Some(Credentials::ServiceAccount(_)) => {
            let what = "the file of credentials is JSON, which is for gs:// only; expected lines NAME = VALUE";
            return Err(refused(what.to_owned()));
        }
    };
    let keyed = pairs.into_iter().map(|(name, value)| match name.parse() {
        Ok(key) => Ok((key, value)),
        Err(_) => Err(refused(format!(
            "the file of credentials has the name {name:?}, which this kind of store does not know"
        ))),
    });
    keyed.collect()
}

/// Refuses plaintext without consent: requests carry records.
fn check_endpoint(
    url: &BucketUrl,
    endpoint: Option<&str>,
    settings: &BucketSettings,
) -> Result<(), BucketError> {
    let refused = |what: String| Err(BucketError::new(BucketErrorKind::Settings, url, what));
    match endpoint {
        None => Ok(()),
        // Messages show the endpoint.
        Some(endpoint) if endpoint.contains('@') => refused(
            "the endpoint has a name or a password before its host; use a file of credentials"
                .to_owned(),
        ),
        Some(endpoint) if endpoint.starts_with("https://") => Ok(()),
        Some(endpoint) if !endpoint.starts_with("http://") => refused(format!(
            "the endpoint {endpoint:?} is no URL that begins with https://"
        )),
        Some(_) if settings.insecure => Ok(()),
        Some(endpoint) => refused(format!(
            "the endpoint {endpoint} has no TLS, so that others can read the records on their way; use https://, \
             or give your consent with bucket_insecure (--bucket-insecure)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(url: &str, settings: &BucketSettings) -> Result<(), BucketError> {
        open(&url.parse().unwrap(), settings).map(drop)
    }

    #[test]
    fn plaintext_needs_consent() {
        let mut settings = BucketSettings {
            endpoint: Some("http://127.0.0.1:7070".to_owned()),
            ..BucketSettings::default()
        };
        let refused = opened("s3://wald/x", &settings).unwrap_err();
        assert_eq!(refused.kind(), BucketErrorKind::Settings);
        assert!(refused.to_string().contains("bucket_insecure"), "{refused}");
        settings.insecure = true;
        opened("s3://wald/x", &settings).unwrap();
        settings.endpoint = Some("ftp://127.0.0.1".to_owned());
        assert!(opened("s3://wald/x", &settings).is_err());
        settings.endpoint = Some("https://me:hunter2@127.0.0.1".to_owned());
        let refused = opened("s3://wald/x", &settings).unwrap_err().to_string();
        assert!(!refused.contains("hunter2"), "{refused}");
    }

    /// A link of 300 KiB/s behind a client whose requests end after `limit`.
    #[derive(Debug)]
    struct SlowLink {
        limit: Duration,
    }

    #[async_trait]
    impl HttpService for SlowLink {
        async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
            let millis = request.body().content_length() as u64 * 1000 / (300 << 10);
            let sent = tokio::time::sleep(Duration::from_millis(millis));
            let late = |late| HttpError::new(HttpErrorKind::Timeout, late);
            timeout(self.limit, sent).await.map_err(late)?;
            Ok(HttpResponse::new(Vec::new().into()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_larger_body_has_more_time() {
        let link = |limit| HttpClient::new(SlowLink { limit });
        let client = SizedRequests {
            usual: link(REQUEST_TIMEOUT),
            large: link(LONGEST_TIMEOUT),
        };
        let put = async |bytes: usize| {
            let begun = tokio::time::Instant::now();
            let request = HttpRequest::new(vec![0; bytes].into());
            (
                client.call(request).await.is_ok(),
                begun.elapsed().as_secs(),
            )
        };
        assert_eq!(put(8 << 20).await, (true, 27));
        assert_eq!(put(63 << 20).await, (true, 215));
        // A request that the network swallows has a bound, too.
        let swallowed = SizedRequests {
            usual: link(REQUEST_TIMEOUT),
            large: HttpClient::new(Swallows),
        };
        let begun = tokio::time::Instant::now();
        let request = HttpRequest::new(vec![0; 9 << 20].into());
        let late = swallowed.call(request).await.unwrap_err();
        assert_eq!(late.kind(), HttpErrorKind::Timeout);
        assert_eq!(begun.elapsed().as_secs(), 67);
    }

    #[derive(Debug)]
    struct Swallows;

    #[async_trait]
    impl HttpService for Swallows {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            std::future::pending().await
        }
    }

    #[test]
    fn a_file_of_another_provider_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("credentials");
        std::fs::write(&path, "azure_storage_account_key = secret").unwrap();
        let owner = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, owner).unwrap();
        let settings = BucketSettings {
            credentials_file: Some(path.clone()),
            ..BucketSettings::default()
        };
        let refused = opened("s3://wald", &settings).unwrap_err().to_string();
        assert!(refused.contains("\"azure_storage_account_key\"") && !refused.contains("= secret"));
        std::fs::write(&path, "{}").unwrap();
        assert!(opened("s3://wald", &settings).is_err());
    }
}
