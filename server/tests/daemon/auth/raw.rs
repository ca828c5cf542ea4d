//! Calls of any method, with messages as bytes.

use prost::Message as _;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Status};
use wald_proto::{Method, v1};

use bytes::{Buf as _, BufMut as _};

use crate::support::{append, part};

/// Messages as they are on the wire.
#[derive(Default)]
struct Bytes;

impl Codec for Bytes {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut bytes = vec![0; from.remaining()];
        from.copy_to_slice(&mut bytes);
        Ok(Some(bytes))
    }
}

/// Calls the method with one message, and returns the answers until the end. On the wire a unary call is a stream of one
/// message.
pub(crate) async fn call(
    channel: &Channel,
    path: &'static str,
    authorization: Option<&str>,
    message: Vec<u8>,
) -> Result<Vec<Vec<u8>>, Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let mut request = Request::new(message);
    if let Some(value) = authorization {
        let value = value.parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    let path = http::uri::PathAndQuery::from_static(path);
    let answer = client.server_streaming(request, path, Bytes).await?;
    let mut stream = answer.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

/// A good request of the method that names the log.
pub(crate) fn request(method: Method, log: &str) -> Vec<u8> {
    let log = log.to_owned();
    match method {
        Method::Append => append(&log, "x").encode_to_vec(),
        Method::AppendBatch => batch(&log).encode_to_vec(),
        Method::AppendSession => v1::AppendSessionRequest {
            request_id: 1,
            batch: Some(batch(&log)),
            ..v1::AppendSessionRequest::default()
        }
        .encode_to_vec(),
        Method::Read => v1::ReadRequest {
            log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::Scan => v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Log(log)),
            ..Default::default()
        }
        .encode_to_vec(),
        Method::GetTail => v1::GetTailRequest {
            log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::Sync => v1::SyncRequest {
            log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::Trim => v1::TrimRequest {
            log,
            before_lsn: 1,
            log_id: None,
        }
        .encode_to_vec(),
        Method::Fence => v1::FenceRequest {
            log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::CreateLog => v1::CreateLogRequest { log, config: None }.encode_to_vec(),
        Method::GetLog => v1::GetLogRequest { log }.encode_to_vec(),
        Method::ListLogs => v1::ListLogsRequest {
            prefix: log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::UpdateLog => v1::UpdateLogRequest {
            log,
            config: Some(v1::LogConfig {
                max_record_bytes: 100,
                ..Default::default()
            }),
            update_mask: Some(prost_types::FieldMask {
                paths: vec!["max_record_bytes".to_owned()],
            }),
        }
        .encode_to_vec(),
        Method::DeleteLog => v1::DeleteLogRequest {
            log,
            log_id: None,
            shred: false,
        }
        .encode_to_vec(),
        Method::ListProducers => v1::ListProducersRequest {
            log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::ForgetProducer => v1::ForgetProducerRequest {
            log,
            producer_id: "p".to_owned(),
            ..Default::default()
        }
        .encode_to_vec(),
        Method::CommitCursor => v1::CommitCursorRequest {
            commit: Some(v1::CursorCommit {
                log,
                cursor: "c".to_owned(),
                lsn: 1,
                ..Default::default()
            }),
        }
        .encode_to_vec(),
        Method::GetCursor => v1::GetCursorRequest {
            log,
            cursor: "c".to_owned(),
            ..Default::default()
        }
        .encode_to_vec(),
        Method::ListCursors => v1::ListCursorsRequest {
            log,
            ..Default::default()
        }
        .encode_to_vec(),
        Method::DeleteCursor => v1::DeleteCursorRequest {
            log,
            cursor: "c".to_owned(),
            ..Default::default()
        }
        .encode_to_vec(),
        Method::GetServerInfo
        | Method::GetCaller
        | Method::ListSegments
        | Method::Verify
        | Method::Backup
        | Method::Drain => Vec::new(),
    }
}

fn batch(log: &str) -> v1::AppendBatchRequest {
    v1::AppendBatchRequest {
        batches: vec![part(log, &["x"])],
        ..Default::default()
    }
}
