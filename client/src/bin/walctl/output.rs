//! What goes to stdout.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Stdout, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::ValueEnum;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use wald_client::{Header, StoredRecord};

/// Form of what is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people: tables and lines.
    Text,
    /// JSON; of records one object per line, with log, lsn, time and headers.
    Json,
    /// JSON, one value per line; of records the bare payload.
    Jsonl,
    /// Bare bytes, each record's followed by a newline.
    Raw,
}

/// A header as JSON has it: `value` if it is text, else `data` in base64.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JsonHeader {
    pub(crate) key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<String>,
}

/// A record as `--output json` has it; of the last three exactly one is there.
#[derive(Serialize)]
struct JsonRecord<'a> {
    log: &'a str,
    lsn: u64,
    time: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<JsonHeader>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<String>,
}

/// Stdout, buffered.
pub(crate) struct Out {
    form: Output,
    stdout: BufWriter<Stdout>,
}

impl Out {
    pub(crate) fn new(form: Output) -> Self {
        Self {
            form,
            stdout: BufWriter::with_capacity(1 << 16, io::stdout()),
        }
    }

    /// Prints a record; with its log's name in front of it if `name_log`.
    pub(crate) fn record(
        &mut self,
        log: &str,
        record: &StoredRecord,
        name_log: bool,
    ) -> io::Result<()> {
        match self.form {
            Output::Text => {
                if name_log {
                    write!(self.stdout, "{}  ", escaped(log.as_bytes()))?;
                }
                let time = rfc3339(record.timestamp_us);
                writeln!(
                    self.stdout,
                    "{}  {time}  {}",
                    record.lsn,
                    escaped(&record.data)
                )
            }
            Output::Json => {
                let value = as_json(&record.data);
                let text = std::str::from_utf8(&record.data).ok();
                self.json(&JsonRecord {
                    log,
                    lsn: record.lsn.get(),
                    time: rfc3339(record.timestamp_us),
                    headers: record.headers.iter().map(json_header).collect(),
                    text: text.filter(|_| value.is_none()),
                    data: text.is_none().then(|| STANDARD.encode(&record.data)),
                    value,
                })
            }
            Output::Jsonl => match (as_json(&record.data), std::str::from_utf8(&record.data)) {
                (Some(value), _) => writeln!(self.stdout, "{}", value.get()),
                (None, Ok(text)) => self.json(&text),
                (None, Err(_)) => {
                    let data = STANDARD.encode(&record.data);
                    self.json(&serde_json::json!({ "data": data }))
                }
            },
            Output::Raw => {
                self.stdout.write_all(&record.data)?;
                self.stdout.write_all(b"\n")
            }
        }
    }

    /// Prints a JSON value on a line of its own.
    pub(crate) fn json<T: Serialize>(&mut self, value: &T) -> io::Result<()> {
        serde_json::to_writer(&mut self.stdout, value)?;
        self.stdout.write_all(b"\n")
    }

    /// Prints a line.
    pub(crate) fn line(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.stdout, "{line}")
    }

    /// Prints bytes as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stdout.write_all(bytes)
    }

    /// Hands what is buffered to whoever reads.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.stdout.flush()
    }
}

/// The payload as JSON on one line, if it is JSON: the text as it was appended, but for
/// line ends between its tokens.
fn as_json(data: &[u8]) -> Option<Box<RawValue>> {
    let value: &RawValue = serde_json::from_slice(data).ok()?;
    let text = value.get();
    let text = if text.contains(['\n', '\r']) {
        without_line_ends(text)
    } else {
        text.to_owned()
    };
    RawValue::from_string(text).ok()
}

/// JSON has no bare line ends within strings, so all there are lie between tokens.
fn without_line_ends(json: &str) -> String {
    json.replace(['\n', '\r'], " ")
}

/// The payload for a terminal: nothing in it may move the cursor or end the line.
pub(crate) fn escaped(data: &[u8]) -> String {
    let Ok(text) = std::str::from_utf8(data) else {
        return data.escape_ascii().to_string();
    };
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() {
            // Writing to a string cannot fail.
            let _ = write!(safe, "{}", char.escape_default());
        } else {
            safe.push(char);
        }
    }
    safe
}

/// RFC 3339, UTC, microseconds; a time out of the calendar's range as its number.
pub(crate) fn rfc3339(timestamp_us: i64) -> String {
    match Timestamp::from_microsecond(timestamp_us) {
        Ok(time) => format!("{time:.6}"),
        Err(_) => format!("{timestamp_us}us"),
    }
}

fn json_header(header: &Header) -> JsonHeader {
    let text = std::str::from_utf8(&header.value).ok();
    JsonHeader {
        key: header.key.clone(),
        value: text.map(str::to_owned),
        data: text.is_none().then(|| STANDARD.encode(&header.value)),
    }
}

/// The bytes that base64 stands for.
pub(crate) fn from_base64(text: &str) -> Result<Bytes, base64::DecodeError> {
    STANDARD.decode(text).map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_payload_keeps_its_text() {
        let text = r#"{"n": 1.50, "big": 12345678901234567890123}"#;
        assert_eq!(as_json(text.as_bytes()).unwrap().get(), text);
        assert!(as_json(b"{").is_none());
        assert!(as_json(b"hello").is_none());
    }

    #[test]
    fn json_payload_of_many_lines_becomes_one() {
        let value = as_json(b"{\n  \"a\": \"x\\n y\"\r\n}").unwrap();
        assert_eq!(value.get(), "{   \"a\": \"x\\n y\"  }");
    }

    #[test]
    fn text_for_a_terminal_has_no_control_characters() {
        assert_eq!(
            escaped("grün\t\x1b[2J\n".as_bytes()),
            "grün\\t\\u{1b}[2J\\n"
        );
        assert_eq!(escaped(b"\xff\n"), "\\xff\\n");
    }

    #[test]
    fn time_has_microseconds_and_survives_absurd_values() {
        assert_eq!(rfc3339(1_500_000), "1970-01-01T00:00:01.500000Z");
        assert!(rfc3339(i64::MAX).ends_with("us"));
    }
}
