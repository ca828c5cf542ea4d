//! The table of RPCs: how each is admitted, whether it writes, and which rights its caller needs.
//!
//! The compiler refuses a method of the contract that has no row here.

use wald_proto::Method;

use crate::auth::{LogRight, Right, ServerRight};
use crate::status::Access;

/// Classes of RPCs that are admitted by rules of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// An append of one log: its answer is small.
    Append,
    /// An append to several logs.
    AppendBatch,
    /// A stream of appends, whose messages wait to be admitted.
    AppendSession,
    /// A request that names the files that its caller has.
    Backup,
    /// The service without limits, for measurements.
    Echo,
    /// A health check, or the order to drain: these get in whatever others hold.
    Probe,
    /// Streams of health.
    Health,
    /// Streams of requests that may take their time between two messages.
    Reflection,
    /// All others.
    Other,
}

/// The condition for a caller to get past the head of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Nothing, not even a credential.
    Nothing,
    /// The credential of a principal.
    Principal,
    /// A right to operate the server.
    Server(ServerRight),
    /// The credential of a principal here, and later this right on each log that the request names.
    Logs(LogRight),
}

impl Need {
    /// The right, if one is needed.
    pub(crate) fn right(self) -> Option<Right> {
        match self {
            Self::Nothing | Self::Principal => None,
            Self::Server(right) => Some(Right::Server(right)),
            Self::Logs(right) => Some(Right::Log(right)),
        }
    }
}

/// Whether the audit log has a line for each call. Refused calls always have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Never.
    Never,
    /// With the setting `audit = all`: reads, appends and cursors.
    Data,
    /// Always: changes and operations of the server. `audit_on_failure = refuse` refuses these.
    Change,
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rpc {
    /// Its service and name, such as `wald.v1.WalService/Append`.
    pub(crate) name: &'static str,
    /// Class of its admission.
    pub(crate) class: Class,
    /// Whether it writes: only then its errors tell an outcome.
    pub(crate) access: Access,
    /// The condition for its callers.
    pub(crate) need: Need,
    /// Whether the audit log has its calls.
    pub(crate) recorded: Recorded,
    /// Whether the owner of the store answers it, not each node. A stand-by forwards such calls.
    pub(crate) is_of_store: bool,
}

impl Rpc {
    /// Whether it changes logs and brings no records. A tenant's rates of appends count it ([`crate::auth::Amount`]).
    pub(crate) fn is_small_change(self) -> bool {
        self.class == Class::Other && self.access == Access::Write
    }

    /// Whether it is a change with one answer. It goes on without its client, because the engine would apply it anyway,
    /// and the audit log has its real end.
    pub(crate) fn goes_on(self) -> bool {
        let is_one = self.access == Access::Write && self.class != Class::AppendSession;
        // A sync changes nothing, and may wait for a bucket that is down.
        is_one && self.name != of(Method::Sync).name
    }
}

const fn write(class: Class, need: Need) -> Rpc {
    row(class, Access::Write, need)
}

const fn read(class: Class, need: Need) -> Rpc {
    row(class, Access::Read, need)
}

const fn row(class: Class, access: Access, need: Need) -> Rpc {
    Rpc {
        name: "",
        class,
        access,
        need,
        recorded: Recorded::Never,
        is_of_store: false,
    }
}

/// Whether calls of a method are about the store, not about the node that gets them.
const fn is_of_store(method: Method) -> bool {
    match method {
        Method::GetServerInfo
        | Method::ListSegments
        | Method::Verify
        | Method::Backup
        | Method::Drain => false,
        Method::Append
        | Method::AppendBatch
        | Method::AppendSession
        | Method::Sync
        | Method::Trim
        | Method::Fence
        | Method::Read
        | Method::Scan
        | Method::GetTail
        | Method::CreateLog
        | Method::UpdateLog
        | Method::DeleteLog
        | Method::GetLog
        | Method::ListLogs
        | Method::ListProducers
        | Method::ForgetProducer
        | Method::CommitCursor
        | Method::DeleteCursor
        | Method::GetCursor
        | Method::ListCursors
        | Method::GetCaller => true,
    }
}

/// Whether the audit log has the calls of a method.
const fn recorded(method: Method) -> Recorded {
    match method {
        Method::CreateLog
        | Method::UpdateLog
        | Method::DeleteLog
        | Method::Trim
        | Method::Fence
        | Method::DeleteCursor
        | Method::ForgetProducer
        | Method::ListSegments
        | Method::Verify
        | Method::Backup
        | Method::Drain => Recorded::Change,
        Method::Append
        | Method::AppendBatch
        | Method::AppendSession
        | Method::Sync
        | Method::Read
        | Method::Scan
        | Method::GetTail
        | Method::GetLog
        | Method::ListLogs
        | Method::ListProducers
        | Method::CommitCursor
        | Method::GetCursor
        | Method::ListCursors
        | Method::GetServerInfo
        | Method::GetCaller => Recorded::Data,
    }
}

/// The row of a method of the contract.
pub(crate) const fn of(method: Method) -> Rpc {
    let name = match method.path().split_at_checked(1) {
        Some((_, name)) => name,
        None => "",
    };
    Rpc {
        name,
        recorded: recorded(method),
        is_of_store: is_of_store(method),
        ..needs(method)
    }
}

/// Admission and rights of a method of the contract.
const fn needs(method: Method) -> Rpc {
    use LogRight as On;
    use Need::{Logs, Principal, Server};
    match method {
        // Batches need append, checks read, and cursors cursor: `auth/permitted.rs`. A new log needs create.
        Method::Append => write(Class::Append, Logs(On::Append)),
        Method::AppendBatch => write(Class::AppendBatch, Logs(On::Append)),
        Method::AppendSession => write(Class::AppendSession, Logs(On::Append)),
        // Of all logs: append on any.
        Method::Sync => write(Class::Other, Logs(On::Append)),
        Method::Trim => write(Class::Other, Logs(On::Trim)),
        Method::Fence => write(Class::Other, Logs(On::Fence)),
        Method::Read => read(Class::Other, Logs(On::Read)),
        Method::Scan => read(Class::Other, Logs(On::Read)),
        Method::GetTail => read(Class::Other, Logs(On::Read)),
        Method::CreateLog => write(Class::Other, Logs(On::Create)),
        Method::UpdateLog => write(Class::Other, Logs(On::Configure)),
        Method::DeleteLog => write(Class::Other, Logs(On::Delete)),
        Method::GetLog => read(Class::Other, Logs(On::List)),
        // Of a shorter prefix the answer has the caller's own names.
        Method::ListLogs => read(Class::Other, Logs(On::List)),
        Method::ListProducers => read(Class::Other, Logs(On::Read)),
        Method::ForgetProducer => write(Class::Other, Logs(On::Configure)),
        Method::CommitCursor => write(Class::Other, Logs(On::Cursor)),
        Method::DeleteCursor => write(Class::Other, Logs(On::Cursor)),
        Method::GetCursor => read(Class::Other, Logs(On::Read)),
        Method::ListCursors => read(Class::Other, Logs(On::Read)),
        // Parts of the answer need ops.
        Method::GetServerInfo => read(Class::Other, Principal),
        Method::GetCaller => read(Class::Other, Principal),
        Method::ListSegments => read(Class::Other, Server(ServerRight::Ops)),
        Method::Verify => read(Class::Other, Server(ServerRight::Ops)),
        Method::Backup => read(Class::Backup, Server(ServerRight::Backup)),
        Method::Drain => write(Class::Probe, Server(ServerRight::Drain)),
    }
}

/// The row of a request to the HTTP port that needs a right.
pub(crate) const fn of_http(right: ServerRight) -> Rpc {
    let (name, recorded) = match right {
        ServerRight::Console => ("/console", Recorded::Data),
        _ => ("/metrics", Recorded::Never),
    };
    Rpc {
        name,
        recorded,
        ..read(Class::Other, Need::Server(right))
    }
}

/// The row of a method of another service: health, reflection, echo.
pub(crate) fn foreign(path: &str) -> Rpc {
    let row = foreign_needs(path);
    // The paths of these services do not change.
    let name = match row.class {
        Class::Echo => "wald.echo.v1.EchoService",
        Class::Probe | Class::Health => "grpc.health.v1.Health",
        Class::Reflection => "grpc.reflection.ServerReflection",
        _ => "unknown",
    };
    Rpc { name, ..row }
}

fn foreign_needs(path: &str) -> Rpc {
    if path.starts_with("/wald.echo.") {
        // A start with `auth_file` refuses the setting `echo`.
        read(Class::Echo, Need::Nothing)
    } else if path == "/grpc.health.v1.Health/Check" {
        read(Class::Probe, Need::Nothing)
    } else if path.starts_with("/grpc.health.") {
        read(Class::Health, Need::Nothing)
    } else if path.starts_with("/grpc.reflection.") {
        read(Class::Reflection, Need::Principal)
    } else {
        read(Class::Other, Need::Principal)
    }
}
