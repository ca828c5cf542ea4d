//! gRPC over HTTP/2 by the book: the parts of a request's head that must be right before anything is
//! made of the request.
//!
//! A client that is refused here cannot read gRPC's answers, or describes a call in a way that
//! has no meaning. The sentence in the answer names the right form. `te: trailers` may be
//! missing, since no proxy between here and its client is known.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use tonic::Status;
use tonic::body::Body;

use super::HttpUrl;
use crate::methods::Rpc;
use crate::metrics::RequestHead;
use crate::status::{self, Access};

static GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Characters of a header's value that its refusal repeats.
const MAX_SHOWN: usize = 100;

/// Returns the called method, or the answer to a request that calls none.
pub(super) fn check<B>(
    request: &Request<B>,
    head: RequestHead,
    http: Option<HttpUrl>,
) -> Result<Rpc, Box<Response<Body>>> {
    let headers = request.headers();
    // A method that is not known could be one that writes.
    let access = head.rpc.map_or(Access::Write, |rpc| rpc.access);
    if request.method() != Method::POST {
        let why = format!(
            "the method is {}; send POST{}",
            request.method(),
            elsewhere(http)
        );
        return Err(not_grpc(
            StatusCode::METHOD_NOT_ALLOWED,
            ":method",
            &why,
            access,
        ));
    }
    if !is_grpc(headers) {
        let given = headers.get(CONTENT_TYPE).map_or_else(String::new, shown);
        let why = match given.starts_with("application/json") {
            true => format!(
                "{given:?} is not gRPC: grpcurl translates JSON (grpcurl -plaintext -d '{{...}}' \
                 HOST:PORT {}), and so does the HTTP API{}",
                request.uri().path().trim_start_matches('/'),
                elsewhere(http)
            ),
            false => format!(
                "{given:?} is not gRPC; send application/grpc{}",
                elsewhere(http)
            ),
        };
        let code = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(not_grpc(code, "content-type", &why, access));
    }
    let refused = |status: Status| Err(Box::new(status.into_http()));
    let Some(rpc) = head.rpc else {
        return refused(status::unknown_method(request.uri().path()));
    };
    if let Some(encoding) = headers.get(&GRPC_ENCODING)
        && encoding != "identity"
    {
        return refused(status::encoding_not_supported(&shown(encoding), access));
    }
    if head.timeout.is_err() {
        let given = headers.get(&GRPC_TIMEOUT).map_or_else(String::new, shown);
        let why = format_args!(
            "{given:?} is not a time; send at most 8 digits and a unit out of H, M, S, m, u, n"
        );
        return refused(status::malformed("grpc-timeout", why, access));
    }
    Ok(rpc)
}

/// Whether the content type is `application/grpc`, `application/grpc+proto`, or one of them with
/// parameters. `application/grpc-web` begins in the same way and is another protocol.
fn is_grpc(headers: &HeaderMap) -> bool {
    let Some(given) = headers.get(CONTENT_TYPE) else {
        return false;
    };
    let given = given.as_bytes();
    if given == b"application/grpc" {
        return true;
    }
    let essence = given.split(|byte| *byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    ["application/grpc", "application/grpc+proto"]
        .iter()
        .any(|known| essence.eq_ignore_ascii_case(known.as_bytes()))
}

/// The value of a header, as far as people want to see it.
fn shown(value: &HeaderValue) -> String {
    let text = String::from_utf8_lossy(value.as_bytes());
    text.chars().take(MAX_SHOWN).collect()
}

/// The right port for clients that do not speak gRPC.
fn elsewhere(http: Option<HttpUrl>) -> String {
    http.map_or_else(String::new, |http| {
        format!("; HTTP has its own port: {http}")
    })
}

/// An answer that people and HTTP clients can read, and gRPC clients as well.
fn not_grpc(code: StatusCode, field: &str, why: &str, access: Access) -> Box<Response<Body>> {
    let text = Bytes::from(format!(
        "this port speaks gRPC over HTTP/2: {field}: {why}\n"
    ));
    let mut answer = status::malformed(field, why, access).into_http::<Body>();
    *answer.status_mut() = code;
    let headers = answer.headers_mut();
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    headers.insert(CONTENT_TYPE, plain);
    if code == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("POST"));
    }
    *answer.body_mut() = Body::new(Text(Some(text)));
    Box::new(answer)
}

/// A body of one piece.
struct Text(Option<Bytes>);

impl http_body::Body for Text {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        std::task::Poll::Ready(self.0.take().map(|text| Ok(Frame::data(text))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic_types::StatusExt as _;

    use super::*;
    use crate::auth::LogRight;
    use crate::methods::{Class, Need, Recorded};

    const WRITE: RequestHead = RequestHead {
        rpc: Some(Rpc {
            name: "wald.v1.WalService/Append",
            recorded: Recorded::Data,
            class: Class::Append,
            access: Access::Write,
            need: Need::Logs(LogRight::Append),
            is_of_store: true,
        }),
        timeout: Ok(()),
    };

    fn request(headers: &[(&'static str, &str)]) -> Request<()> {
        let mut request = Request::post("/wald.v1.WalService/Append")
            .body(())
            .unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        request
    }

    /// The HTTP status, and the code that a gRPC client makes of the refusal.
    fn refused(request: &Request<()>, head: RequestHead) -> (u16, Status) {
        let http = Some(HttpUrl {
            address: "10.0.0.1:6926".parse().unwrap(),
            has_tls: false,
        });
        let refusal = check(request, head, http).unwrap_err();
        let status = Status::from_header_map(refusal.headers()).unwrap();
        let metadata = status.get_details_error_info().unwrap().metadata;
        assert_eq!(metadata["outcome"], "NOT_APPLIED");
        assert_eq!(metadata["retry"], "NEVER");
        (refusal.status().as_u16(), status)
    }

    #[test]
    fn content_type_is_that_of_grpc_and_of_nothing_similar() {
        for good in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc; charset=utf-8",
            "Application/gRPC+proto;x=y",
        ] {
            let request = request(&[("content-type", good)]);
            assert!(check(&request, WRITE, None).is_ok(), "{good}");
        }
        for bad in [
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/grpc+json",
            "application/grpcx",
            "application/json",
            "text/plain",
            "",
        ] {
            let (code, status) = refused(&request(&[("content-type", bad)]), WRITE);
            assert_eq!((code, status.code()), (415, Code::InvalidArgument), "{bad}");
            assert!(status.message().contains("http://10.0.0.1:6926"), "{bad}");
        }
        assert_eq!(refused(&request(&[]), WRITE).0, 415);
        let (_, status) = refused(&request(&[("content-type", "application/json")]), WRITE);
        let command = "grpcurl -plaintext -d '{...}' HOST:PORT wald.v1.WalService/Append";
        assert!(status.message().contains(command), "{status}");
    }

    #[test]
    fn method_other_than_post_is_named_with_the_one_allowed() {
        let mut request = request(&[("content-type", "application/grpc")]);
        *request.method_mut() = Method::GET;
        let refusal = check(&request, WRITE, None).unwrap_err();
        assert_eq!(refusal.status(), 405);
        assert_eq!(refusal.headers()["allow"], "POST");
    }

    #[test]
    fn head_without_meaning_is_refused_with_its_value() {
        let grpc = ("content-type", "application/grpc");
        let timeout = RequestHead {
            timeout: Err(crate::metrics::MalformedTimeout),
            ..WRITE
        };
        let (code, status) = refused(&request(&[grpc, ("grpc-timeout", "abc")]), timeout);
        assert_eq!((code, status.code()), (200, Code::InvalidArgument));
        assert!(
            status
                .message()
                .starts_with("grpc-timeout: \"abc\" is not a time")
        );
        let (_, status) = refused(&request(&[grpc, ("grpc-encoding", "gzip")]), WRITE);
        assert_eq!(status.code(), Code::Unimplemented);
        assert_eq!(
            status.metadata().get("grpc-accept-encoding").unwrap(),
            "identity"
        );
        let unknown = RequestHead { rpc: None, ..WRITE };
        let (_, status) = refused(&request(&[grpc]), unknown);
        assert_eq!(status.code(), Code::Unimplemented);
        assert!(status.message().contains("\"/wald.v1.WalService/Append\""));
    }
}
