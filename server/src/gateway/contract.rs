//! The contract: the descriptors of its messages, and the request that stands for each RPC.

use std::sync::LazyLock;

use axum::http::Method;
use prost_reflect::{DescriptorPool, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor};
use wald_proto::Method as RpcMethod;

use crate::methods::{self, Rpc};

/// Descriptors of the contract, with its comments, and of the details of errors.
static DESCRIPTORS: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let sets = [
        wald_proto::FILE_DESCRIPTOR_SET,
        tonic_types::pb::FILE_DESCRIPTOR_SET,
    ];
    let mut pool = DescriptorPool::new();
    for set in sets {
        // The build has made both sets. A test reads them.
        let added = pool.decode_file_descriptor_set(set);
        debug_assert!(added.is_ok(), "{added:?}");
    }
    pool
});

/// The descriptors of all messages.
pub(super) fn descriptors() -> &'static DescriptorPool {
    &DESCRIPTORS
}

/// The part of the request message that the path and the body fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyPart {
    /// There is no body.
    Nothing,
    /// All of it.
    Whole,
    /// The message in this field.
    Field(&'static str),
    /// The only batch of an AppendBatch. Its records may also be sent as they are.
    Records,
}

/// A request of the HTTP port that stands for an RPC.
#[derive(Debug)]
pub(super) struct ApiRoute {
    pub(super) method: Method,
    /// The path. A name in braces is a field of the part in the body, or of the message.
    pub(super) path: &'static str,
    pub(super) rpc: RpcMethod,
    pub(super) body: BodyPart,
}

const fn route(method: Method, path: &'static str, rpc: RpcMethod, body: BodyPart) -> ApiRoute {
    ApiRoute {
        method,
        path,
        rpc,
        body,
    }
}

/// All requests. The RPCs that are missing are streams of requests, or for operators.
pub(super) static ROUTES: [ApiRoute; 21] = {
    use BodyPart::{Field, Nothing, Records, Whole};
    use RpcMethod as Rpc;
    const LOGS: &str = "/v1/logs";
    const LOG: &str = "/v1/logs/{log}";
    const RECORDS: &str = "/v1/logs/{log}/records";
    const CURSOR: &str = "/v1/logs/{log}/cursors/{cursor}";
    const PRODUCER: &str = "/v1/logs/{log}/producers/{producer_id}";
    [
        route(Method::POST, RECORDS, Rpc::AppendBatch, Records),
        route(Method::POST, "/v1/batch", Rpc::AppendBatch, Whole),
        route(Method::GET, RECORDS, Rpc::Read, Nothing),
        route(Method::GET, "/v1/scan", Rpc::Scan, Nothing),
        route(Method::GET, "/v1/logs/{log}/tail", Rpc::GetTail, Nothing),
        route(Method::POST, "/v1/logs/{log}/trim", Rpc::Trim, Whole),
        route(Method::POST, "/v1/logs/{log}/fence", Rpc::Fence, Whole),
        route(Method::POST, "/v1/sync", Rpc::Sync, Whole),
        route(Method::GET, LOGS, Rpc::ListLogs, Nothing),
        route(Method::POST, LOGS, Rpc::CreateLog, Whole),
        route(Method::GET, LOG, Rpc::GetLog, Nothing),
        route(Method::PATCH, LOG, Rpc::UpdateLog, Field("config")),
        route(Method::DELETE, LOG, Rpc::DeleteLog, Nothing),
        route(
            Method::GET,
            "/v1/logs/{log}/cursors",
            Rpc::ListCursors,
            Nothing,
        ),
        route(Method::GET, CURSOR, Rpc::GetCursor, Nothing),
        route(Method::PUT, CURSOR, Rpc::CommitCursor, Field("commit")),
        route(Method::DELETE, CURSOR, Rpc::DeleteCursor, Nothing),
        route(
            Method::GET,
            "/v1/logs/{log}/producers",
            Rpc::ListProducers,
            Nothing,
        ),
        route(Method::DELETE, PRODUCER, Rpc::ForgetProducer, Nothing),
        route(Method::GET, "/v1/server", Rpc::GetServerInfo, Nothing),
        route(Method::GET, "/v1/caller", Rpc::GetCaller, Nothing),
    ]
};

impl ApiRoute {
    /// The row of its RPC.
    pub(super) fn row(&self) -> Rpc {
        methods::of(self.rpc)
    }

    /// The descriptor of its RPC. `None` only if the descriptors are not the contract's.
    pub(super) fn descriptor(&self) -> Option<MethodDescriptor> {
        let (service, name) = self.rpc.path().strip_prefix('/')?.split_once('/')?;
        let service = descriptors().get_service_by_name(service)?;
        service.methods().find(|method| method.name() == name)
    }

    /// Whether it answers with a stream.
    pub(super) fn is_stream(&self) -> bool {
        self.rpc == RpcMethod::Scan
    }

    /// The field whose message the body fills; `None` if that is the whole message.
    pub(super) fn part(&self, message: &MessageDescriptor) -> Option<FieldDescriptor> {
        match self.body {
            BodyPart::Nothing | BodyPart::Whole => None,
            BodyPart::Field(name) => message.get_field_by_name(name),
            BodyPart::Records => message.get_field_by_name("batches"),
        }
    }

    /// The message that the body fills.
    pub(super) fn filled(&self, message: &MessageDescriptor) -> MessageDescriptor {
        match self.part(message).as_ref().map(FieldDescriptor::kind) {
            Some(Kind::Message(part)) => part,
            _ => message.clone(),
        }
    }

    /// The names in its path, in order.
    pub(super) fn path_fields(&self) -> impl Iterator<Item = &'static str> {
        let parts = self.path.split('/');
        parts.filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    }
}

/// Whether JSON and queries write the message as one value: a time, a span or a mask of fields.
pub(super) fn is_value(message: &MessageDescriptor) -> bool {
    message.full_name().starts_with("google.protobuf.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_stands_for_an_rpc_and_fills_fields_that_exist() {
        for route in &ROUTES {
            let method = route.descriptor().unwrap();
            let message = method.input();
            let part = route.part(&message);
            assert_eq!(
                part.is_some(),
                matches!(route.body, BodyPart::Field(_) | BodyPart::Records)
            );
            let filled = route.filled(&message);
            let has = |field| {
                let mut messages = [&filled, &message].into_iter();
                messages.any(|message| message.get_field_by_name(field).is_some())
            };
            for field in route.path_fields() {
                assert!(has(field), "{route:?} {field}");
            }
            assert_eq!(method.is_server_streaming(), route.is_stream());
            assert!(!method.is_client_streaming());
        }
    }

    #[test]
    fn every_rpc_has_a_request_but_for_sessions_and_operators() {
        let missing = RpcMethod::ALL
            .iter()
            .filter(|rpc| !ROUTES.iter().any(|route| route.rpc == **rpc));
        let missing: Vec<_> = missing.map(|rpc| format!("{rpc:?}")).collect();
        assert_eq!(
            missing,
            [
                "Append",
                "AppendSession",
                "ListSegments",
                "Verify",
                "Backup",
                "Drain"
            ]
        );
    }

    #[test]
    fn descriptors_of_errors_are_known() {
        for name in [
            "google.rpc.Status",
            "google.rpc.ErrorInfo",
            "google.rpc.RetryInfo",
        ] {
            assert!(descriptors().get_message_by_name(name).is_some(), "{name}");
        }
    }
}
