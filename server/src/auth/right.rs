//! Rights, and the logs that they hold for.

use std::fmt;

/// A right on the logs of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogRight {
    /// Append records to logs that exist, and flush them.
    Append,
    /// Create logs, with the first append or fence among others.
    Create,
    /// Read records, tails, cursors and producers, and name a log in a check.
    Read,
    /// Move and delete cursors.
    Cursor,
    /// Trim.
    Trim,
    /// Raise the writer epoch.
    Fence,
    /// Change the configuration, and forget producers.
    Configure,
    /// Delete logs.
    Delete,
    /// See names and configuration.
    List,
}

/// A right to operate the server. It holds for no log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerRight {
    /// List segments, verify, and see paths, damage and flush times.
    Ops,
    /// Take a copy of the whole store.
    Backup,
    /// Stop the server.
    Drain,
    /// Read /metrics.
    Metrics,
    /// Use the console.
    Console,
}

/// A right of either kind, as `auth_file` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Right {
    Log(LogRight),
    Server(ServerRight),
}

impl LogRight {
    pub(crate) const ALL: [Self; 9] = [
        Self::Append,
        Self::Create,
        Self::Read,
        Self::Cursor,
        Self::Trim,
        Self::Fence,
        Self::Configure,
        Self::Delete,
        Self::List,
    ];

    /// The right as `auth_file` spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Create => "create",
            Self::Read => "read",
            Self::Cursor => "cursor",
            Self::Trim => "trim",
            Self::Fence => "fence",
            Self::Configure => "configure",
            Self::Delete => "delete",
            Self::List => "list",
        }
    }

    fn bit(self) -> u16 {
        1 << self as u16
    }
}

impl ServerRight {
    pub(crate) const ALL: [Self; 5] = [
        Self::Ops,
        Self::Backup,
        Self::Drain,
        Self::Metrics,
        Self::Console,
    ];

    /// The right as `auth_file` spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ops => "ops",
            Self::Backup => "backup",
            Self::Drain => "drain",
            Self::Metrics => "metrics",
            Self::Console => "console",
        }
    }
}

impl Right {
    /// All rights, those on logs first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let logs = LogRight::ALL.into_iter().map(Self::Log);
        logs.chain(ServerRight::ALL.into_iter().map(Self::Server))
    }

    /// The right as `auth_file` spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Log(right) => right.name(),
            Self::Server(right) => right.name(),
        }
    }

    /// Reads the name of a right.
    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::all().find(|right| right.name() == name)
    }
}

impl From<LogRight> for Right {
    fn from(right: LogRight) -> Self {
        Self::Log(right)
    }
}

impl From<ServerRight> for Right {
    fn from(right: ServerRight) -> Self {
        Self::Server(right)
    }
}

/// A set of rights on logs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LogRights(u16);

impl LogRights {
    pub(super) fn insert(&mut self, right: LogRight) {
        self.0 |= right.bit();
    }

    pub(crate) fn contains(self, right: LogRight) -> bool {
        self.0 & right.bit() != 0
    }
}

/// The logs of a grant. Names are compared byte by byte, without regard to case or Unicode forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The log of this name.
    Exact(Box<str>),
    /// Every log whose name begins with this.
    Prefix(Box<str>),
}

impl Scope {
    /// The name, or the prefix.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Exact(text) | Self::Prefix(text) => text,
        }
    }

    /// Whether the log is one of the scope.
    pub(crate) fn covers(&self, log: &str) -> bool {
        match self {
            Self::Exact(name) => **name == *log,
            Self::Prefix(prefix) => log.as_bytes().starts_with(prefix.as_bytes()),
        }
    }

    /// Whether every log whose name begins with `prefix` is one of the scope.
    pub(crate) fn covers_prefix(&self, prefix: &str) -> bool {
        matches!(self, Self::Prefix(own) if prefix.as_bytes().starts_with(own.as_bytes()))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => write!(f, "log {name:?}"),
            Self::Prefix(prefix) if prefix.is_empty() => f.write_str("all logs"),
            Self::Prefix(prefix) => write!(f, "logs {prefix:?}…"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_right_is_read_by_its_name() {
        for right in Right::all() {
            assert_eq!(Right::parse(right.name()), Some(right));
        }
        for none in ["", "Append", "admin", "append ", "*"] {
            assert_eq!(Right::parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn sets_hold_the_rights_put_in_and_no_others() {
        for put in LogRight::ALL {
            let mut rights = LogRights::default();
            rights.insert(put);
            for right in LogRight::ALL {
                assert_eq!(rights.contains(right), right == put, "{right:?} {put:?}");
            }
        }
    }

    #[test]
    fn prefix_is_compared_byte_by_byte() {
        let prefix = |text: &str| Scope::Prefix(text.into());
        assert!(prefix("payments/").covers("payments/a"));
        assert!(prefix("payments/").covers("payments/"));
        assert!(!prefix("payments/").covers("payments"));
        assert!(!prefix("payments/").covers("payments-eu/a"));
        assert!(prefix("payments").covers("payments-eu/a"));
        assert!(!prefix("payments/").covers("pay"));
        assert!(!prefix("payments/").covers("Payments/a"));
        assert!(prefix("").covers("a"));
        // NFC does not cover NFD.
        assert!(!prefix("caf\u{e9}/").covers("cafe\u{301}/a"));
    }

    #[test]
    fn exact_name_covers_no_other_name() {
        let exact = Scope::Exact("a".into());
        assert!(exact.covers("a"));
        assert!(!exact.covers("ab") && !exact.covers(""));
        assert!(!exact.covers_prefix("a"));
    }

    #[test]
    fn shorter_prefix_is_not_covered() {
        let scope = Scope::Prefix("payments/".into());
        assert!(scope.covers_prefix("payments/") && scope.covers_prefix("payments/eu/"));
        for shorter in ["", "pay", "payments", "payments-eu/"] {
            assert!(!scope.covers_prefix(shorter), "{shorter:?}");
        }
    }
}
