//! The description of the port in OpenAPI, made of the descriptors and comments of the contract.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use prost_reflect::{
    EnumDescriptor, FieldDescriptor, FileDescriptor, Kind, MessageDescriptor, MethodDescriptor,
};
use serde_json::{Map, Value, json};

use super::answer::{EVENTS, LINES};
use super::contract::{ApiRoute, BodyPart, ROUTES, is_value};
use super::request::{DEFAULT_VIEW, VIEW};

/// The forms of a stream.
const STREAM: &str = "As lines: each message is a line, and a stream that fails ends with a line {\"error\": …}. As server-sent events: \
    each message is an event without a name, whose id is the cursor behind it; an event failure has an error, and an event end ends a \
    scan that does not follow.";

/// Made by the first request for it.
static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| {
    let text = serde_json::to_vec_pretty(&make());
    // A value of JSON can always be written.
    text.unwrap_or_default().into()
});

/// `GET /v1/openapi.json`
pub(super) async fn document() -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, kind)], DOCUMENT.clone()).into_response()
}

fn make() -> Value {
    let mut schemas = Schemas::default();
    let mut paths = Map::new();
    for route in &ROUTES {
        let Some(method) = route.descriptor() else {
            continue;
        };
        let operation = operation(route, &method, &mut schemas);
        let path = paths
            .entry(route.path)
            .or_insert_with(|| Value::Object(Map::new()));
        path[route.method.as_str().to_ascii_lowercase()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Wald",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "Write-ahead logs as a service",
            "description": "Each request stands for an RPC of the package wald.v1. Names and JSON follow the mapping \
                of protobuf: numbers of 64 bits are text, bytes are base64.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "security": [{}, { "token": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas.finish(),
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "responses": { "Error": {
                "description": "The request failed. The details name the reason, and for a write its outcome.",
                "content": { "application/json": { "schema": error() } },
            }},
        },
    })
}

/// The schema of errors.
fn error() -> Value {
    json!({
        "type": "object",
        "required": ["error"],
        "properties": { "error": {
            "type": "object",
            "required": ["code", "status", "message"],
            "properties": {
                "code": { "type": "integer", "description": "The code of HTTP." },
                "status": { "type": "string", "description": "The code of gRPC, such as NOT_FOUND." },
                "message": { "type": "string", "description": "The fault, for people." },
                "details": {
                    "type": "array",
                    "description": "google.rpc.ErrorInfo has the reason and all facts.",
                    "items": { "type": "object", "properties": { "@type": { "type": "string" } } },
                },
            },
        }},
    })
}

fn operation(route: &ApiRoute, method: &MethodDescriptor, schemas: &mut Schemas) -> Value {
    let input = method.input();
    let (part, filled) = (route.part(&input), route.filled(&input));
    let mut parameters: Vec<Value> = Vec::new();
    for name in route.path_fields() {
        let field = filled.get_field_by_name(name);
        let field = field.or_else(|| input.get_field_by_name(name));
        let about = field.as_ref().map(comment_of_field).unwrap_or_default();
        parameters.push(json!({
            "name": name, "in": "path", "required": true,
            "description": format!("{about}\nA slash is %2F."), "schema": { "type": "string" },
        }));
    }
    if route.body == BodyPart::Nothing || part.is_some() {
        for field in input.fields() {
            let is_in_path = route.path_fields().any(|name| name == field.name());
            if !is_in_path && is_leaf(&field) {
                parameters.push(parameter(field.name(), &field, schemas));
            }
        }
    }
    if route.body == BodyPart::Records {
        // The only place of a condition for records that are sent as they are.
        conditions("", &filled, &mut parameters, schemas);
    }
    if route.is_stream() {
        parameters.push(json!({
            "name": "Last-Event-ID", "in": "header",
            "description": "The id of the last event that was received. The scan goes on behind it.",
            "schema": { "type": "string" },
        }));
    }
    let answer = schemas.of_message(&method.output());
    let content = match route.is_stream() {
        false => json!({ "application/json": { "schema": answer } }),
        true => json!({ LINES: { "schema": answer }, EVENTS: { "schema": answer } }),
    };
    let mut about = comment(&method.parent_file(), method.path());
    if route.body == BodyPart::Records {
        about = format!(
            "Appends records to one log, all or nothing.\n\nAs the RPC AppendBatch: {about}"
        );
    }
    if route.is_stream() {
        about = format!("{about}\n\n{STREAM}");
    }
    let mut operation = json!({
        "operationId": operation_id(route),
        "summary": summary(&about),
        "description": about,
        "tags": [method.parent_service().name()],
        "parameters": parameters,
        "responses": {
            "200": { "description": "The answer.", "content": content },
            "default": { "$ref": "#/components/responses/Error" },
        },
    });
    if route.body != BodyPart::Nothing {
        let schema = schemas.of_body(route, &filled);
        let mut content = json!({ "application/json": { "schema": schema } });
        if route.body == BodyPart::Records {
            let record = json!({ "schema": { "type": "string" } });
            for kind in [LINES, "text/plain", "application/octet-stream"] {
                content[kind] = record.clone();
            }
        }
        let is_required = matches!(route.body, BodyPart::Records | BodyPart::Field(_));
        operation["requestBody"] = json!({ "content": content, "required": is_required });
    }
    operation
}

/// The first sentence of a comment, without its end.
fn summary(about: &str) -> String {
    let paragraph = about.split("\n\n").next().unwrap_or_default();
    let line = paragraph.replace('\n', " ");
    let sentence = line.split(". ").next().unwrap_or_default();
    sentence.trim_end_matches('.').to_owned()
}

/// A parameter of a query.
fn parameter(name: &str, field: &FieldDescriptor, schemas: &mut Schemas) -> Value {
    let mut schema = match field.kind() {
        // It has no fields: to be there is all that it says.
        Kind::Message(message) if message.fields().len() == 0 => {
            json!({ "type": "boolean", "enum": [true] })
        }
        kind => schemas.of_kind(&kind),
    };
    let mut about = comment_of_field(field);
    if name == VIEW {
        about = format!("{about}\nHere the default is {DEFAULT_VIEW}.");
        schema["default"] = DEFAULT_VIEW.into();
    }
    json!({ "name": name, "in": "query", "description": about, "schema": schema })
}

/// The fields of messages in a message, by their paths.
fn conditions(
    before: &str,
    message: &MessageDescriptor,
    parameters: &mut Vec<Value>,
    schemas: &mut Schemas,
) {
    for field in message.fields().filter(|field| !field.is_list()) {
        let name = format!("{before}{}", field.name());
        match field.kind() {
            Kind::Message(inner) if !is_leaf(&field) => {
                conditions(&format!("{name}."), &inner, parameters, schemas);
            }
            _ if before.is_empty() => {}
            _ => parameters.push(parameter(&name, &field, schemas)),
        }
    }
}

/// The name of an operation: that of its RPC, and for the request with the records of one log `AppendRecords`.
fn operation_id(route: &ApiRoute) -> String {
    match route.body {
        BodyPart::Records => "AppendRecords".to_owned(),
        _ => format!("{:?}", route.rpc),
    }
}

/// Whether a query can set the field.
fn is_leaf(field: &FieldDescriptor) -> bool {
    match field.kind() {
        Kind::Message(message) => is_value(&message) || message.fields().len() == 0,
        _ => !field.is_map(),
    }
}

/// The schemas of messages and enums, by name.
#[derive(Default)]
struct Schemas(BTreeMap<String, Value>);

impl Schemas {
    fn finish(self) -> Value {
        Value::Object(self.0.into_iter().collect())
    }

    fn of_message(&mut self, message: &MessageDescriptor) -> Value {
        let name = message.full_name();
        match name {
            "google.protobuf.Timestamp" => {
                return json!({ "type": "string", "format": "date-time" });
            }
            "google.protobuf.Duration" => {
                return json!({ "type": "string", "examples": ["30s"] });
            }
            "google.protobuf.FieldMask" => return json!({ "type": "string" }),
            _ => {}
        }
        if !self.0.contains_key(name) {
            // First, since a message may hold itself.
            self.0.insert(name.to_owned(), Value::Null);
            let mut properties = Map::new();
            for field in message.fields() {
                let mut schema = self.of_field(&field);
                schema["description"] = comment_of_field(&field).into();
                properties.insert(field.name().to_owned(), schema);
            }
            let schema = json!({
                "type": "object",
                "description": comment(&message.parent_file(), message.path()),
                "properties": properties,
            });
            self.0.insert(name.to_owned(), schema);
        }
        reference(name)
    }

    /// The message of a body: without the fields that are in the path.
    fn of_body(&mut self, route: &ApiRoute, message: &MessageDescriptor) -> Value {
        self.of_message(message);
        let whole = self.0.get(message.full_name()).cloned().unwrap_or_default();
        let name = format!("{}.Body", operation_id(route));
        let mut body = whole;
        if let Some(properties) = body["properties"].as_object_mut() {
            for field in route.path_fields() {
                properties.remove(field);
            }
        }
        self.0.insert(name.clone(), body);
        reference(&name)
    }

    fn of_enum(&mut self, of: &EnumDescriptor) -> Value {
        let name = of.full_name();
        if !self.0.contains_key(name) {
            let values: Vec<_> = of.values().map(|value| value.name().to_owned()).collect();
            let schema = json!({
                "type": "string",
                "description": comment(&of.parent_file(), of.path()),
                "enum": values,
            });
            self.0.insert(name.to_owned(), schema);
        }
        reference(name)
    }

    fn of_field(&mut self, field: &FieldDescriptor) -> Value {
        if field.is_map()
            && let Kind::Message(entry) = field.kind()
        {
            let values = self.of_kind(&entry.map_entry_value_field().kind());
            return json!({ "type": "object", "additionalProperties": values });
        }
        let one = self.of_kind(&field.kind());
        match field.is_list() {
            true => json!({ "type": "array", "items": one }),
            false => one,
        }
    }

    fn of_kind(&mut self, kind: &Kind) -> Value {
        match kind {
            Kind::Message(message) => self.of_message(message),
            Kind::Enum(of) => self.of_enum(of),
            Kind::Bool => json!({ "type": "boolean" }),
            Kind::String => json!({ "type": "string" }),
            Kind::Bytes => json!({ "type": "string", "contentEncoding": "base64" }),
            Kind::Double | Kind::Float => json!({ "type": "number" }),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
                json!({ "type": "integer", "format": "int32" })
            }
            Kind::Uint32 | Kind::Fixed32 => json!({ "type": "integer", "minimum": 0 }),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                json!({ "type": "string", "format": "int64" })
            }
            Kind::Uint64 | Kind::Fixed64 => json!({ "type": "string", "format": "uint64" }),
        }
    }
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn comment_of_field(field: &FieldDescriptor) -> String {
    comment(&field.parent_message().parent_file(), field.path())
}

/// The comment above the item with this path in its file.
fn comment(file: &FileDescriptor, path: &[i32]) -> String {
    let info = file.file_descriptor_proto().source_code_info.as_ref();
    let mut places = info.into_iter().flat_map(|info| &info.location);
    let place = places.find(|place| place.path == path);
    let text = place
        .map(|place| place.leading_comments())
        .unwrap_or_default();
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    lines.join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_the_first_sentence_wherever_its_lines_end() {
        assert_eq!(
            summary("Reads a page\nof one log. It may wait.\n\nFails."),
            "Reads a page of one log"
        );
        assert_eq!(summary("Reads.\n\nFails with NOT_FOUND."), "Reads");
    }

    #[test]
    fn every_reference_has_its_schema_and_every_item_its_comment() {
        let document = make();
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let references = text.split("#/components/schemas/").skip(1);
        let mut found = 0;
        for reference in references {
            let name = reference.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
            found += 1;
        }
        assert!(found > 50, "{found}");
        for (name, schema) in schemas {
            assert!(
                !schema["description"].as_str().unwrap().is_empty(),
                "{name}"
            );
        }
        let operations = document["paths"].as_object().unwrap().values();
        let operations: Vec<_> = operations
            .flat_map(|path| path.as_object().unwrap().values())
            .collect();
        assert_eq!(operations.len(), ROUTES.len());
        for operation in operations {
            assert!(
                operation["summary"].as_str().unwrap().len() > 10,
                "{operation}"
            );
            let id = format!("\"operationId\":{}", operation["operationId"]);
            assert_eq!(text.matches(&id).count(), 1, "{operation}");
        }
    }
}
