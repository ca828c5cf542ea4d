//! An object store for these tests: the part of S3 that a replica uses, in memory, on a port of its own. It looks at the names
//! of keys, and not at signatures; `.ci/lib/objects.py` does.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::watch;

/// Maximum number of names in one answer: small, so that lists have several pages.
const PAGE: usize = 100;

/// State of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Requests are answered.
    Answers,
    /// Requests wait until this changes.
    Hangs,
}

struct Object {
    tag: u64,
    metadata: HeaderMap,
    content: axum::body::Bytes,
}

#[derive(Default)]
struct Objects {
    /// Number of writes, which makes tags.
    writes: u64,
    objects: BTreeMap<String, Object>,
}

/// Reads of these objects wait.
#[derive(Default)]
struct HeldReads {
    /// Parts of their names; empty: none waits.
    parts: Vec<String>,
    /// Names of the objects whose reads wait.
    names: Vec<String>,
}

struct Shared {
    objects: Mutex<Objects>,
    mood: watch::Sender<Mood>,
    held: watch::Sender<HeldReads>,
    /// Names of the keys that are let in; empty: all.
    keys: Mutex<Vec<String>>,
    refusals: AtomicUsize,
}

impl Shared {
    /// Whether the store lets a request in.
    fn admits(&self, headers: &HeaderMap) -> bool {
        let keys = self.keys.lock().unwrap();
        let given = headers.get(header::AUTHORIZATION);
        let given = given.map_or("", |given| given.to_str().unwrap());
        let admits = keys.is_empty()
            || keys
                .iter()
                .any(|key| given.contains(&format!("Credential={key}/")));
        self.refusals
            .fetch_add(usize::from(!admits), Ordering::Relaxed);
        admits
    }

    /// Waits while reads of this object are held.
    async fn wait(&self, name: &str) {
        let is_held = |held: &HeldReads| {
            let mut parts = held.parts.iter();
            parts.any(|part| name.contains(part.as_str()))
        };
        let mut changes = self.held.subscribe();
        if !is_held(&changes.borrow_and_update()) {
            return;
        }
        self.held
            .send_modify(|held| held.names.push(name.to_owned()));
        changes.wait_for(|held| !is_held(held)).await.unwrap();
        self.held
            .send_modify(|held| held.names.retain(|held| held != name));
    }
}

/// The server. Its thread ends with the process.
pub(crate) struct Store {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Store {
    pub(crate) fn start() -> Self {
        let shared = Arc::new(Shared {
            objects: Mutex::default(),
            mood: watch::Sender::new(Mood::Answers),
            held: watch::Sender::new(HeldReads::default()),
            keys: Mutex::default(),
            refusals: AtomicUsize::new(0),
        });
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&shared));
        std::thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, routes).await.unwrap();
            });
        });
        Self { shared, address }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn enter(&self, mood: Mood) {
        self.shared.mood.send_replace(mood);
    }

    /// Lets reads of objects whose names contain one of `parts` wait. Others go on.
    pub(crate) fn hold(&self, parts: Vec<String>) {
        self.shared.held.send_modify(|held| held.parts = parts);
    }

    /// Names of the objects whose reads wait.
    pub(crate) fn held(&self) -> Vec<String> {
        self.shared.held.borrow().names.clone()
    }

    /// Lets only these keys in.
    pub(crate) fn accept(&self, keys: &[&str]) {
        let keys = keys.iter().map(|&key| key.to_owned()).collect();
        *self.shared.keys.lock().unwrap() = keys;
    }

    /// Number of requests with other keys.
    pub(crate) fn refusals(&self) -> usize {
        self.shared.refusals.load(Ordering::Relaxed)
    }

    /// Replaces the content of an object with that of `change`, or removes it.
    pub(crate) fn change(&self, name: &str, change: impl FnOnce(Vec<u8>) -> Option<Vec<u8>>) {
        let mut objects = self.shared.objects.lock().unwrap();
        let content = objects.objects[name].content.to_vec();
        match change(content) {
            Some(content) => objects.objects.get_mut(name).unwrap().content = content.into(),
            None => drop(objects.objects.remove(name)),
        }
    }

    /// Adds an object, or replaces its content.
    pub(crate) fn add(&self, name: &str, content: Vec<u8>) {
        let mut objects = self.shared.objects.lock().unwrap();
        objects.put(name.to_owned(), &HeaderMap::new(), content.into());
    }

    /// The content of an object.
    pub(crate) fn content(&self, name: &str) -> Vec<u8> {
        let objects = self.shared.objects.lock().unwrap();
        objects.objects[name].content.to_vec()
    }

    /// Names of the objects that begin with `prefix`.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let objects = self.shared.objects.lock().unwrap();
        let names = objects.objects.keys();
        let names = names.filter(|name| name.starts_with(prefix));
        names.cloned().collect()
    }

    /// The content of an object that is text.
    pub(crate) fn text(&self, name: &str) -> String {
        String::from_utf8(self.content(name)).unwrap()
    }
}

fn refused(status: StatusCode, code: &str) -> Response {
    let text = format!("<Error><Code>{code}</Code><Message>refused</Message></Error>");
    (status, text).into_response()
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let mut mood = shared.mood.subscribe();
    let waits = mood.wait_for(|mood| *mood == Mood::Answers);
    waits.await.unwrap();
    let (head, body) = request.into_parts();
    let body = to_bytes(body, 64 << 20).await.unwrap();
    let key = decoded(head.uri.path().trim_start_matches('/'));
    if head.method == Method::GET {
        shared.wait(&key).await;
    }
    if !shared.admits(&head.headers) {
        return refused(StatusCode::FORBIDDEN, "InvalidAccessKeyId");
    }
    let query = head.uri.query().unwrap_or_default();
    let query: BTreeMap<String, String> = query.split('&').map(pair).collect();
    let mut objects = shared.objects.lock().unwrap();
    match (&head.method, key.split_once('/')) {
        (&Method::GET, None | Some((_, ""))) => objects.list(&key, &query),
        (&Method::POST, None | Some((_, ""))) if query.contains_key("delete") => {
            let bucket = key.trim_end_matches('/');
            let text = String::from_utf8(body.to_vec()).unwrap();
            let keys = text.split("<Key>").skip(1);
            let mut done = String::from("<DeleteResult>");
            for key in keys.map(|rest| rest.split("</Key>").next().unwrap()) {
                objects.objects.remove(&format!("{bucket}/{key}"));
                done += &format!("<Deleted><Key>{key}</Key></Deleted>");
            }
            (done + "</DeleteResult>").into_response()
        }
        (&Method::PUT, Some(_)) if query.contains_key("uploadId") => not_built(),
        (&Method::PUT, Some(_)) => objects.put(key, &head.headers, body),
        (&Method::DELETE, Some(_)) => {
            objects.objects.remove(&key);
            StatusCode::NO_CONTENT.into_response()
        }
        (method @ (&Method::GET | &Method::HEAD), Some(_)) => {
            objects.get(&key, &head.headers, method == Method::HEAD)
        }
        _ => not_built(),
    }
}

fn not_built() -> Response {
    refused(StatusCode::NOT_IMPLEMENTED, "NotImplemented")
}

fn pair(text: &str) -> (String, String) {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    (decoded(name), decoded(value))
}

/// Text without its percent signs.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).unwrap()
}

impl Objects {
    /// One page of the second version of lists.
    fn list(&self, bucket: &str, query: &BTreeMap<String, String>) -> Response {
        if query.contains_key("delimiter") {
            return not_built();
        }
        let bucket = format!("{}/", bucket.trim_end_matches('/'));
        let given = |name: &str| query.get(name).map_or("", String::as_str);
        let after = given("continuation-token").max(given("start-after"));
        let names = self.objects.iter().filter_map(|(name, object)| {
            let name = name.strip_prefix(&bucket)?;
            let is_listed = name.starts_with(given("prefix")) && name > after;
            is_listed.then_some((name, object.content.len()))
        });
        let mut names: Vec<_> = names.take(PAGE + 1).collect();
        let has_more = names.len() > PAGE;
        names.truncate(PAGE);
        let mut text = String::from("<ListBucketResult>");
        for (name, bytes) in &names {
            text += &format!(
                "<Contents><Key>{name}</Key><Size>{bytes}</Size>\
                 <LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
            );
        }
        if let Some((last, _)) = names.last().filter(|_| has_more) {
            text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
        }
        (text + "</ListBucketResult>").into_response()
    }

    fn put(&mut self, key: String, headers: &HeaderMap, content: axum::body::Bytes) -> Response {
        let tag = self.objects.get(&key).map(|object| quoted(object.tag));
        let wanted = headers.get(header::IF_MATCH);
        let holds = match (wanted, headers.get(header::IF_NONE_MATCH)) {
            (Some(_), _) if tag.is_none() => {
                return refused(StatusCode::NOT_FOUND, "NoSuchKey");
            }
            (Some(wanted), _) => tag.as_ref() == Some(wanted),
            (None, Some(_)) => tag.is_none(),
            (None, None) => true,
        };
        if !holds {
            return refused(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
        }
        let metadata = headers.iter();
        let metadata = metadata.filter(|(name, _)| name.as_str().starts_with("x-amz-meta-"));
        self.writes += 1;
        let object = Object {
            tag: self.writes,
            metadata: metadata
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            content,
        };
        self.objects.insert(key, object);
        [(header::ETAG, quoted(self.writes))].into_response()
    }

    fn get(&self, key: &str, headers: &HeaderMap, head_only: bool) -> Response {
        let Some(object) = self.objects.get(key) else {
            return refused(StatusCode::NOT_FOUND, "NoSuchKey");
        };
        let whole = object.content.len();
        let mut response = Response::builder()
            .header(header::ETAG, quoted(object.tag))
            .header(header::LAST_MODIFIED, "Sat, 28 Nov 2026 00:00:00 GMT");
        for (name, value) in &object.metadata {
            let name: &HeaderName = name;
            response = response.header(name, value);
        }
        let range = headers.get(header::RANGE);
        let range = range.map(|range| range.to_str().unwrap().trim_start_matches("bytes="));
        let content = match range.and_then(|range| range.split_once('-')) {
            None => object.content.clone(),
            Some((first, last)) => {
                let (first, last) = match (first, last) {
                    ("", length) => (whole.saturating_sub(length.parse().unwrap()), whole),
                    (first, "") => (first.parse().unwrap(), whole),
                    (first, last) => (
                        first.parse().unwrap(),
                        whole.min(last.parse::<usize>().unwrap() + 1),
                    ),
                };
                if first >= last {
                    return refused(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange");
                }
                let shown = format!("bytes {first}-{}/{whole}", last - 1);
                response = response
                    .status(StatusCode::PARTIAL_CONTENT)
                    .header(header::CONTENT_RANGE, shown);
                object.content.slice(first..last)
            }
        };
        let body = match head_only {
            true => {
                response = response.header(header::CONTENT_LENGTH, whole);
                Body::empty()
            }
            false => Body::from(content),
        };
        response.body(body).unwrap()
    }
}

fn quoted(tag: u64) -> HeaderValue {
    format!("\"{tag}\"").parse().unwrap()
}
