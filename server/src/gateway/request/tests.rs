use axum::http::Method;
use prost::Message;

use super::super::contract::ROUTES;
use super::*;

fn route(method: &Method, path: &str) -> &'static ApiRoute {
    let mut routes = ROUTES.iter();
    routes
        .find(|route| route.method == *method && route.path == path)
        .unwrap()
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
        .collect()
}

/// A request to a log of the name `a/b`, with the cursor `c`.
fn head(
    method: &Method,
    path: &str,
    query: &str,
    sent: &[(&'static str, &str)],
) -> Result<ApiRequest, Status> {
    let route = route(method, path);
    let values = [("log", "a/b"), ("cursor", "c"), ("producer_id", "p")];
    let fields: Vec<_> = route.path_fields().collect();
    let values = values.into_iter().filter(|(name, _)| fields.contains(name));
    let uri = format!("/?{query}").parse().unwrap();
    let descriptor = route.descriptor().unwrap();
    let read = ApiRequest::read(route, &descriptor, values, &uri, &headers(sent));
    read.map_err(|fault| match fault {
        HeadFault::Fields(status) | HeadFault::Form(status) => status,
    })
}

const JSON: (&str, &str) = ("content-type", "application/json");
const RECORDS: &str = "/v1/logs/{log}/records";

fn message<M: Message + Default>(head: &ApiRequest, text: &str) -> Result<M, Status> {
    let framed = head.translate(text.as_bytes())?;
    Ok(M::decode(&framed[5..]).unwrap())
}

fn post(
    path: &str,
    query: &str,
    sent: (&'static str, &str),
    text: &str,
) -> Result<v1::AppendBatchRequest, Status> {
    let head = head(&Method::POST, path, query, &[sent, ("content-length", "9")])?;
    message(&head, text)
}

fn get<M: Message + Default>(
    path: &str,
    query: &str,
    sent: &[(&'static str, &str)],
) -> Result<M, Status> {
    message(&head(&Method::GET, path, query, sent)?, "")
}

fn data(record: &v1::Record) -> &[u8] {
    match record.payload.as_ref().unwrap() {
        v1::record::Payload::Data(data) => data,
        v1::record::Payload::Text(text) => text.as_bytes(),
    }
}

#[test]
fn path_query_and_json_fill_one_message() {
    let query = "durability=DURABILITY_WRITTEN&condition.expectedLsn=7&condition.producer.id=p";
    let text = r#"{"records": [{"text": "one"}, {"data": "dHdv", "headers": [{"key": "k"}]}]}"#;
    let request = post(RECORDS, query, JSON, text).unwrap();
    assert_eq!(request.durability(), v1::Durability::Written);
    let [batch] = &request.batches[..] else {
        panic!("{request:?}");
    };
    let records: Vec<_> = batch.records.iter().map(data).collect();
    assert_eq!(
        (batch.log.as_str(), &records[..]),
        ("a/b", &[&b"one"[..], b"two"][..])
    );
    assert_eq!(batch.records[1].headers[0].key, "k");
    let condition = batch.condition.as_ref().unwrap();
    assert_eq!(condition.expected_lsn, Some(7));
    assert_eq!(condition.producer.as_ref().unwrap().id, "p");
}

#[test]
fn records_are_sent_as_they_are() {
    let lines = "{\"a\": 1}\r\n\n two \n";
    let request = post(RECORDS, "", ("content-type", "application/x-ndjson"), lines).unwrap();
    let records: Vec<_> = request.batches[0].records.iter().map(data).collect();
    assert_eq!(records, [&br#"{"a": 1}"#[..], b" two "]);
    for kind in ["text/plain; charset=utf-8", "application/octet-stream"] {
        let request = post(RECORDS, "", ("content-type", kind), lines).unwrap();
        assert_eq!(
            data(&request.batches[0].records[0]),
            lines.as_bytes(),
            "{kind}"
        );
    }
    let none = post(RECORDS, "", ("content-type", "application/x-ndjson"), "\n").unwrap();
    assert!(none.batches[0].records.is_empty());
}

#[test]
fn spans_lists_and_empty_messages_come_from_a_query() {
    let query = "lsn=5&max_records=2&wait=1.5s&visibility=VISIBILITY_DURABLE";
    let read: v1::ReadRequest = get(RECORDS, query, &[]).unwrap();
    assert_eq!(read.start, Some(v1::read_request::Start::Lsn(5)));
    let wait = read.wait.as_ref().unwrap();
    assert_eq!((wait.seconds, wait.nanos), (1, 500_000_000));
    assert_eq!((read.max_records, read.view()), (2, v1::RecordView::Text));
    let scan: v1::ScanRequest = get("/v1/scan", "all=true&tail_offset=0&view=0", &[]).unwrap();
    assert_eq!(
        scan.selector,
        Some(v1::scan_request::Selector::All(v1::AllLogs {}))
    );
    assert_eq!(scan.view(), v1::RecordView::Unspecified);
}

#[test]
fn last_event_id_goes_on_behind_the_event_whatever_the_url_says() {
    let id = [("last-event-id", "+/8=")];
    let scan: v1::ScanRequest = get("/v1/scan", "log=a&lsn=7&follow=true", &id).unwrap();
    let cursor = Bytes::from_static(&[0xfb, 0xff]);
    assert_eq!(
        scan.start,
        Some(v1::scan_request::Start::Cursor(cursor.clone()))
    );
    assert!(scan.follow);
    // In a query a plus sign is a space.
    let scan: v1::ScanRequest = get("/v1/scan", "log=a&cursor=+/8=", &[]).unwrap();
    assert_eq!(
        scan.start,
        Some(v1::scan_request::Start::Cursor(cursor.clone()))
    );
    for start in [
        "timestampUs=1",
        "timestamp_us=1",
        "tailOffset=0",
        "tail_offset=0",
        "cursor=AA==",
    ] {
        let query = format!("log=a&{start}");
        let scan: v1::ScanRequest = get("/v1/scan", &query, &id).unwrap();
        assert_eq!(
            scan.start,
            Some(v1::scan_request::Start::Cursor(cursor.clone())),
            "{start}"
        );
    }
    let none: v1::ScanRequest = get("/v1/scan", "log=a&lsn=7", &[("last-event-id", "")]).unwrap();
    assert_eq!(none.start, Some(v1::scan_request::Start::Lsn(7)));
    let read: v1::ReadRequest = get(RECORDS, "lsn=7", &id).unwrap();
    assert_eq!(read.start, Some(v1::read_request::Start::Lsn(7)));
}

#[test]
fn cursor_is_committed_under_the_names_in_its_path() {
    let path = "/v1/logs/{log}/cursors/{cursor}";
    let head = head(&Method::PUT, path, "", &[JSON]).unwrap();
    let request: v1::CommitCursorRequest = message(&head, r#"{"lsn": "12"}"#).unwrap();
    let commit = request.commit.unwrap();
    assert_eq!(
        (commit.log.as_str(), commit.cursor.as_str(), commit.lsn),
        ("a/b", "c", 12)
    );
}

/// protobuf would merge the parameter over the names of the path.
#[test]
fn parameter_does_not_replace_fields_of_the_path_and_the_body() {
    let cursor = "/v1/logs/{log}/cursors/{cursor}";
    for (method, path, query) in [
        (Method::PUT, cursor, "commit.log=b"),
        (Method::PUT, cursor, "commit.lsn=5"),
        (Method::PATCH, "/v1/logs/{log}", "config.sync_mode=1"),
        (
            Method::PATCH,
            "/v1/logs/{log}",
            "config.retention.maxRecords=1",
        ),
    ] {
        let refused = head(&method, path, query, &[JSON]).map(drop).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{query}");
        let said = refused.message();
        assert!(
            said.contains("the path and the body have its fields"),
            "{said}"
        );
    }
}

#[test]
fn log_is_changed_in_the_fields_that_the_query_names() {
    let query = "update_mask=retention.max_records,sync_mode";
    let head = head(&Method::PATCH, "/v1/logs/{log}", query, &[JSON]).unwrap();
    let text = r#"{"retention": {"max_records": 5}}"#;
    let request: v1::UpdateLogRequest = message(&head, text).unwrap();
    assert_eq!(request.log, "a/b");
    assert_eq!(
        request.update_mask.unwrap().paths,
        ["retention.max_records", "sync_mode"]
    );
    assert_eq!(request.config.unwrap().retention.unwrap().max_records, 5);
}

#[test]
fn field_of_a_body_is_given_once_under_either_of_its_names() {
    let trim = head(&Method::POST, "/v1/logs/{log}/trim", "", &[JSON]).unwrap();
    let read = |text: &str| message::<v1::TrimRequest>(&trim, text);
    for once in [r#"{"before_lsn": "5"}"#, r#"{"beforeLsn": "5"}"#] {
        assert_eq!(read(once).unwrap().before_lsn, 5);
    }
    let twice = read(r#"{"before_lsn": "5", "beforeLsn": "500"}"#).unwrap_err();
    assert_eq!(twice.code(), tonic::Code::InvalidArgument);
    assert!(twice.message().contains("\"beforeLsn\" is there twice"));
    let text = r#"{"records": [], "condition": {"mustExist": true, "must_exist": false}}"#;
    let twice = post(RECORDS, "", JSON, text).unwrap_err();
    assert!(twice.message().contains("\"must_exist\" is there twice"));
}

#[test]
fn body_in_an_encoding_and_two_types_of_a_body_are_refused() {
    let route = route(&Method::POST, RECORDS);
    for pairs in [
        [
            ("content-encoding", "identity"),
            ("content-encoding", "gzip"),
        ],
        [
            ("content-type", "text/plain"),
            ("content-type", "application/json"),
        ],
        [
            ("content-type", "text/plain"),
            ("transfer-encoding", "gzip, chunked"),
        ],
    ] {
        let mut sent = HeaderMap::new();
        for (name, value) in pairs {
            sent.append(name, value.parse().unwrap());
        }
        assert!(body_form(route, &sent).is_err(), "{pairs:?}");
    }
    let chunked = [
        ("content-type", "text/plain"),
        ("transfer-encoding", "chunked"),
    ];
    assert_eq!(body_form(route, &headers(&chunked)), Ok(BodyForm::Raw));
}

#[test]
fn faults_name_their_field_and_the_right_form() {
    let form = |kind: &str| post(RECORDS, "", ("content-type", kind), "x").unwrap_err();
    let of_get = |query: &str| get::<v1::ScanRequest>("/v1/scan", query, &[]).unwrap_err();
    let json = |text: &str| post(RECORDS, "", JSON, text).unwrap_err();
    for (status, wanted) in [
        (
            form("application/x-www-form-urlencoded"),
            "application/x-ndjson",
        ),
        (form("application/jsonx"), "application/jsonx"),
        (
            of_get("foo=1"),
            "foo: there is no such field; there are log, prefix",
        ),
        (
            of_get("follow=yes"),
            "follow: \"yes\" is neither true nor false",
        ),
        (of_get("lsn=1&lsn=2"), "lsn: it is given twice"),
        (of_get("lsn=-1"), "lsn: "),
        (of_get("lsn=0x1"), "give a whole number"),
        (
            of_get("view=NOTHING"),
            "give one of RECORD_VIEW_UNSPECIFIED, RECORD_VIEW_TEXT",
        ),
        (of_get("cursor=%25"), "cursor: "),
        (of_get("log=%FF"), "log: the value is not UTF-8"),
        (
            of_get(&format!("{}=1", "x".repeat(10_000))),
            "there is no such field",
        ),
        (
            get::<v1::ReadRequest>(RECORDS, "wait=30", &[]).unwrap_err(),
            "give seconds, such as 30s",
        ),
        (of_get("lsn.x=1"), "lsn has no fields"),
        (of_get("view=NOTHING"), "NOTHING"),
        (
            json("{\"recrods\": []}"),
            "unrecognized field name 'recrods' at line 1 column 10",
        ),
        (json("{} {}"), "trailing characters"),
        (
            json(r#"{"records": [{"text": "a"}, {"txt": "b"}]}"#),
            "records[1]: unrecognized field name 'txt' at line 1 column 34; it is an object, and there are data, headers",
        ),
        (
            json(r#"{"records": ["a"]}"#),
            "records[0]: invalid type: string",
        ),
        (
            json(r#"{"records": [{"data": "a b"}]}"#),
            "records[0].data: ",
        ),
        (
            post(
                "/v1/logs",
                "",
                JSON,
                r#"{"config": {"sync_mode": "batch"}}"#,
            )
            .unwrap_err(),
            "give one of SYNC_MODE_UNSPECIFIED, SYNC_MODE_STRICT",
        ),
        (
            post(RECORDS, "expected_lsn=0", JSON, "{}").unwrap_err(),
            "there are durability, condition.FIELD",
        ),
        (of_get("log=a&prefix=b"), "log, prefix, all"),
        (json("[]"), "body: "),
        (
            json("{\"log\": \"c\"}"),
            "the field log is also in the path",
        ),
        (
            post(RECORDS, "condition=1", JSON, "{}").unwrap_err(),
            "condition: it has fields of its own",
        ),
        (
            post(RECORDS, "records.text=1", JSON, "{}").unwrap_err(),
            "records is a list",
        ),
    ] {
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().len() < 1000);
        assert!(
            status.message().contains(wanted),
            "{} {wanted}",
            status.message()
        );
    }
    let head = head(&Method::GET, "/v1/logs", "", &[]).unwrap();
    assert!(message::<v1::ListLogsRequest>(&head, "{}").is_err());
}

#[test]
fn number_of_objects_is_bounded_before_they_are_read() {
    let most = usize::try_from(MOST_OBJECTS).unwrap();
    let checked = |kind: &str, text: String| {
        let head = head(&Method::POST, RECORDS, "", &[("content-type", kind)]).unwrap();
        head.check(text.as_bytes())
            .map_err(|status| status.message().to_owned())
    };
    for (kind, object) in [("application/json", "{"), ("application/x-ndjson", "\n")] {
        let whole = most - usize::from(object == "\n");
        assert_eq!(checked(kind, object.repeat(whole)), Ok(()));
        let refused = checked(kind, object.repeat(whole + 1)).unwrap_err();
        assert!(refused.contains("at most 65536 are read"), "{refused}");
    }
    // Braces in strings are no objects.
    let text = format!(r#"{{"records": [{{"text": "{}\"{{"}}]}}"#, "{".repeat(most));
    assert_eq!(checked("application/json", text), Ok(()));
    assert_eq!(checked("text/plain", "{".repeat(most + 1)), Ok(()));
}

#[test]
fn number_of_keys_of_an_object_is_bounded() {
    let keys = |count: usize| {
        let keys = (0..count).map(|key| format!("\"{key}\": 1"));
        format!("{{{}}}", keys.collect::<Vec<_>>().join(", "))
    };
    assert!(unique_keys(keys(MOST_KEYS).as_bytes()).is_ok());
    let refused = unique_keys(keys(MOST_KEYS + 1).as_bytes()).unwrap_err();
    assert!(
        refused.to_string().starts_with("an object has more than"),
        "{refused}"
    );
}

#[test]
fn key_that_is_there_twice_is_refused_at_every_depth() {
    for text in [
        r#"{"records": [{"text": "a"}], "records": []}"#,
        r#"{"condition": {"expected_lsn": 1, "expected_lsn": 2}}"#,
        r#"{"records": [{"text": "a", "te\u0078t": "b"}]}"#,
    ] {
        let refused = post(RECORDS, "", JSON, text).unwrap_err();
        assert!(
            refused.message().contains("is there twice at line 1"),
            "{}",
            refused.message()
        );
    }
    let apart = r#"{"records": [{"text": "a"}, {"text": "a"}]}"#;
    assert!(post(RECORDS, "", JSON, apart).is_ok());
}
