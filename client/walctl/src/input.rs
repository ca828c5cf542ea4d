//! Input: from bytes to records, streaming, so that a file larger than memory loads.
//!
//! ```text
//!   bytes ─▶ head: byte order mark, UTF-16, compressed? ─▶ format ─▶ entries
//! ```
//!
//! An input is loaded as its author means it, or refused with the place in it and the remedy.

use std::cell::RefCell;
use std::fmt;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use clap::ValueEnum;
use prost::Message;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use wald_client::proto::record::Payload;
use wald_client::proto::{self, RecordBatch};
use wald_client::{Header, Record};

use crate::exit::Interruption;
use crate::output::{JsonHeader, from_base64, from_rfc3339, say};

/// Largest message of a delimited input, bytes: as large as clients take from a server.
const MAX_MESSAGE_BYTES: u64 = 64 << 20;

/// Blanks around a record on its line, and the end of the line, bytes.
const BLANK_BYTES: u64 = 1 << 10;

/// Format of the input, which separates its records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum InputFormat {
    /// Each line is a record, without its newline
    Lines,
    /// Each line is a record and must be JSON; blank lines are skipped
    Jsonl,
    /// Each element of a JSON array is a record, its text exactly as it is; JSON without an
    /// array around it is one record per value
    JsonArray,
    /// Records as --output json prints them: log, headers, time, and value, text or data
    Json,
    /// Records as --output delimited prints them: length-delimited wald.v1.RecordBatch messages
    Delimited,
    /// The whole input is one record
    Raw,
}

impl InputFormat {
    /// The format that belongs to a file's extension.
    pub(crate) fn of(path: &Path) -> Self {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("jsonl" | "ndjson") => Self::Jsonl,
            Some("json") => Self::JsonArray,
            // Such a file is refused by its first bytes, with the command that unpacks it.
            Some("gz" | "zst" | "xz" | "bz2") => Self::of(&path.with_extension("")),
            _ => Self::Lines,
        }
    }

    /// Whether records of this format name their logs.
    pub(crate) fn names_logs(self) -> bool {
        matches!(self, Self::Json | Self::Delimited)
    }

    /// Whether the input is text.
    fn is_text(self) -> bool {
        !matches!(self, Self::Raw | Self::Delimited)
    }
}

/// A record of the input, with all that its format says of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct InputRecord {
    /// The log that it names.
    pub(crate) log: Option<String>,
    pub(crate) data: Bytes,
    pub(crate) headers: Vec<Header>,
    /// Microseconds since the Unix epoch; 0: none of its own.
    pub(crate) timestamp_us: i64,
    pub(crate) crc32c: Option<u32>,
}

impl InputRecord {
    /// A record that is its payload only.
    pub(crate) fn plain(data: impl Into<Bytes>) -> Self {
        Self {
            data: data.into(),
            ..Self::default()
        }
    }

    /// Bytes of payload and headers, which the server's limit on records counts.
    pub(crate) fn bytes(&self) -> u64 {
        let headers = self.headers.iter();
        let headers: usize = headers.map(|h| h.key.len() + h.value.len()).sum();
        (self.data.len() + headers) as u64
    }

    pub(crate) fn into_record(self) -> Record {
        let mut record = Record::new(self.data);
        for header in self.headers {
            record = record.header(header.key, header.value);
        }
        if let Some(crc32c) = self.crc32c {
            record = record.crc32c(crc32c);
        }
        match self.timestamp_us {
            0 => record,
            own => record.timestamp_us(own),
        }
    }
}

/// Destination of records. An error ends the reading.
type Sink<'a> = &'a mut dyn FnMut(InputRecord) -> Result<()>;

/// The command that reads an input, which decides the remedies that errors name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputCommand {
    /// It takes every format, named with --format.
    Append,
    /// It takes [`InputFormat::Json`] only.
    Batch,
}

/// Reads on a thread of its own, because a read of a terminal or a pipe may never end.
///
/// # Errors
/// The errors of `read`, and [`Interruption`] on Ctrl-C. The thread may still read then; the end of the process ends it.
pub(crate) async fn apart<T: Send + 'static>(
    read: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let answer = async {
        let (sender, receiver) = oneshot::channel();
        std::thread::spawn(move || sender.send(read()));
        receiver.await.context("the thread that reads has failed")?
    };
    tokio::select! {
        // First: from its first poll on Ctrl-C does not end the process.
        biased;
        _ = tokio::signal::ctrl_c() => Err(Interruption::BEFORE.into()),
        answer = answer => answer,
    }
}

/// Calls `sink` with each record, in order. A line, or a whole input, of more than `most` bytes is no record, and is not
/// read into memory.
///
/// # Errors
/// The sink's error, or the place in the input that the format does not allow.
pub(crate) fn records(
    input: impl Read,
    (reader, format): (InputCommand, InputFormat),
    most: u64,
    sink: Sink<'_>,
) -> Result<()> {
    let input = &mut *checked(input, (reader, format))?;
    match format {
        InputFormat::Lines => lines(input, most, &mut |_, line| {
            sink(InputRecord::plain(Bytes::copy_from_slice(line)))
        }),
        InputFormat::Jsonl => lines(input, most, &mut |number, line| {
            let line = line.trim_ascii();
            if line.is_empty() {
                return Ok(());
            }
            json_line(number, line, reader)?;
            sink(InputRecord::plain(Bytes::copy_from_slice(line)))
        }),
        InputFormat::JsonArray => json_array(input, sink),
        InputFormat::Json => json_records(input, reader, sink),
        InputFormat::Raw => {
            let mut record = Vec::new();
            let read = input.take(most.saturating_add(1)).read_to_end(&mut record);
            if read.context("cannot read the input")? as u64 > most {
                return Err(too_long("the input", most));
            }
            sink(InputRecord::plain(record))
        }
        InputFormat::Delimited => delimited(input, sink),
    }
}

/// The input behind its byte order mark, if it has one.
///
/// # Errors
/// If the input is text in UTF-16, or compressed, and the format is text.
fn checked<'a>(
    mut input: impl Read + 'a,
    (reader, format): (InputCommand, InputFormat),
) -> Result<Box<dyn BufRead + 'a>> {
    let mut head = Vec::new();
    let read = input.by_ref().take(6).read_to_end(&mut head);
    read.context("cannot read the input")?;
    let ended = head.len() < 6;
    if format.is_text() {
        refuse_foreign(&head, reader)?;
        if head.starts_with(b"\xef\xbb\xbf") {
            match format {
                // A line of text is kept to the byte.
                InputFormat::Lines => say(
                    "the input begins with a byte order mark (ef bb bf), which becomes part of the \
                     first record",
                ),
                _ => drop(head.drain(..3)),
            }
        }
    }
    let head = Cursor::new(head);
    // A terminal would wait for a second Ctrl-D.
    Ok(match ended {
        true => Box::new(head),
        false => Box::new(BufReader::with_capacity(1 << 16, head.chain(input))),
    })
}

fn refuse_foreign(head: &[u8], reader: InputCommand) -> Result<()> {
    let (command, or_raw) = match reader {
        InputCommand::Append => (
            "append ...",
            "; or append it as one record with --format raw",
        ),
        InputCommand::Batch => ("batch", ""),
    };
    if head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff") {
        bail!(
            "the input is UTF-16 (byte 0: {:02x} {:02x}); convert it with `iconv -f UTF-16 -t \
             UTF-8`{or_raw}",
            head[0],
            head[1]
        );
    }
    let packed: [(&[u8], &str, &str); 5] = [
        (b"\x1f\x8b", "gzip", "gunzip -c"),
        (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
        (b"\xfd7zXZ", "xz", "xz -dc"),
        (b"BZh", "bzip2", "bunzip2 -c"),
        (b"PK\x03\x04", "zip", "unzip -p"),
    ];
    for (magic, name, tool) in packed {
        if head.starts_with(magic) {
            let named = match reader {
                InputCommand::Append => " and name the --format",
                InputCommand::Batch => "",
            };
            bail!(
                "the input is compressed ({name}, by its first bytes); unpack it with `{tool} FILE | \
                 walctl {command} -`{named}{or_raw}"
            );
        }
    }
    Ok(())
}

fn too_long(place: &str, most: u64) -> anyhow::Error {
    anyhow!(
        "{place} has more than {most} bytes, the most that the server takes in a record; split it, or raise \
         max_record_bytes of the server"
    )
}

/// Calls `sink` with number and content of each line. A newline at the end of the input
/// ends the last line; it does not begin another. A line of up to `most` bytes and some blanks is read.
fn lines(
    input: &mut dyn BufRead,
    most: u64,
    sink: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let longest = most.saturating_add(BLANK_BYTES);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = input.take(longest).read_until(b'\n', &mut line);
        let read = read.context("cannot read the input")? as u64;
        if read == 0 {
            break;
        }
        if read == longest && !line.ends_with(b"\n") {
            return Err(too_long(&format!("line {number}"), most));
        }
        sink(number, line.strip_suffix(b"\n").unwrap_or(&line))?;
    }
    Ok(())
}

/// Checks that a line is JSON.
fn json_line(number: u64, line: &[u8], reader: InputCommand) -> Result<()> {
    const BATCH: &str = "correct it; see walctl batch --help";
    const LINES: &str = "correct it, or append lines as they are with --format lines";
    if let Err(error) = std::str::from_utf8(line) {
        let at = error.valid_up_to();
        bail!(
            "line {number}, byte {}: {:02x} is not UTF-8, so the line is not JSON; {}",
            at + 1,
            line[at],
            match reader {
                InputCommand::Append => LINES,
                InputCommand::Batch => BATCH,
            }
        );
    }
    let Err(error) = serde_json::from_slice::<&RawValue>(line) else {
        return Ok(());
    };
    let goes_on = number == 1 && error.is_eof() && matches!(line[0], b'{' | b'[');
    let remedy = match (reader, goes_on) {
        (InputCommand::Append, true) => "a value over several lines is --format json-array",
        (InputCommand::Append, false) => LINES,
        (InputCommand::Batch, true) => "write each record on one line; see walctl batch --help",
        (InputCommand::Batch, false) => BATCH,
    };
    bail!(
        "line {number}, byte {} is not JSON: {}; {remedy}",
        error.column(),
        without_place(&error)
    );
}

/// The message of an error without the place in its own count of lines.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

fn json_array(input: &mut dyn BufRead, sink: Sink<'_>) -> Result<()> {
    /// Takes one element after the other, so that the array is never in memory.
    struct Elements<'a, 'b> {
        sink: Sink<'a>,
        /// The sink's error, which serde would turn into text.
        failure: &'b RefCell<Option<anyhow::Error>>,
    }

    impl<'de> Visitor<'de> for Elements<'_, '_> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON array")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<(), A::Error> {
            while let Some(element) = array.next_element::<Box<RawValue>>()? {
                let text = String::from(Box::<str>::from(element));
                if let Err(error) = (self.sink)(InputRecord::plain(text)) {
                    self.failure.replace(Some(error));
                    return Err(A::Error::custom("the sink failed"));
                }
            }
            Ok(())
        }
    }

    const REFUSED: &str = "the input is not a JSON array or JSON values; correct it at this place";
    if first_of_json(input)? != Some(b'[') {
        let values = serde_json::Deserializer::from_reader(input).into_iter::<Box<RawValue>>();
        for value in values {
            let text = String::from(Box::<str>::from(value.context(REFUSED)?));
            sink(InputRecord::plain(text))?;
        }
        return Ok(());
    }
    let failure = RefCell::new(None);
    let mut json = serde_json::Deserializer::from_reader(input);
    let read = json.deserialize_seq(Elements {
        sink,
        failure: &failure,
    });
    if let Some(error) = failure.take() {
        return Err(error);
    }
    read.and_then(|()| json.end()).context(REFUSED)
}

/// The first byte that is no white space. White space before it is consumed, but for the last
/// stretch that lies in the buffer with it.
fn first_of_json(input: &mut dyn BufRead) -> Result<Option<u8>> {
    loop {
        let buffer = input.fill_buf().context("cannot read the input")?;
        if buffer.is_empty() {
            return Ok(None);
        }
        let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        if let Some(at) = buffer.iter().position(|byte| !blank(byte)) {
            return Ok(Some(buffer[at]));
        }
        let length = buffer.len();
        input.consume(length);
    }
}

/// A record as `--output json` prints it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonEntry {
    log: Option<String>,
    /// Read and left: an append gives new ones.
    #[serde(rename = "lsn")]
    _lsn: Option<u64>,
    time: Option<String>,
    text: Option<String>,
    data: Option<String>,
    value: Option<Box<RawValue>>,
    #[serde(default)]
    headers: Vec<JsonHeader>,
    crc32c: Option<u32>,
}

impl JsonEntry {
    fn into_entry(self) -> Result<InputRecord> {
        let data = match (self.text, self.data, self.value) {
            (Some(text), None, None) => Bytes::from(text),
            (None, Some(data), None) => from_base64(&data).context("`data` is not base64")?,
            (None, None, Some(value)) => Bytes::from(String::from(Box::<str>::from(value))),
            _ => bail!("it needs exactly one of `text`, `data` (base64) and `value` (JSON)"),
        };
        let timestamp_us = match self.time {
            None => 0,
            Some(time) => {
                from_rfc3339(&time).with_context(|| format!("`time` is {time:?}, not RFC 3339"))?
            }
        };
        let header = |header: JsonHeader| {
            let value = match (header.value, header.data) {
                (Some(value), None) => Bytes::from(value),
                (None, Some(data)) => from_base64(&data).context("a header is not base64")?,
                _ => bail!("a header needs exactly one of `value` and `data` (base64)"),
            };
            Ok(Header {
                key: header.key,
                value,
            })
        };
        Ok(InputRecord {
            log: self.log,
            data,
            headers: self
                .headers
                .into_iter()
                .map(header)
                .collect::<Result<_>>()?,
            timestamp_us,
            crc32c: self.crc32c,
        })
    }
}

fn json_records(input: &mut dyn BufRead, reader: InputCommand, sink: Sink<'_>) -> Result<()> {
    // Escapes and base64 make a line longer than its record.
    lines(input, u64::MAX, &mut |number, line| {
        let line = line.trim_ascii();
        if line.is_empty() {
            return Ok(());
        }
        json_line(number, line, reader)?;
        let entry = serde_json::from_slice::<JsonEntry>(line)
            .map_err(|error| anyhow!(without_place(&error)))
            .and_then(JsonEntry::into_entry)
            .with_context(|| match reader {
                InputCommand::Append => format!(
                    "line {number} is not a record as --output json prints it (a line that is a payload \
                     is --format jsonl)"
                ),
                InputCommand::Batch => {
                    format!("line {number} is not a record (see walctl batch --help)")
                }
            })?;
        sink(entry)
    })
}

fn delimited(input: &mut dyn BufRead, sink: Sink<'_>) -> Result<()> {
    const EXPECTED: &str = "the input must be the output of `walctl scan --output delimited`: wald.v1.RecordBatch messages";
    let mut at = 0;
    while !input
        .fill_buf()
        .context("cannot read the input")?
        .is_empty()
    {
        let (length, prefix) = varint(input)
            .with_context(|| format!("byte {at}: the input ends within a length; {EXPECTED}"))?;
        if length > MAX_MESSAGE_BYTES {
            bail!("byte {at}: a message of {length} bytes is too long; {EXPECTED}");
        }
        let mut message = Vec::new();
        let read = input.take(length).read_to_end(&mut message);
        let read = read.context("cannot read the input")? as u64;
        if read < length {
            bail!(
                "byte {at}: the input ends within a message of {length} bytes, of these {read} are \
                 there; {EXPECTED}"
            );
        }
        // Payloads are slices of the message.
        let batch = RecordBatch::decode(Bytes::from(message))
            .with_context(|| format!("byte {at}: a message cannot be decoded; {EXPECTED}"))?;
        at += prefix + length;
        let time = batch.timestamp_us;
        for record in batch.records {
            sink(entry(record, &batch.log, time))?;
        }
    }
    Ok(())
}

fn entry(record: proto::Record, log: &str, batch_timestamp_us: i64) -> InputRecord {
    InputRecord {
        log: (!log.is_empty()).then(|| log.to_owned()),
        data: match record.payload {
            Some(Payload::Data(data)) => data,
            Some(Payload::Text(text)) => Bytes::from(text),
            None => Bytes::new(),
        },
        headers: record.headers,
        timestamp_us: match record.timestamp_us {
            0 => batch_timestamp_us,
            own => own,
        },
        crc32c: record.crc32c,
    }
}

/// A number and the bytes that it took.
fn varint(input: &mut dyn BufRead) -> Result<(u64, u64)> {
    let mut value = 0;
    for (taken, shift) in (1..).zip((0..64).step_by(7)) {
        let mut byte = [0];
        input.read_exact(&mut byte)?;
        value |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] < 0x80 {
            return Ok((value, taken));
        }
    }
    bail!("a length has more than 64 bits");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most bytes of a record.
    const MOST: u64 = 1 << 20;

    fn entries(input: &[u8], format: InputFormat) -> Result<Vec<InputRecord>> {
        let mut found = Vec::new();
        records(input, (InputCommand::Append, format), MOST, &mut |entry| {
            found.push(entry);
            Ok(())
        })?;
        Ok(found)
    }

    fn read(input: &[u8], format: InputFormat) -> Result<Vec<Bytes>> {
        let entries = entries(input, format)?;
        Ok(entries.into_iter().map(|entry| entry.data).collect())
    }

    #[track_caller]
    fn refused(input: &[u8], format: InputFormat, parts: &[&str]) {
        let error = format!("{:#}", entries(input, format).unwrap_err());
        for part in parts {
            assert!(error.contains(part), "no {part:?} in {error}");
        }
    }

    #[test]
    fn lines_keep_everything_but_the_newline() {
        assert_eq!(
            read(b"a\n\n b\r\nc", InputFormat::Lines).unwrap(),
            ["a", "", " b\r", "c"]
        );
        assert!(read(b"", InputFormat::Lines).unwrap().is_empty());
        let odd = b"a\0b\n\0\n\xff\xfe\n\x1b[31mred\x1b[0m\ncr\ronly\n";
        let back = read(odd, InputFormat::Lines).unwrap();
        assert_eq!([&back[..].join(&b'\n')[..], b"\n"].concat(), odd);
        assert_eq!(back.len(), 5);
    }

    #[test]
    fn jsonl_skips_blank_lines_and_byte_order_marks_and_reads_crlf() {
        assert_eq!(
            read(b"{\"a\": 1}\n\n 2 \n", InputFormat::Jsonl).unwrap(),
            ["{\"a\": 1}", "2"]
        );
        let marked = b"\xef\xbb\xbf{\"n\":1}\r\n{\"n\":2}\r\n\r\n{\"n\":3}";
        assert_eq!(
            read(marked, InputFormat::Jsonl).unwrap(),
            ["{\"n\":1}", "{\"n\":2}", "{\"n\":3}"]
        );
    }

    #[test]
    fn jsonl_names_line_byte_and_remedy_of_a_bad_line() {
        refused(
            b"1\n{\n",
            InputFormat::Jsonl,
            &["line 2, byte 1", "--format lines"],
        );
        let bad = b"{\"s\":\"ok\"}\n{\"s\":\"\xff\"}\n";
        refused(
            bad,
            InputFormat::Jsonl,
            &["line 2, byte 7: ff is not UTF-8", "--format lines"],
        );
        refused(
            b"{\n\"a\": 1\n}",
            InputFormat::Jsonl,
            &["line 1", "--format json-array"],
        );
    }

    #[test]
    fn lone_surrogates_are_kept_as_they_are_written() {
        let text: &[u8] = b"{\"s\":\"\\ud800\"}\n{\"s\":\"\\udc00\\ud800\"}\n";
        let back = read(text, InputFormat::Jsonl).unwrap();
        assert_eq!([&back[..].join(&b'\n')[..], b"\n"].concat(), text);
    }

    #[test]
    fn json_array_keeps_the_text_of_each_element() {
        let input = b" [ {\"n\": 1.50, \"s\":\"a\\u00e9\"} ,\n[1, 2],1e3,null ] ";
        let expected = ["{\"n\": 1.50, \"s\":\"a\\u00e9\"}", "[1, 2]", "1e3", "null"];
        assert_eq!(read(input, InputFormat::JsonArray).unwrap(), expected);
        assert!(read(b"[]", InputFormat::JsonArray).unwrap().is_empty());
        let marked = b"\xef\xbb\xbf[{\"n\":1},{\"n\":2}]";
        assert_eq!(read(marked, InputFormat::JsonArray).unwrap().len(), 2);
    }

    #[test]
    fn json_without_an_array_is_one_record_per_value() {
        let pretty = b"\n {\n  \"a\": 1,\n  \"b\": [\n    1\n  ]\n}";
        assert_eq!(
            read(pretty, InputFormat::JsonArray).unwrap(),
            ["{\n  \"a\": 1,\n  \"b\": [\n    1\n  ]\n}"]
        );
        assert_eq!(
            read(b"{\"a\":1}\n{\"a\":2}\n", InputFormat::JsonArray).unwrap(),
            ["{\"a\":1}", "{\"a\":2}"]
        );
    }

    #[test]
    fn json_array_refuses_what_is_none_and_names_the_place() {
        refused(b"[1, 2", InputFormat::JsonArray, &["line 1 column 5"]);
        refused(b"[1] 2", InputFormat::JsonArray, &["line 1 column 5"]);
        refused(b"hello", InputFormat::JsonArray, &["line 1 column 1"]);
    }

    #[test]
    fn text_in_utf_16_and_compressed_input_are_refused_with_the_remedy() {
        for format in [
            InputFormat::Lines,
            InputFormat::Jsonl,
            InputFormat::JsonArray,
            InputFormat::Json,
        ] {
            refused(b"\xff\xfe[\0{\0", format, &["byte 0: ff fe", "iconv"]);
            refused(b"\x1f\x8b\x08\0\0\0", format, &["gzip", "gunzip -c"]);
        }
        assert_eq!(read(b"\x1f\x8b", InputFormat::Raw).unwrap()[0].len(), 2);
    }

    #[test]
    fn error_of_the_sink_comes_back_as_it_was() {
        let stop = &mut |_| bail!("enough");
        let error = records(
            &b"[1]"[..],
            (InputCommand::Append, InputFormat::JsonArray),
            MOST,
            stop,
        )
        .unwrap_err();
        assert_eq!(error.to_string(), "enough");
    }

    #[test]
    fn input_without_an_end_is_refused_once_it_is_longer_than_a_record() {
        for (format, place) in [
            (InputFormat::Lines, "line 2"),
            (InputFormat::Jsonl, "line 2"),
            (InputFormat::Raw, "the input"),
        ] {
            let endless = (&b"1\n"[..]).chain(std::io::repeat(b'1'));
            let read = records(endless, (InputCommand::Append, format), 9, &mut |_| Ok(()));
            let error = read.unwrap_err().to_string();
            let said = format!("{place} has more than 9 bytes, the most that the server takes");
            assert!(error.starts_with(&said), "{error}");
        }
        // The longest record is read to the last byte.
        let line = [b'1'; 9];
        for format in [InputFormat::Lines, InputFormat::Jsonl, InputFormat::Raw] {
            let read = records(
                &line[..],
                (InputCommand::Append, format),
                9,
                &mut |_| Ok(()),
            );
            read.unwrap();
        }
    }

    #[test]
    fn json_records_have_log_headers_time_and_payload() {
        let input = br#"{"log":"a","lsn":7,"time":"1970-01-01T00:00:01.000000Z","headers":[{"key":"k","value":"v"},{"key":"b","data":"/w=="}],"value":{"n": 1.0}}
            {"log":"b","data":"/w=="}

            {"text":""}"#;
        let read = entries(input, InputFormat::Json).unwrap();
        let header = |key: &str, value: &'static [u8]| Header {
            key: key.into(),
            value: value.into(),
        };
        assert_eq!(
            read[0],
            InputRecord {
                log: Some("a".into()),
                data: "{\"n\": 1.0}".into(),
                headers: vec![header("k", b"v"), header("b", b"\xff")],
                timestamp_us: 1_000_000,
                crc32c: None,
            }
        );
        assert_eq!(read[1].data, &b"\xff"[..]);
        assert_eq!(read[2], InputRecord::default());
    }

    #[test]
    fn json_record_that_is_none_is_named() {
        for bad in [
            r#"{"log": "a"}"#,
            r#"{"log": "a", "text": "1", "data": ""}"#,
            r#"{"log": "a", "text": "1", "time": "noon"}"#,
            r#"{"n": 1}"#,
            "7",
        ] {
            let input = format!("{}\n{bad}", r#"{"log": "a", "text": ""}"#);
            refused(
                input.as_bytes(),
                InputFormat::Json,
                &["line 2", "--format jsonl"],
            );
        }
    }

    #[test]
    fn delimited_reads_batches_and_names_the_byte_of_a_torn_end() {
        let batch = RecordBatch {
            log: "a".into(),
            timestamp_us: 5,
            records: vec![
                proto::Record {
                    payload: Some(Payload::Data(Bytes::from_static(b"\0\xff"))),
                    timestamp_us: 7,
                    crc32c: Some(9),
                    ..Default::default()
                },
                proto::Record::default(),
            ],
            ..Default::default()
        };
        let mut bytes = batch.encode_length_delimited_to_vec();
        let read = entries(&bytes, InputFormat::Delimited).unwrap();
        assert_eq!(
            (&read[0].data[..], read[0].timestamp_us),
            (&b"\0\xff"[..], 7)
        );
        assert_eq!((read[0].crc32c, read[1].timestamp_us), (Some(9), 5));
        assert_eq!(read[1].log.as_deref(), Some("a"));
        let whole = bytes.len();
        bytes.extend_from_slice(&[3, 10]);
        refused(&bytes, InputFormat::Delimited, &[&format!("byte {whole}")]);
        for bad in [&b"\x80"[..], &[0xff; 11], b"\x01a", b"{\"a\": 1}"] {
            refused(
                bad,
                InputFormat::Delimited,
                &["byte 0", "scan --output delimited"],
            );
        }
    }
}
