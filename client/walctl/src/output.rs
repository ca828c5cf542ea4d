//! Output: data on stdout, all else on stderr, nothing that orders a terminal about.
//!
//! | form | on a terminal | to a pipe or a file |
//! |---|---|---|
//! | `text` | escaped | escaped |
//! | `json`, `jsonl` | invisible characters and controls as `\u` escapes | as they are: the same value |
//! | `raw` | escaped, unless `--unescaped` | as they are |
//! | `delimited` | refused, unless `--unescaped` | as they are |
//!
//! Rule: stdout is written by [`Out`] only, stderr by [`say`], [`note`] and [`confirmed`] only;
//! lints forbid the rest.

use std::io::{self, BufRead, BufWriter, ErrorKind, IsTerminal, Stdout, Write};

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::ValueEnum;
use jiff::Timestamp;
use prost::Message;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use wald_client::proto::record::Payload;
use wald_client::proto::{Record, RecordBatch};
use wald_client::{Batch, Header, StoredRecord};
use wald_text::shown::{escaped, escaped_bytes, escaped_json};

use crate::exit::Usage;
use crate::input::apart;

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people: tables and lines
    Text,
    /// JSON; records as objects with log, lsn, time and headers, one per line
    Json,
    /// JSON, one value per line; records as bare payloads
    Jsonl,
    /// Records as length-delimited wald.v1.RecordBatch messages (read, scan and tail only)
    Delimited,
    /// Bare bytes, a newline after each record
    Raw,
}

/// Says something on stderr.
pub(crate) fn say(text: &str) {
    note(&format!("walctl: {text}"));
}

/// Says something on stderr that is no complaint: progress, results.
pub(crate) fn note(text: &str) {
    // Where nobody reads it, it changes no result; `eprintln` would panic.
    let _unread = writeln!(io::stderr(), "{}", escaped(text));
}

/// Asks a person on a terminal to confirm a step that nobody can undo. Scripts are not asked.
pub(crate) async fn confirmed(question: &str, yes: bool) -> Result<bool> {
    if yes || !io::stdin().is_terminal() {
        return Ok(true);
    }
    let question = format!("walctl: {} [y/N] ", escaped(question));
    let answer = apart(move || {
        let _unread = io::stderr().write_all(question.as_bytes());
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        Ok(answer)
    });
    // The message about the interruption gets a line of its own.
    let answer = answer.await.inspect_err(|_| note(""))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
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
    crc32c: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<String>,
}

/// Stdout, whose errors name it: "No space left on device" alone does not say where.
struct NamedStdout {
    stdout: Stdout,
    /// Whether a closed pipe is an error. Otherwise the rest goes nowhere: a reader that has seen enough changes no
    /// result.
    ends_unread: bool,
}

impl NamedStdout {
    fn result<T>(&self, written: io::Result<T>, unread: T) -> io::Result<T> {
        match written {
            Err(error) if error.kind() == ErrorKind::BrokenPipe && !self.ends_unread => Ok(unread),
            written => written.map_err(|error| io::Error::new(error.kind(), StdoutError(error))),
        }
    }
}

impl Write for NamedStdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stdout.write(bytes);
        self.result(written, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.stdout.flush();
        self.result(flushed, ())
    }
}

/// An error of stdout.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout: {0}")]
struct StdoutError(io::Error);

/// Whether nobody reads stdout any more. Other pipes and connections break with the same kind of error.
pub(crate) fn is_unread(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
    causes.any(|error: &io::Error| {
        let is_own = (error.get_ref()).is_some_and(|inner| inner.is::<StdoutError>());
        is_own && error.kind() == ErrorKind::BrokenPipe
    })
}

/// Stdout, buffered.
pub(crate) struct Out {
    form: Output,
    /// Whether a person sees it as it is.
    terminal: bool,
    stdout: BufWriter<NamedStdout>,
    /// Records whose headers, or whose exact payload, JSON lines do not have.
    without_headers: u64,
    changed: u64,
}

impl Out {
    /// For a result. A closed pipe is no error, so the command keeps its own result.
    pub(crate) fn new(form: Output) -> Self {
        Self::with(form, false)
    }

    /// For output that goes on until nobody reads it: a closed pipe is an error, which [`is_unread`] knows.
    pub(crate) fn while_read(form: Output) -> Self {
        Self::with(form, true)
    }

    fn with(form: Output, ends_unread: bool) -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        let stdout = NamedStdout {
            stdout,
            ends_unread,
        };
        Self {
            form,
            terminal,
            stdout: BufWriter::with_capacity(1 << 16, stdout),
            without_headers: 0,
            changed: 0,
        }
    }

    /// For records, while they are read. `unescaped`: a terminal gets raw bytes as they are.
    ///
    /// # Errors
    /// If messages would go to a terminal.
    pub(crate) fn of_records(form: Output, unescaped: bool) -> Result<Self, Usage> {
        let mut out = Self::while_read(form);
        if form == Output::Delimited && out.terminal && !unescaped {
            return Err(Usage(
                "--output delimited is binary, and stdout is a terminal: redirect it to a file or a \
                 pipe, or add --unescaped"
                    .into(),
            ));
        }
        out.terminal &= !(unescaped && matches!(form, Output::Raw | Output::Delimited));
        Ok(out)
    }

    /// Prints records; with their log's name in front of each if `name_log`.
    pub(crate) fn batch(&mut self, batch: &Batch, name_log: bool) -> io::Result<()> {
        if self.form == Output::Delimited {
            let message = message(batch).encode_length_delimited_to_vec();
            return self.stdout.write_all(&message);
        }
        for record in &batch.records {
            self.record(&batch.log, record, name_log)?;
        }
        Ok(())
    }

    fn record(&mut self, log: &str, record: &StoredRecord, name_log: bool) -> io::Result<()> {
        match self.form {
            Output::Text => {
                if name_log {
                    write!(self.stdout, "{}  ", escaped(log))?;
                }
                let time = rfc3339(record.timestamp_us);
                write!(self.stdout, "{}  {time}  ", record.lsn)?;
                if !record.headers.is_empty() {
                    write!(self.stdout, "{}  ", headers_in_words(&record.headers))?;
                }
                writeln!(self.stdout, "{}", escaped_bytes(&record.data))
            }
            Output::Json => self.json(&json_record(log, record)),
            Output::Jsonl => {
                self.without_headers += u64::from(!record.headers.is_empty());
                match (as_json(&record.data), std::str::from_utf8(&record.data)) {
                    (Some(value), _) => self.json(&value),
                    (None, Ok(text)) => {
                        self.changed += 1;
                        self.json(&text)
                    }
                    (None, Err(_)) => {
                        self.changed += 1;
                        let data = STANDARD.encode(&record.data);
                        self.json(&serde_json::json!({ "data": data }))
                    }
                }
            }
            Output::Raw | Output::Delimited if self.terminal => {
                writeln!(self.stdout, "{}", escaped_bytes(&record.data))
            }
            Output::Raw | Output::Delimited => {
                self.stdout.write_all(&record.data)?;
                self.stdout.write_all(b"\n")
            }
        }
    }

    /// Prints a JSON value on a line of its own.
    pub(crate) fn json<T: Serialize>(&mut self, value: &T) -> io::Result<()> {
        if self.terminal {
            let json = serde_json::to_string(value)?;
            return writeln!(self.stdout, "{}", escaped_json(&json));
        }
        serde_json::to_writer(&mut self.stdout, value)?;
        self.stdout.write_all(b"\n")
    }

    /// Prints lines.
    pub(crate) fn line(&mut self, lines: &str) -> io::Result<()> {
        if self.terminal || self.form == Output::Text {
            let lines = lines.split('\n').map(escaped).collect::<Vec<_>>();
            return writeln!(self.stdout, "{}", lines.join("\n"));
        }
        writeln!(self.stdout, "{lines}")
    }

    /// Prints bytes of walctl's own as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stdout.write_all(bytes)
    }

    /// Writes the buffered bytes to stdout.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.stdout.flush()
    }

    /// Ends a print of records: reports on stderr the parts that the form cannot show.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.flush()?;
        let (headers, changed) = (self.without_headers, self.changed);
        if headers + changed > 0 {
            say(&format!(
                "--output jsonl prints payloads as JSON: {headers} records have headers that it leaves \
                 out, {changed} are not JSON; --output json or delimited keeps everything"
            ));
        }
        Ok(())
    }
}

/// A batch as the message that `append --format delimited` reads.
fn message(batch: &Batch) -> RecordBatch {
    let record = |record: &StoredRecord| Record {
        payload: Some(Payload::Data(record.data.clone())),
        headers: record.headers.clone(),
        timestamp_us: record.timestamp_us,
        crc32c: record.crc32c,
        ..Default::default()
    };
    RecordBatch {
        log: batch.log.clone(),
        log_id: batch.log_id,
        first_lsn: batch.records.first().map(|record| record.lsn.get()),
        records: batch.records.iter().map(record).collect(),
        ..Default::default()
    }
}

fn json_record<'a>(log: &'a str, record: &'a StoredRecord) -> JsonRecord<'a> {
    // A value only if it is the payload to the byte: so `append --format json` gets it back.
    let value = as_json(&record.data).filter(|value| value.get().as_bytes() == record.data);
    let text = std::str::from_utf8(&record.data).ok();
    JsonRecord {
        log,
        lsn: record.lsn.get(),
        time: rfc3339(record.timestamp_us),
        headers: record.headers.iter().map(json_header).collect(),
        crc32c: record.crc32c,
        text: text.filter(|_| value.is_none()),
        data: text.is_none().then(|| STANDARD.encode(&record.data)),
        value,
    }
}

/// Headers for people: `[key=value, ...]`.
fn headers_in_words(headers: &[Header]) -> String {
    let word = |header: &Header| {
        let (key, value) = (escaped(&header.key), escaped_bytes(&header.value));
        match value.contains([' ', ',', ']', '"']) {
            true => format!("{key}=\"{}\"", value.replace('"', "\\\"")),
            false => format!("{key}={value}"),
        }
    };
    let words: Vec<String> = headers.iter().map(word).collect();
    format!("[{}]", words.join(", "))
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

/// The time that [`rfc3339`] wrote.
pub(crate) fn from_rfc3339(text: &str) -> Option<i64> {
    match text.strip_suffix("us") {
        Some(micros) => micros.parse().ok(),
        None => Some(text.parse::<Timestamp>().ok()?.as_microsecond()),
    }
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
    fn json_record_has_a_value_only_if_it_is_the_payload_to_the_byte() {
        let record = |data: &'static str| StoredRecord {
            lsn: 0.into(),
            timestamp_us: 1,
            data: data.into(),
            headers: Vec::new(),
            crc32c: None,
        };
        assert!(json_record("a", &record("{\"n\": 1.50}")).value.is_some());
        for data in [" 1", "{\n\"n\": 1}", "[1]\n", "text"] {
            let kept = record(data);
            assert_eq!(json_record("a", &kept).text, Some(data));
        }
    }

    #[test]
    fn headers_are_shown_escaped_and_odd_values_in_quotes() {
        let header = |key: &str, value: &'static [u8]| Header {
            key: key.to_owned(),
            value: value.into(),
        };
        let headers = [
            header("a", b"1"),
            header("b\n", b"x y\""),
            header("c", b"\xff"),
        ];
        assert_eq!(
            headers_in_words(&headers),
            "[a=1, b\\n=\"x y\\\"\", c=\\xff]"
        );
    }

    #[test]
    fn time_has_microseconds_and_survives_absurd_values() {
        assert_eq!(rfc3339(1_500_000), "1970-01-01T00:00:01.500000Z");
        assert!(rfc3339(i64::MAX).ends_with("us"));
        for time in [i64::MIN, -1, 0, 1_500_000, i64::MAX] {
            assert_eq!(from_rfc3339(&rfc3339(time)), Some(time));
        }
    }
}
