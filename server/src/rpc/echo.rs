//! EchoService: measures the cost of the transport alone. Nothing here knows the engine, and no
//! layer does anything to these calls (`metrics/calls.rs`, `admission.rs`).

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use bytes::Bytes;
use futures_core::Stream as _;
use futures_util::stream;
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};
use wald_proto::echo::echo_service_server::EchoService;
use wald_proto::echo::{
    EchoRequest, EchoResponse, EchoScanRequest, EchoScanResponse, EchoSessionRequest,
    EchoSessionResponse,
};

use super::{Answers, RpcResult};
use crate::drain::{Phase, draining};
use crate::status::{self, Access};

/// Largest message that is made here.
const MAX_ANSWER_BYTES: u64 = 4 << 20;

/// The service. Its streams end when draining begins, as a session does.
pub(crate) struct Echo {
    phase: watch::Receiver<Phase>,
    zeros: Bytes,
}

impl Echo {
    pub(crate) fn new(phase: watch::Receiver<Phase>) -> Self {
        let largest = usize::try_from(MAX_ANSWER_BYTES).unwrap_or(usize::MAX);
        Self {
            phase,
            zeros: Bytes::from(vec![0; largest]),
        }
    }

    /// A payload of that size, which costs no copy.
    fn payload(&self, bytes: u32) -> Result<Bytes, Status> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        if length > self.zeros.len() {
            return Err(too_large());
        }
        Ok(self.zeros.slice(..length))
    }
}

fn too_large() -> Status {
    Status::invalid_argument(format!(
        "messages of echo have at most {MAX_ANSWER_BYTES} bytes"
    ))
}

#[tonic::async_trait]
impl EchoService for Echo {
    type EchoSessionStream = Answers<EchoSessionResponse>;
    type EchoScanStream = Answers<EchoScanResponse>;

    async fn echo(&self, request: Request<EchoRequest>) -> RpcResult<EchoResponse> {
        let request = request.into_inner();
        Ok(Response::new(EchoResponse {
            records: count(&request.records),
            data: self.payload(request.answer_bytes)?,
        }))
    }

    async fn echo_session(
        &self,
        request: Request<Streaming<EchoSessionRequest>>,
    ) -> RpcResult<Self::EchoSessionStream> {
        let mut phase = self.phase.clone();
        let requests = request.into_inner();
        let drained = Box::pin(async move { draining(&mut phase).await });
        let answers = stream::unfold((requests, drained), async |(mut requests, mut drained)| {
            let answer = poll_fn(|context| match pin!(&mut requests).poll_next(context) {
                Poll::Ready(request) => Poll::Ready(request.map(|request| match request {
                    Ok(request) => Ok(answer(request)),
                    Err(status) => Err(status::received(status, Access::Read)),
                })),
                // Only looked at when there is nothing else to do.
                Poll::Pending => drained
                    .as_mut()
                    .poll(context)
                    .map(|()| Some(Err(status::draining()))),
            })
            .await;
            answer.map(|answer| (answer, (requests, drained)))
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn echo_scan(
        &self,
        request: Request<EchoScanRequest>,
    ) -> RpcResult<Self::EchoScanStream> {
        let request = request.into_inner();
        let each = request.message_records.max(1);
        // A payload of no bytes still takes its tag and length.
        if u64::from(each) * (u64::from(request.record_bytes) + 2) > MAX_ANSWER_BYTES {
            return Err(too_large());
        }
        let payload = self.payload(request.record_bytes)?;
        let phase = self.phase.clone();
        let messages = stream::unfold(request.records, move |left| {
            let records = left.min(u64::from(each));
            let ends = records == 0 || *phase.borrow() == Phase::Draining;
            let message = (!ends).then(|| EchoScanResponse {
                records: (0..records).map(|_| payload.clone()).collect(),
            });
            std::future::ready(message.map(|message| (Ok(message), left - records)))
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

fn answer(request: EchoSessionRequest) -> EchoSessionResponse {
    EchoSessionResponse {
        request_id: request.request_id,
        records: count(&request.records),
    }
}

fn count(records: &[Bytes]) -> u64 {
    u64::try_from(records.len()).unwrap_or(u64::MAX)
}
