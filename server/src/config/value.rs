//! Values of settings: sizes as `64MiB`, spans as `5ms` (`wald_text::units`), choices by name.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use wald_storage::{LogName, OnDamage, ReadStrategy, SyncMode};
use wald_text::units;

/// A type that settings can have.
pub(crate) trait SettingValue: Sized {
    /// Whether its flag may stand without a value.
    const SWITCH: bool = false;

    /// Reads a value.
    ///
    /// # Errors
    /// Describes the expected form.
    fn parse(text: &str) -> Result<Self, String>;

    /// Writes it so that [`SettingValue::parse`] gives the same.
    fn show(&self) -> String;
}

impl SettingValue for bool {
    const SWITCH: bool = true;

    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
            .map_err(|_| "expected true or false".to_owned())
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

macro_rules! number {
    ($($type:ty),+) => { $(
        impl SettingValue for $type {
            fn parse(text: &str) -> Result<Self, String> {
                text.parse().map_err(|_| format!("expected a number from 0 to {}", Self::MAX))
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    )+ };
}

number!(u32, u64, usize);

impl SettingValue for String {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn show(&self) -> String {
        self.clone()
    }
}

impl SettingValue for PathBuf {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("expected a path".to_owned());
        }
        Ok(text.into())
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

impl SettingValue for SocketAddr {
    fn parse(text: &str) -> Result<Self, String> {
        let full = match text.strip_prefix(':') {
            Some(port) => format!("127.0.0.1:{port}"),
            None => text.to_owned(),
        };
        full.parse().map_err(|_| {
            "expected an address and a port, such as 127.0.0.1:6925 or [::1]:0".to_owned()
        })
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&units::shown_size(self.0))
    }
}

impl From<u64> for Size {
    fn from(bytes: u64) -> Self {
        Self(bytes)
    }
}

impl From<Size> for u64 {
    fn from(size: Size) -> Self {
        size.0
    }
}

impl SettingValue for Size {
    fn parse(text: &str) -> Result<Self, String> {
        units::size(text).map(Self)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// Names of logs: each in full, or all that begin with something.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LogPatterns(pub(crate) Vec<LogPattern>);

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogPattern {
    /// A name in full.
    Name(String),
    /// A prefix of names; empty: every name.
    Prefix(String),
}

impl SettingValue for LogPatterns {
    fn parse(text: &str) -> Result<Self, String> {
        let parts = text.split(',').map(str::trim);
        let pattern = |part: &str| match part.strip_suffix('*') {
            Some(prefix) => Ok(LogPattern::Prefix(prefix.to_owned())),
            None => match LogName::new(part) {
                Ok(_) => Ok(LogPattern::Name(part.to_owned())),
                Err(error) => Err(format!(
                    "expected names of logs such as orders, shop/*; {part:?}: {error}"
                )),
            },
        };
        let named = parts.filter(|part| !part.is_empty());
        named.map(pattern).collect::<Result<_, _>>().map(Self)
    }

    fn show(&self) -> String {
        let word = |pattern: &LogPattern| match pattern {
            LogPattern::Name(name) => name.clone(),
            LogPattern::Prefix(prefix) => format!("{prefix}*"),
        };
        self.0.iter().map(word).collect::<Vec<_>>().join(", ")
    }
}

impl SettingValue for Duration {
    fn parse(text: &str) -> Result<Self, String> {
        units::span(text)
    }

    fn show(&self) -> String {
        units::shown_span(*self)
    }
}

/// Minimum time between two writes to the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BucketGap {
    /// The median time of the newest writes.
    Auto,
    /// This time.
    Fixed(Duration),
}

impl SettingValue for BucketGap {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => match units::span(text) {
                Ok(span) => Ok(Self::Fixed(span)),
                Err(why) => Err(format!("{why}, or auto")),
            },
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::Fixed(span) => units::shown_span(*span),
        }
    }
}

/// Reaction to a failed journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlushFailurePolicy {
    /// End the process, for its supervisor to start it again.
    Exit,
    /// Go on serving the records that are on the device.
    ReadOnly,
}

/// Logs that share a data key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EncryptionScope {
    /// All logs of the store.
    Store,
    /// The logs of a tenant.
    Tenant,
    /// Each log has its own.
    Log,
}

/// Calls that the audit log records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuditScope {
    /// Changes, and operations of the server.
    Changes,
    /// Every call.
    All,
}

/// Reaction to an audit log that cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuditFailurePolicy {
    /// Calls go on.
    Continue,
    /// Changes are refused.
    Refuse,
}

/// Whether clients must send a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientAuth {
    /// None is requested.
    Off,
    /// One is requested, and verified if the client sends it.
    Optional,
    /// The handshake fails without one.
    Require,
}

/// Oldest version of TLS that is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsVersion {
    /// TLS 1.2 and 1.3.
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// Text on a terminal, otherwise JSON.
    Auto,
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Whether the HTTP port serves a part that shows or changes records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exposure {
    /// Only if the HTTP port is on a loopback address.
    Auto,
    /// Wherever the HTTP port is.
    On,
    /// Not.
    Off,
}

/// Words for the variants of a type, the engine's types included.
macro_rules! choice {
    ($type:ident { $( $variant:ident = $text:literal ),+ }) => {
        impl SettingValue for $type {
            fn parse(text: &str) -> Result<Self, String> {
                match text {
                    $( $text => Ok(Self::$variant), )+
                    _ => Err(format!("expected {}", [$($text),+].join(", "))),
                }
            }

            fn show(&self) -> String {
                match self {
                    $( Self::$variant => $text, )+
                }
                .to_owned()
            }
        }
    };
}

choice!(SyncMode {
    Strict = "strict",
    Batch = "batch",
    Interval = "interval",
    Async = "async",
    Manual = "manual",
    Replicated = "replicated"
});
choice!(OnDamage { Quarantine = "quarantine", Refuse = "refuse" });
choice!(ReadStrategy { Pread = "pread", Mmap = "mmap" });
choice!(FlushFailurePolicy { Exit = "exit", ReadOnly = "read_only" });
choice!(EncryptionScope { Store = "store", Tenant = "tenant", Log = "log" });
choice!(AuditScope { Changes = "changes", All = "all" });
choice!(AuditFailurePolicy { Continue = "continue", Refuse = "refuse" });
choice!(ClientAuth { Off = "off", Optional = "optional", Require = "require" });
choice!(TlsVersion { Tls12 = "1.2", Tls13 = "1.3" });
choice!(LogFormat { Auto = "auto", Text = "text", Json = "json" });
choice!(Exposure { Auto = "auto", On = "on", Off = "off" });
