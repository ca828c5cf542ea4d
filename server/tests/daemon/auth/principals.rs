//! An `auth_file` of a test, and clients with its tokens.

use std::path::PathBuf;

use tempfile::TempDir;
use tonic::metadata::AsciiMetadataValue;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};
use wald_proto::v1::cursor_service_client::CursorServiceClient;
use wald_proto::v1::log_service_client::LogServiceClient;
use wald_proto::v1::ops_service_client::OpsServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::support::{Daemon, SessionClient, output, wald};

/// Two tenants, and principals of each kind.
pub(crate) const COMPANY: &str = r#"
[tenant.payments]
prefix = "payments/"

[tenant.orders]
prefix = "orders/"

[principal.root]
allow = [
    { do = ["append", "create", "read", "cursor", "trim", "fence", "configure", "delete", "list"], logs = "" },
    { do = ["ops", "backup", "drain", "metrics", "console"] },
]

[principal.none]

[principal.reader]
tenant = "payments"
allow = [{ do = ["read", "list"], logs = "payments/" }]

[principal.writer]
tenant = "payments"
allow = [{ do = ["append", "create", "cursor"], logs = "payments/billing/" }]

[principal.appender]
tenant = "payments"
allow = [{ do = ["append", "fence"], logs = "payments/billing/" }]

[principal.admin]
tenant = "payments"
allow = [
    { do = ["append", "create", "read", "cursor", "trim", "fence", "configure", "delete", "list"], logs = "payments/" },
]

[principal.other]
tenant = "orders"
allow = [
    { do = ["append", "create", "read", "cursor", "trim", "fence", "configure", "delete", "list"], logs = "orders/" },
]

[principal.ops]
allow = [{ do = ["ops", "backup", "drain", "metrics"] }]
"#;

/// A file, in a directory that goes away with it.
pub(crate) struct AuthFile {
    directory: TempDir,
}

impl AuthFile {
    pub(crate) fn new(text: &str) -> Self {
        let file = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        file.write(text);
        file
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("auth.toml")
    }

    pub(crate) fn text(&self) -> String {
        std::fs::read_to_string(self.path()).unwrap()
    }

    /// Replaces the file as a whole.
    pub(crate) fn write(&self, text: &str) {
        self.write_beside("auth.toml", text);
    }

    /// Replaces a file next to it as a whole. Only its owner can read it.
    pub(crate) fn write_beside(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let (new, path) = (
            self.directory.path().join("new"),
            self.directory.path().join(name),
        );
        std::fs::write(&new, text).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(&new, &path).unwrap();
        path
    }

    /// The argument that names the file.
    pub(crate) fn argument(&self) -> String {
        format!("--auth-file={}", self.path().display())
    }

    /// Runs `wald token`.
    pub(crate) fn command(&self, arguments: &[&str]) -> std::process::Output {
        output(wald().arg("token").args(arguments).arg(self.argument()))
    }

    /// A new token of the principal.
    pub(crate) fn token(&self, principal: &str) -> String {
        let made = self.command(&["create", "--principal", principal]);
        assert!(made.status.success(), "{made:?}");
        String::from_utf8(made.stdout).unwrap().trim().to_owned()
    }

    /// A daemon with this file.
    pub(crate) fn start(&self, arguments: &[&str]) -> Daemon {
        let own = self.argument();
        let mut all = vec![own.as_str()];
        all.extend(arguments);
        Daemon::start(&all)
    }

    /// Replaces the file, and waits until the daemon has it in force.
    pub(crate) fn put_in_force(&self, daemon: &Daemon, text: &str) {
        self.write(text);
        daemon.signal(rustix::process::Signal::HUP);
        daemon.wait_for_log("the changed auth_file is in force");
    }
}

/// Adds a token to each call.
#[derive(Clone)]
pub(crate) struct Bearer(AsciiMetadataValue);

impl Bearer {
    pub(crate) fn new(token: &str) -> Self {
        Self(format!("Bearer {token}").parse().unwrap())
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request
            .metadata_mut()
            .insert("authorization", self.0.clone());
        Ok(request)
    }
}

pub(crate) type WithToken = InterceptedService<Channel, Bearer>;

pub(crate) async fn wal(daemon: &Daemon, token: &str) -> WalServiceClient<WithToken> {
    WalServiceClient::with_interceptor(daemon.channel().await, Bearer::new(token))
}

/// A session of appends under way.
pub(crate) async fn session(daemon: &Daemon, token: &str) -> SessionClient {
    let (requests, sent) = tokio::sync::mpsc::channel(1);
    let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
    let answers = wal(daemon, token).await.append_session(sent).await;
    let answers = answers.unwrap().into_inner();
    SessionClient { requests, answers }
}

pub(crate) async fn logs(daemon: &Daemon, token: &str) -> LogServiceClient<WithToken> {
    LogServiceClient::with_interceptor(daemon.channel().await, Bearer::new(token))
}

pub(crate) async fn cursors(daemon: &Daemon, token: &str) -> CursorServiceClient<WithToken> {
    CursorServiceClient::with_interceptor(daemon.channel().await, Bearer::new(token))
}

pub(crate) async fn ops(daemon: &Daemon, token: &str) -> OpsServiceClient<WithToken> {
    OpsServiceClient::with_interceptor(daemon.channel().await, Bearer::new(token))
}
