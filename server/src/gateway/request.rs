//! A request of the HTTP port as the message of a call.
//!
//! ```text
//! path    /v1/logs/{log}/records ─┐
//! query   ?durability=…          ─┼─▶ HeadFields ─┐
//! headers last-event-id          ─┘               ├─▶ message of gRPC
//! body    JSON, or records as they are ───────────┘
//! ```
//!
//! Names and JSON follow the mapping of protobuf: <https://protobuf.dev/programming-guides/json/>. The message is put
//! together of encoded parts: protobuf merges messages by joining their bytes.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use axum::http::{HeaderMap, HeaderName, Uri, header};
use bytes::{BufMut as _, Bytes, BytesMut};
use percent_encoding::percent_decode_str;
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor, ReflectMessage as _,
};
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use serde_path_to_error::{Path, Segment, Track};
use tonic::Status;
use wald_proto::{Method as RpcMethod, v1};

use super::contract::{ApiRoute, BodyPart, is_value};
use crate::grpc::{Translation, framed};
use crate::status::{self, Access};

/// Sent by a browser that opens a stream of events again: the id of the last event that it has got.
static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The parameter that decides how records are shown, and its value where a request leaves it out: payloads that are text come as
/// text.
pub(super) const VIEW: &str = "view";
pub(super) const DEFAULT_VIEW: &str = "RECORD_VIEW_TEXT";

/// Most objects in the JSON of one request, and most lines: 1,000 records with 32 headers each, and as many more.
/// The tree of an object takes about 1 KiB, so that the one translation at a time takes 64 MiB at most.
const MOST_OBJECTS: u64 = 1 << 16;

/// Most keys of one object, far more than any message has fields.
const MOST_KEYS: usize = 1_000;

/// Characters of a parameter's name that its refusal repeats.
const MOST_SHOWN: usize = 100;

/// The form of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyForm {
    /// The message, or its part.
    Json,
    /// Each line is a record.
    Lines,
    /// All of it is one record.
    Raw,
}

/// Fields that path, query and headers set.
#[derive(Debug)]
struct HeadFields {
    /// Fields of the part that the body fills.
    part: DynamicMessage,
    /// The others. Without a part this is empty.
    outer: DynamicMessage,
}

/// A request whose head is read.
#[derive(Debug)]
pub(super) struct ApiRequest {
    form: BodyForm,
    has_body: bool,
    /// Whether an empty body is a mistake: it would set a cursor to 0, or change nothing.
    needs_body: bool,
    /// The field that holds the part.
    field: Option<FieldDescriptor>,
    fields: HeadFields,
    access: Access,
}

/// The reason why a head is refused.
#[derive(Debug)]
pub(super) enum HeadFault {
    /// A fault in path or query.
    Fields(Status),
    /// The body has a form that is not read.
    Form(Status),
}

impl ApiRequest {
    /// Reads the head of a request. `path`: names and values of the path, decoded.
    ///
    /// # Errors
    /// If a field does not exist, is given twice or has a wrong value, or if the body has an unknown form.
    pub(super) fn read<'p>(
        route: &ApiRoute,
        method: &MethodDescriptor,
        path: impl Iterator<Item = (&'p str, &'p str)>,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Self, HeadFault> {
        let access = route.row().access;
        let malformed = |field: &str, why: &str| {
            let end = field.char_indices().nth(MOST_SHOWN);
            let shown = end.map_or(field, |(end, _)| &field[..end]);
            HeadFault::Fields(status::malformed(shown, why, access))
        };
        let form = body_form(route, headers)
            .map_err(|why| HeadFault::Form(status::malformed("content-type", why, access)))?;
        let message = method.input();
        let field = route.part(&message);
        let filled = route.filled(&message);
        let mut query =
            parameters(uri).map_err(|name| malformed(&name, "the value is not UTF-8"))?;
        add_defaults(route, &message, headers, &mut query)
            .map_err(|why| malformed(LAST_EVENT_ID.as_str(), &why))?;
        let (mut part, mut outer) = (Map::new(), Map::new());
        let path = path.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let given: Vec<_> = path.chain(query).collect();
        for (name, value) in &given {
            let first = name.split('.').next().unwrap_or_default();
            let is_of_part = field.is_none() || find(&filled, first).is_some();
            let (fields, of) = match is_of_part {
                true => (&mut part, &filled),
                false => (&mut outer, &message),
            };
            if find(of, first).is_none() {
                let names = given_names(&filled, field.as_ref().map(|field| (field, &message)));
                return Err(malformed(name, &format!("there is no such field; {names}")));
            }
            // protobuf merges: it would move the request to another log than that of the path.
            let found = find(of, first);
            if !is_of_part && found.as_ref() == field.as_ref() {
                let why = "the path and the body have its fields; give them there";
                return Err(malformed(name, why));
            }
            // Alone first, so that a wrong value is reported with its name.
            alone(of, name, value)
                .and_then(|()| set(fields, of, name, value))
                .map_err(|why| malformed(name, &why))?;
        }
        let read = |fields: Map<String, Value>, message: MessageDescriptor| {
            DynamicMessage::deserialize(message.clone(), Value::Object(fields)).map_err(|why| {
                // Each alone is right, so two of them are one too many.
                let groups = message.oneofs().map(|oneof| {
                    let fields: Vec<_> = oneof
                        .fields()
                        .map(|field| field.name().to_owned())
                        .collect();
                    fields.join(", ")
                });
                let groups: Vec<_> = groups.filter(|group| group.contains(',')).collect();
                let why = format!("{why}; give at most one of each: {}", groups.join("; "));
                malformed("query", &why)
            })
        };
        Ok(Self {
            form,
            has_body: route.body != BodyPart::Nothing,
            needs_body: matches!(route.body, BodyPart::Field(_)),
            fields: HeadFields {
                part: read(part, filled)?,
                outer: read(outer, message)?,
            },
            field,
            access,
        })
    }

    fn malformed(&self, why: impl std::fmt::Display) -> Status {
        status::malformed("body", why, self.access)
    }

    /// The message of the body, encoded.
    fn body(&self, text: &[u8]) -> Result<Vec<u8>, Status> {
        if text.is_empty() && self.needs_body {
            return Err(self.malformed("there is none; send the fields that change as JSON"));
        }
        let records = match self.form {
            BodyForm::Raw => vec![record(text)],
            BodyForm::Lines => {
                let lines = text.split(|byte| *byte == b'\n');
                let lines = lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line));
                lines.filter(|line| !line.is_empty()).map(record).collect()
            }
            BodyForm::Json if text.is_empty() => return Ok(Vec::new()),
            BodyForm::Json => return self.json(text),
        };
        let batch = v1::LogBatch {
            records,
            ..v1::LogBatch::default()
        };
        Ok(batch.encode_to_vec())
    }

    fn json(&self, text: &[u8]) -> Result<Vec<u8>, Status> {
        // Of two values one would be lost.
        unique_keys(text).map_err(|why| self.malformed(why))?;
        let mut reader = serde_json::Deserializer::from_slice(text);
        let kind = self.fields.part.descriptor();
        let mut track = Track::new();
        let tracked = serde_path_to_error::Deserializer::new(&mut reader, &mut track);
        let body = DynamicMessage::deserialize(kind.clone(), tracked);
        let body = body.map_err(|why| {
            let path = track.path();
            let advice = advice_at(&kind, &path);
            match path.iter().len() {
                0 => self.malformed(format_args!("{why}; {advice}")),
                _ => self.malformed(format_args!("{path}: {why}; {advice}")),
            }
        })?;
        reader.end().map_err(|why| self.malformed(why))?;
        let twice = self
            .fields
            .part
            .fields()
            .find(|(field, _)| body.has_field(field));
        match twice {
            Some((field, _)) => Err(self.malformed(format_args!(
                "the field {} is also in the path or the query; give it once",
                field.name()
            ))),
            None => Ok(body.encode_to_vec()),
        }
    }
}

impl Translation for ApiRequest {
    fn check(&self, text: &[u8]) -> Result<(), Status> {
        let objects = match self.form {
            BodyForm::Raw => 1,
            BodyForm::Lines => text.iter().filter(|byte| **byte == b'\n').count() as u64 + 1,
            BodyForm::Json => objects(text),
        };
        if objects > MOST_OBJECTS {
            let why =
                format_args!("it has {objects} objects or lines; at most {MOST_OBJECTS} are read");
            return Err(self.malformed(why));
        }
        Ok(())
    }

    fn is_encoded(&self) -> bool {
        self.form != BodyForm::Json
    }

    fn translate(&self, text: &[u8]) -> Result<Bytes, Status> {
        if !self.has_body && !text.is_empty() {
            return Err(self.malformed("this request takes none"));
        }
        let mut part = self.body(text)?;
        part.extend_from_slice(&self.fields.part.encode_to_vec());
        let Some(field) = &self.field else {
            return framed(&part);
        };
        let mut message = BytesMut::with_capacity(part.len() + 16);
        encode_key(field.number(), WireType::LengthDelimited, &mut message);
        encode_varint(part.len() as u64, &mut message);
        message.put_slice(&part);
        message.put_slice(&self.fields.outer.encode_to_vec());
        framed(&message)
    }
}

fn record(data: &[u8]) -> v1::Record {
    v1::Record {
        payload: Some(v1::record::Payload::Data(Bytes::copy_from_slice(data))),
        ..v1::Record::default()
    }
}

/// Objects of a JSON text. Bytes that are no JSON are counted, too.
fn objects(text: &[u8]) -> u64 {
    let mut objects = 0;
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' => objects += 1,
            b'"' => {
                // To the end of the string.
                while let Some(byte) = bytes.next()
                    && *byte != b'"'
                {
                    if *byte == b'\\' {
                        bytes.next();
                    }
                }
            }
            _ => {}
        }
    }
    objects
}

/// Checks that no object of a JSON text has a key twice, under either name of its field.
fn unique_keys(text: &[u8]) -> Result<(), serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    UniqueKeys::deserialize(&mut reader).map(|UniqueKeys| ())
}

/// Any JSON whose objects have each key once. No message of a request has a map, so all keys are names of fields.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self, M::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if !keys.insert(camel_case(&key)) {
                return Err(M::Error::custom(format_args!("{key:?} is there twice")));
            }
            if keys.len() > MOST_KEYS {
                return Err(M::Error::custom(format_args!(
                    "an object has more than {MOST_KEYS} keys"
                )));
            }
            map.next_value::<Self>()?;
        }
        Ok(self)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<Self, S::Error> {
        while list.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }
}

/// Names and values of a query, decoded.
///
/// # Errors
/// With the name of a parameter that is not UTF-8: another text could be that of another log or producer.
fn parameters(uri: &Uri) -> Result<Vec<(String, String)>, String> {
    let pairs = uri.query().unwrap_or_default().split('&');
    pairs
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let decoded = |text: &str| {
                let text = text.replace('+', " ");
                let decoded = percent_decode_str(&text).decode_utf8();
                decoded.map(Cow::into_owned)
            };
            match (decoded(name), decoded(value)) {
                (Ok(name), Ok(value)) => Ok((name, value)),
                _ => Err(name.to_owned()),
            }
        })
        .collect()
}

/// The form of a body, by its content type.
fn body_form(route: &ApiRoute, headers: &HeaderMap) -> Result<BodyForm, String> {
    let encodings = [
        (header::CONTENT_ENCODING, "identity"),
        (header::TRANSFER_ENCODING, "chunked"),
    ];
    for (name, read) in encodings {
        let mut given = headers.get_all(&name).iter();
        if let Some(other) =
            given.find(|given| !given.as_bytes().eq_ignore_ascii_case(read.as_bytes()))
        {
            return Err(format!(
                "{name} {other:?} is not read; send the body as it is"
            ));
        }
    }
    if headers.get_all(header::CONTENT_TYPE).iter().count() > 1 {
        return Err("there are two; send one".to_owned());
    }
    let is_empty = headers
        .get(header::CONTENT_LENGTH)
        .is_none_or(|length| length == "0")
        && !headers.contains_key(header::TRANSFER_ENCODING);
    let Some(given) = headers.get(header::CONTENT_TYPE) else {
        return match is_empty {
            true => Ok(BodyForm::Json),
            false => Err(format!("there is none; send {}", forms(route))),
        };
    };
    let given = String::from_utf8_lossy(given.as_bytes());
    let essence = given.split(';').next().unwrap_or_default().trim();
    let known = [
        ("application/json", BodyForm::Json),
        ("application/x-ndjson", BodyForm::Lines),
        ("application/jsonl", BodyForm::Lines),
        ("text/plain", BodyForm::Raw),
        ("application/octet-stream", BodyForm::Raw),
    ];
    let form = known
        .iter()
        .find(|(name, _)| essence.eq_ignore_ascii_case(name));
    match form {
        Some((_, form)) if *form == BodyForm::Json || route.body == BodyPart::Records => Ok(*form),
        _ if is_empty && route.body == BodyPart::Nothing => Ok(BodyForm::Json),
        _ => Err(format!(
            "{essence:?} is not read here; send {}",
            forms(route)
        )),
    }
}

fn forms(route: &ApiRoute) -> &'static str {
    match route.body {
        BodyPart::Nothing => "no body",
        BodyPart::Records => {
            "application/json (curl --json '{\"records\": [{\"text\": \"…\"}]}'), application/x-ndjson \
             (each line is a record), text/plain or application/octet-stream (the body is one record)"
        }
        BodyPart::Whole | BodyPart::Field(_) => "application/json (curl --json '{…}')",
    }
}

/// Adds the parameters that a client of this port expects without saying them.
fn add_defaults(
    route: &ApiRoute,
    message: &MessageDescriptor,
    headers: &HeaderMap,
    query: &mut Vec<(String, String)>,
) -> Result<(), String> {
    if !matches!(route.rpc, RpcMethod::Read | RpcMethod::Scan) {
        return Ok(());
    }
    if !query.iter().any(|(name, _)| name == VIEW) {
        query.push((VIEW.to_owned(), DEFAULT_VIEW.to_owned()));
    }
    let id = headers.get(&LAST_EVENT_ID).filter(|_| route.is_stream());
    let Some(id) = id.filter(|id| !id.is_empty()) else {
        return Ok(());
    };
    // A browser repeats the URL, with the place where it began once.
    let is_start = |name: &str| {
        let oneof = find(message, name).and_then(|field| field.containing_oneof());
        oneof.is_some_and(|oneof| oneof.name() == "start")
    };
    query.retain(|(name, _)| !is_start(name));
    let id = id.to_str().map_err(|_| "it is no id of an event")?;
    query.push(("cursor".to_owned(), id.to_owned()));
    Ok(())
}

/// The field of this name, as the contract or its JSON spells it.
fn find(message: &MessageDescriptor, name: &str) -> Option<FieldDescriptor> {
    message
        .get_field_by_name(name)
        .or_else(|| message.get_field_by_json_name(name))
}

/// Checks the value of one parameter.
fn alone(message: &MessageDescriptor, name: &str, text: &str) -> Result<(), String> {
    let mut fields = Map::new();
    set(&mut fields, message, name, text)?;
    let read = DynamicMessage::deserialize(message.clone(), Value::Object(fields));
    read.map(drop)
        .map_err(|why| format!("{why}; {}", advice(&kind_at(message, name.split('.')))))
}

/// The names of a message's fields, for an error.
fn names(message: &MessageDescriptor) -> String {
    let names: Vec<_> = message
        .fields()
        .map(|field| field.name().to_owned())
        .collect();
    match names.is_empty() {
        true => "there are none".to_owned(),
        false => format!("there are {}", names.join(", ")),
    }
}

/// The names that a query may have: fields, and the beginnings of paths into messages. `outer`: the field that the body
/// fills, and its message.
fn given_names(
    filled: &MessageDescriptor,
    outer: Option<(&FieldDescriptor, &MessageDescriptor)>,
) -> String {
    let Some((part, message)) = outer else {
        return names(filled);
    };
    let outer = message
        .fields()
        .filter(|field| field != part && !field.is_list());
    let inner = filled.fields().filter(|field| !field.is_list());
    let inner = inner.filter_map(|field| match field.kind() {
        Kind::Message(_) => Some(format!("{}.FIELD", field.name())),
        _ => None,
    });
    let names: Vec<_> = outer
        .map(|field| field.name().to_owned())
        .chain(inner)
        .collect();
    format!("there are {}", names.join(", "))
}

/// The kind of the field with this path, as far as the path leads to fields.
fn kind_at<'p>(message: &MessageDescriptor, path: impl Iterator<Item = &'p str>) -> Kind {
    let mut kind = Kind::Message(message.clone());
    for name in path {
        if let Kind::Message(message) = &kind
            && let Some(field) = find(message, name)
        {
            kind = field.kind();
        }
    }
    kind
}

/// The right form of the value at this path of a body.
fn advice_at(message: &MessageDescriptor, path: &Path) -> String {
    let keys = path.iter().filter_map(|segment| match segment {
        Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    match kind_at(message, keys) {
        Kind::Message(message) if !is_value(&message) => {
            format!("it is an object, and {}", names(&message))
        }
        kind => advice(&kind),
    }
}

/// The right form of a value.
fn advice(kind: &Kind) -> String {
    match kind {
        Kind::Enum(of) => {
            let names: Vec<_> = of.values().map(|value| value.name().to_owned()).collect();
            format!("give one of {}", names.join(", "))
        }
        Kind::Message(message) => match message.full_name() {
            "google.protobuf.Duration" => "give seconds, such as 30s".to_owned(),
            "google.protobuf.Timestamp" => "give a time, such as 2026-11-29T10:00:00Z".to_owned(),
            _ => "give the names of fields, separated by commas".to_owned(),
        },
        Kind::Bytes => "give base64".to_owned(),
        Kind::String | Kind::Bool => "give text".to_owned(),
        _ => "give a whole number".to_owned(),
    }
}

/// Sets the field with the path `name`, such as `condition.expected_lsn`, in a JSON object.
fn set(
    fields: &mut Map<String, Value>,
    message: &MessageDescriptor,
    name: &str,
    text: &str,
) -> Result<(), String> {
    let (first, rest) = match name.split_once('.') {
        Some((first, rest)) => (first, Some(rest)),
        None => (name, None),
    };
    let Some(field) = find(message, first) else {
        return Err(format!("there is no such field; {}", names(message)));
    };
    let kind = field.kind();
    if let Some(rest) = rest {
        let Kind::Message(inner) = &kind else {
            return Err(format!("{first} has no fields"));
        };
        if field.is_list() || field.is_map() {
            return Err(format!("{first} is a list; send it in the body"));
        }
        let entry = fields
            .entry(field.name())
            .or_insert_with(|| Value::Object(Map::new()));
        return match entry {
            Value::Object(fields) => set(fields, inner, rest, text),
            _ => Err(format!("{first} is given twice")),
        };
    }
    if field.is_map() {
        return Err("it is a map; send it in the body".to_owned());
    }
    let value = leaf(&kind, text)?;
    if field.is_list() {
        let list = fields
            .entry(field.name())
            .or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(list) = list {
            list.push(value);
        }
        return Ok(());
    }
    match fields.insert(field.name().to_owned(), value) {
        None => Ok(()),
        Some(_) => Err("it is given twice".to_owned()),
    }
}

/// The JSON of a value in a path or a query.
fn leaf(kind: &Kind, text: &str) -> Result<Value, String> {
    Ok(match kind {
        Kind::Bool => match text {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            _ => return Err(format!("{text:?} is neither true nor false")),
        },
        Kind::Message(message) if message.fields().len() == 0 => match text {
            "true" => Value::Object(Map::new()),
            _ => return Err(format!("{text:?} is not true")),
        },
        // Times and spans are text.
        Kind::Message(message) if !is_value(message) => {
            return Err("it has fields of its own; give those, such as NAME.FIELD".to_owned());
        }
        Kind::Enum(_) => match text.parse::<i32>() {
            Ok(number) => Value::from(number),
            Err(_) => Value::from(text),
        },
        Kind::Message(message) if message.full_name() == "google.protobuf.FieldMask" => {
            Value::from(camel_case(text))
        }
        // A plus sign of base64 is a space in a query.
        Kind::Bytes => Value::from(text.replace(' ', "+")),
        // Numbers may be text in the JSON of protobuf.
        _ => Value::from(text),
    })
}

/// A name as JSON spells it: a mask of fields has no other form there.
fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| {
        let mut letters = word.chars();
        let first = letters.next().map(|letter| letter.to_ascii_uppercase());
        name + &first.into_iter().chain(letters).collect::<String>()
    })
}

#[cfg(test)]
mod tests;
