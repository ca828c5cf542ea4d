//! Input: from bytes to records, streaming, so that a file larger than memory loads.

use std::cell::RefCell;
use std::fmt;
use std::io::{BufRead, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::ValueEnum;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// How records are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Each line is a record, without its newline.
    Lines,
    /// Each line is a record and must be JSON; blank lines are skipped.
    Jsonl,
    /// The input is one JSON array; each element is a record, its text exactly as it is.
    JsonArray,
    /// The whole input is one record.
    Raw,
    /// Each record is preceded by its length, as a protobuf varint.
    Delimited,
}

impl Format {
    /// What the extension of a file promises.
    pub(crate) fn of(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("jsonl" | "ndjson") => Self::Jsonl,
            Some("json") => Self::JsonArray,
            _ => Self::Lines,
        }
    }
}

/// Where records go. An error ends the reading.
type Sink<'a> = &'a mut dyn FnMut(Bytes) -> Result<()>;

/// Calls `sink` with each record, in order.
pub(crate) fn records(input: &mut dyn BufRead, format: Format, sink: Sink<'_>) -> Result<()> {
    match format {
        Format::Lines => lines(input, &mut |_, line| sink(Bytes::copy_from_slice(line))),
        Format::Jsonl => lines(input, &mut |number, line| {
            let line = line.trim_ascii();
            if line.is_empty() {
                return Ok(());
            }
            serde_json::from_slice::<&RawValue>(line)
                .with_context(|| format!("line {number} is not JSON"))?;
            sink(Bytes::copy_from_slice(line))
        }),
        Format::JsonArray => json_array(input, sink),
        Format::Raw => {
            let mut record = Vec::new();
            input
                .read_to_end(&mut record)
                .context("reading the input")?;
            sink(record.into())
        }
        Format::Delimited => delimited(input, sink),
    }
}

/// Calls `sink` with number and content of each line. A newline at the end of the input
/// ends the last line; it does not begin another.
pub(crate) fn lines(
    input: &mut dyn BufRead,
    sink: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if input
            .read_until(b'\n', &mut line)
            .context("reading the input")?
            == 0
        {
            break;
        }
        sink(number, line.strip_suffix(b"\n").unwrap_or(&line))?;
    }
    Ok(())
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
            f.write_str("a JSON array (one JSON value per line is --format jsonl)")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<(), A::Error> {
            while let Some(element) = array.next_element::<Box<RawValue>>()? {
                let text = String::from(Box::<str>::from(element));
                if let Err(error) = (self.sink)(text.into()) {
                    self.failure.replace(Some(error));
                    return Err(A::Error::custom("the sink failed"));
                }
            }
            Ok(())
        }
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
    read.and_then(|()| json.end())
        .context("the input is not a JSON array")
}

fn delimited(input: &mut dyn BufRead, sink: Sink<'_>) -> Result<()> {
    while !input.fill_buf().context("reading the input")?.is_empty() {
        let length = varint(input)?;
        let mut record = Vec::new();
        let read = input
            .take(length)
            .read_to_end(&mut record)
            .context("reading the input")?;
        if (read as u64) < length {
            bail!("the input ends within a record of {length} bytes: only {read} are there");
        }
        sink(record.into())?;
    }
    Ok(())
}

fn varint(input: &mut dyn BufRead) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        input
            .read_exact(&mut byte)
            .context("the input ends within a length")?;
        value |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] < 0x80 {
            return Ok(value);
        }
    }
    bail!("a length is more than 64 bits: is the input length-delimited?");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &[u8], format: Format) -> Result<Vec<String>> {
        let mut found = Vec::new();
        records(&mut &input[..], format, &mut |record| {
            found.push(String::from_utf8(record.to_vec())?);
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn lines_keep_everything_but_the_newline() {
        assert_eq!(
            read(b"a\n\n b\r\nc", Format::Lines).unwrap(),
            ["a", "", " b\r", "c"]
        );
        assert!(read(b"", Format::Lines).unwrap().is_empty());
    }

    #[test]
    fn jsonl_skips_blank_lines_and_names_a_bad_one() {
        assert_eq!(
            read(b"{\"a\": 1}\n\n 2 \n", Format::Jsonl).unwrap(),
            ["{\"a\": 1}", "2"]
        );
        let error = read(b"1\n{\n", Format::Jsonl).unwrap_err();
        assert!(
            format!("{error:#}").contains("line 2 is not JSON"),
            "{error:#}"
        );
    }

    #[test]
    fn json_array_keeps_the_text_of_each_element() {
        let input = b" [ {\"n\": 1.50, \"s\":\"a\\u00e9\"} ,\n[1, 2],1e3,null ] ";
        let expected = ["{\"n\": 1.50, \"s\":\"a\\u00e9\"}", "[1, 2]", "1e3", "null"];
        assert_eq!(read(input, Format::JsonArray).unwrap(), expected);
        assert!(read(b"[]", Format::JsonArray).unwrap().is_empty());
    }

    #[test]
    fn json_array_refuses_what_is_none() {
        assert!(read(b"{\"a\": 1}", Format::JsonArray).is_err());
        assert!(read(b"[1, 2", Format::JsonArray).is_err());
        assert!(read(b"[1] 2", Format::JsonArray).is_err());
    }

    #[test]
    fn error_of_the_sink_comes_back_as_it_was() {
        let stop = &mut |_| bail!("enough");
        let error = records(&mut &b"[1]"[..], Format::JsonArray, stop).unwrap_err();
        assert_eq!(error.to_string(), "enough");
    }

    #[test]
    fn delimited_reads_lengths_and_notices_a_torn_end() {
        assert_eq!(
            read(b"\x01a\x00\x02bc", Format::Delimited).unwrap(),
            ["a", "", "bc"]
        );
        assert!(read(b"\x03ab", Format::Delimited).is_err());
        assert!(read(b"\x80", Format::Delimited).is_err());
        assert!(read(&[0xff; 11], Format::Delimited).is_err());
    }
}
