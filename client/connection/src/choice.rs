//! The settings in force, each with its source.

use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use clap::parser::ValueSource;
use wald_client::{Client, ClientBuilder, DEFAULT_ENDPOINT, TlsOptions, complete_endpoints};

use crate::{ConnectionArgs, ConnectionFault, Context, ContextFile};

/// Source of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SettingSource {
    Option(&'static str),
    Variable(&'static str),
    Context(String),
    Default,
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(name) | Self::Variable(name) => f.write_str(name),
            Self::Context(name) => write!(f, "context {name}"),
            Self::Default => f.write_str("default"),
        }
    }
}

#[derive(Debug, Clone)]
struct ChosenValue<T> {
    value: T,
    source: SettingSource,
}

/// The context of a command.
#[derive(Debug, Clone)]
pub struct UsedContext {
    /// Its name.
    pub name: String,
    /// File that it is in.
    pub path: PathBuf,
    source: String,
    /// Whether its settings count. They do not if the endpoint of an option or a variable is another server.
    counts: bool,
}

/// The settings of a connection.
#[derive(Debug, Clone)]
pub struct ConnectionChoice {
    context: Option<UsedContext>,
    endpoint: ChosenValue<String>,
    tls_ca: Option<ChosenValue<PathBuf>>,
    tls_cert: Option<ChosenValue<PathBuf>>,
    tls_key: Option<ChosenValue<PathBuf>>,
    tls_server_name: Option<ChosenValue<String>>,
    token_file: Option<ChosenValue<PathBuf>>,
    /// The token of WALD_TOKEN.
    token: Option<String>,
    allow_insecure_token: bool,
}

/// Values of options and variables, with their sources.
struct GivenValues<'a>(&'a ArgMatches);

impl GivenValues<'_> {
    fn source(&self, id: &str, option: &'static str, variable: &'static str) -> SettingSource {
        match self.0.value_source(id) {
            Some(ValueSource::EnvVariable) => SettingSource::Variable(variable),
            _ => SettingSource::Option(option),
        }
    }

    fn setting<T: Clone>(
        &self,
        value: &Option<T>,
        (id, option, variable): (&str, &'static str, &'static str),
    ) -> Option<ChosenValue<T>> {
        let value = value.clone()?;
        let source = self.source(id, option, variable);
        Some(ChosenValue { value, source })
    }
}

const ENDPOINT: (&str, &str, &str) = ("endpoint", "--endpoint", "WALD_ENDPOINT");
const CONTEXT: (&str, &str, &str) = ("context", "--context", "WALD_CONTEXT");
const TLS_CA: (&str, &str, &str) = ("tls_ca", "--tls-ca", "WALD_TLS_CA");
const TLS_CERT: (&str, &str, &str) = ("tls_cert", "--tls-cert", "WALD_TLS_CERT");
const TLS_KEY: (&str, &str, &str) = ("tls_key", "--tls-key", "WALD_TLS_KEY");
const TLS_SERVER_NAME: (&str, &str, &str) = (
    "tls_server_name",
    "--tls-server-name",
    "WALD_TLS_SERVER_NAME",
);
const TOKEN_FILE: (&str, &str, &str) = ("token_file", "--token-file", "WALD_TOKEN_FILE");

/// The values of options and variables alone.
fn given(args: &ConnectionArgs, matches: &ArgMatches) -> ConnectionChoice {
    let given = GivenValues(matches);
    let token_file = given.setting(&args.token_file, TOKEN_FILE);
    let token = std::env::var("WALD_TOKEN").ok();
    ConnectionChoice {
        context: None,
        endpoint: given
            .setting(&args.endpoint, ENDPOINT)
            .unwrap_or_else(|| ChosenValue {
                value: DEFAULT_ENDPOINT.to_owned(),
                source: SettingSource::Default,
            }),
        tls_ca: given.setting(&args.tls_ca, TLS_CA),
        tls_cert: given.setting(&args.tls_cert, TLS_CERT),
        tls_key: given.setting(&args.tls_key, TLS_KEY),
        tls_server_name: given.setting(&args.tls_server_name, TLS_SERVER_NAME),
        token: token.filter(|token| !token.is_empty() && token_file.is_none()),
        token_file,
        allow_insecure_token: args.allow_insecure_token,
    }
}

/// Refuses a file with a token or a key that every user of this machine can use. Its group may: in Kubernetes it is that
/// of the pod. A file that is not there passes, because the client names that fault.
fn check_secret(file: &ChosenValue<PathBuf>) -> Result<(), ConnectionFault> {
    let Ok(found) = std::fs::metadata(&file.value) else {
        return Ok(());
    };
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o007 == 0 {
        return Ok(());
    }
    let path = file.value.display();
    Err(ConnectionFault::new(format!(
        "{}: {path}: every user of this machine can use it (mode {mode:04o}); run: chmod o-rwx {path}; in a pod: set \
         fsGroup, and defaultMode 0440 for a Secret; in Compose: mode 0440 of the secret",
        file.source
    )))
}

/// Whether each server of `given` is one of `known`.
fn are_among(given: &str, known: &str) -> bool {
    let (Ok(given), Ok(known)) = (complete_endpoints(given), complete_endpoints(known)) else {
        return false;
    };
    let is_known = |one: &String| known.iter().any(|known| known.eq_ignore_ascii_case(one));
    given.iter().all(is_known)
}

impl ConnectionChoice {
    /// The settings of a command. `matches`: the arguments that `args` come from.
    ///
    /// # Errors
    /// If the file with the contexts is needed and cannot be used, or has no such context.
    pub fn new(args: &ConnectionArgs, matches: &ArgMatches) -> Result<Self, ConnectionFault> {
        let named = args.context.as_ref().filter(|name| !name.is_empty());
        if named.is_none() && args.endpoint.is_some() {
            return Ok(given(args, matches));
        }
        let path = match ContextFile::path() {
            Err(_) if named.is_none() => return Ok(given(args, matches)),
            path => path?,
        };
        let file = ContextFile::read(&path)?;
        let (name, source) = match (named, &file.current) {
            (Some(name), _) => {
                let (id, option, variable) = CONTEXT;
                let source = GivenValues(matches).source(id, option, variable);
                (name.clone(), source.to_string())
            }
            (None, Some(name)) => (name.clone(), "current".to_owned()),
            (None, None) => return Ok(given(args, matches)),
        };
        let context = file.context(&name, &path)?.clone();
        Ok(given(args, matches).completed(context, &name, source, &path))
    }

    /// The values of options and variables alone, as they are kept in a new context. Paths are absolute.
    ///
    /// # Errors
    /// If there is no endpoint, or no current directory.
    pub fn to_keep(
        args: &ConnectionArgs,
        matches: &ArgMatches,
    ) -> Result<(Self, Context), ConnectionFault> {
        let settings = given(args, matches);
        if settings.endpoint.source == SettingSource::Default {
            return Err(ConnectionFault::new(
                "a context needs the address of its server; give --endpoint",
            ));
        }
        let absolute = |setting: &Option<ChosenValue<PathBuf>>| {
            let path = setting.as_ref().map(|setting| setting.value.clone());
            path.map(std::path::absolute).transpose().map_err(|error| {
                ConnectionFault::new(format!("no current directory for the paths: {error}"))
            })
        };
        let context = Context {
            endpoint: settings.endpoint.value.clone(),
            tls_ca: absolute(&settings.tls_ca)?,
            tls_cert: absolute(&settings.tls_cert)?,
            tls_key: absolute(&settings.tls_key)?,
            tls_server_name: settings
                .tls_server_name
                .as_ref()
                .map(|name| name.value.clone()),
            token_file: absolute(&settings.token_file)?,
        };
        Ok((settings, context))
    }

    /// Fills the missing values from the context, if the endpoint has no server but the context's.
    fn completed(mut self, context: Context, name: &str, source: String, path: &Path) -> Self {
        let counts = self.endpoint.source == SettingSource::Default
            || are_among(&self.endpoint.value, &context.endpoint);
        self.context = Some(UsedContext {
            name: name.to_owned(),
            path: path.to_owned(),
            source,
            counts,
        });
        if !counts {
            return self;
        }
        fn of<T>(value: Option<T>, name: &str) -> Option<ChosenValue<T>> {
            let source = SettingSource::Context(name.to_owned());
            value.map(|value| ChosenValue { value, source })
        }
        if self.endpoint.source == SettingSource::Default
            && let Some(endpoint) = of(Some(context.endpoint), name)
        {
            self.endpoint = endpoint;
        }
        self.tls_ca = self.tls_ca.or_else(|| of(context.tls_ca, name));
        // A certificate and its key come from one source.
        if self.tls_cert.is_none() {
            self.tls_cert = of(context.tls_cert, name);
            self.tls_key = of(context.tls_key, name);
        }
        self.tls_server_name = self
            .tls_server_name
            .or_else(|| of(context.tls_server_name, name));
        if self.token.is_none() {
            self.token_file = self.token_file.or_else(|| of(context.token_file, name));
        }
        self
    }

    /// The context whose settings count.
    pub fn context(&self) -> Option<&UsedContext> {
        self.context.as_ref().filter(|context| context.counts)
    }

    /// A sentence for the user, if the context does not count.
    pub fn remark(&self) -> Option<String> {
        let context = self.context.as_ref().filter(|context| !context.counts)?;
        Some(format!(
            "{} names another server than context {}, so nothing of the context is used",
            self.endpoint.source, context.name
        ))
    }

    /// Name, value and source of each setting, the context first. A token is not shown.
    pub fn rows(&self) -> Vec<(&'static str, String, String)> {
        let mut rows = Vec::new();
        if let Some(context) = &self.context {
            let source = match context.counts {
                true => context.source.clone(),
                false => format!("{}; not used: its endpoint is another", context.source),
            };
            rows.push(("context", context.name.clone(), source));
            rows.push(("file", context.path.display().to_string(), String::new()));
        }
        let endpoint = &self.endpoint;
        rows.push((
            "endpoint",
            endpoint.value.clone(),
            endpoint.source.to_string(),
        ));
        let mut path = |name, setting: &Option<ChosenValue<PathBuf>>| {
            if let Some(ChosenValue { value, source }) = setting {
                rows.push((name, value.display().to_string(), source.to_string()));
            }
        };
        path("tls-ca", &self.tls_ca);
        path("tls-cert", &self.tls_cert);
        path("tls-key", &self.tls_key);
        path("token-file", &self.token_file);
        if let Some(ChosenValue { value, source }) = &self.tls_server_name {
            rows.push(("tls-server-name", value.clone(), source.to_string()));
        }
        if self.token.is_some() {
            rows.push(("token", "(hidden)".to_owned(), "WALD_TOKEN".to_owned()));
        }
        rows
    }

    /// Number of servers that the endpoint names, at least 1.
    pub fn servers(&self) -> u32 {
        let commas = self.endpoint.value.matches(',').count();
        u32::try_from(commas).map_or(u32::MAX, |commas| commas.saturating_add(1))
    }

    /// A client with these settings.
    ///
    /// # Errors
    /// If there are settings of TLS for an endpoint in plaintext, or every user of this machine can use the token or
    /// the key of a file.
    pub fn builder(&self) -> Result<ClientBuilder, ConnectionFault> {
        for file in [&self.token_file, &self.tls_key].into_iter().flatten() {
            check_secret(file)?;
        }
        let mut builder = Client::builder(self.endpoint.value.clone());
        if let Some(options) = self.tls_options() {
            let scheme = self.endpoint.value.get(..8).unwrap_or_default();
            if !scheme.eq_ignore_ascii_case("https://") {
                return Err(ConnectionFault::new(
                    "the --tls options and the variables WALD_TLS_* need an endpoint with TLS: give \
                     --endpoint https://HOST:PORT, or leave them out",
                ));
            }
            builder = builder.tls(options);
        }
        builder = match (&self.token_file, &self.token) {
            (Some(file), _) => builder.token_file(&file.value),
            (None, Some(token)) => builder.token(token),
            (None, None) => builder,
        };
        Ok(match self.allow_insecure_token {
            true => builder.allow_insecure_token(),
            false => builder,
        })
    }

    /// The settings of TLS; `None` without any.
    fn tls_options(&self) -> Option<TlsOptions> {
        let mut options = None;
        let mut set = |change: &dyn Fn(TlsOptions) -> TlsOptions| {
            options = Some(change(options.take().unwrap_or_default()));
        };
        if let Some(path) = &self.tls_ca {
            set(&|options| options.ca_file(&path.value));
        }
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            set(&|options| options.identity_files(&certificate.value, &key.value));
        }
        if let Some(name) = &self.tls_server_name {
            set(&|options| options.server_name(&name.value));
        }
        options
    }
}
