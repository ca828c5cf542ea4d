//! Blocks of PEM files, and the place of a fault. Libraries name neither block nor line.

use std::fmt;

const BEGIN: &[u8] = b"-----BEGIN ";
const DASHES: &[u8] = b"-----";

/// A block of a PEM file: its first line `-----BEGIN …-----`, and all lines up to the next such line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PemBlock<'a> {
    /// Number in the file, from 1.
    pub number: usize,
    /// Number of the line in the file that it begins with, from 1.
    pub line: usize,
    /// Its lines.
    pub bytes: &'a [u8],
}

/// The blocks of a file, in order. Bytes before the first one belong to none.
pub fn blocks(pem: &[u8]) -> Vec<PemBlock<'_>> {
    let mut begins: Vec<(usize, usize)> = Vec::new();
    for (number, (at, line)) in (1..).zip(lines(pem)) {
        if line.starts_with(BEGIN) {
            begins.push((number, at));
        }
    }
    let ends = begins.iter().skip(1).map(|(_, at)| *at).chain([pem.len()]);
    let blocks = (1..).zip(begins.iter().zip(ends));
    blocks
        .map(|(number, (&(line, at), end))| PemBlock {
            number,
            line,
            bytes: pem.get(at..end).unwrap_or_default(),
        })
        .collect()
}

/// Whether a file has DER, the binary form, and no PEM.
pub fn is_der(file: &[u8]) -> bool {
    // A sequence whose length takes more than one byte, as in every certificate and key.
    matches!(file, [0x30, 0x81..=0x84, ..])
}

impl PemBlock<'_> {
    /// The fault of a block that a library refused, as one sentence with its place and the remedy. It has nothing of the
    /// content, which may be a key.
    pub fn fault(&self) -> String {
        format!(
            "{self} {}; copy the whole file again from its source",
            self.damage()
        )
    }

    fn damage(&self) -> String {
        let Some(label) = self.label() else {
            return "has a damaged first line; it must be -----BEGIN NAME-----".to_owned();
        };
        let end = format!("-----END {label}-----");
        // A library counts a line of an end that has more behind it.
        let is_end = |line: &[u8]| line.starts_with(end.as_bytes());
        let mut content = (self.line + 1..).zip(lines(self.bytes).skip(1));
        if !content.clone().any(|(_, (_, line))| is_end(line)) {
            return format!("is cut off: it has no line {end}");
        }
        let bad = content
            .by_ref()
            .take_while(|(_, (_, line))| !is_end(line))
            .find(|(_, (_, line))| !line.iter().all(|byte| is_base64(*byte)));
        match bad {
            Some((number, _)) => {
                format!("is damaged: line {number} has characters that are not base64")
            }
            None => "is damaged: its base64 is incomplete or has characters too many".to_owned(),
        }
    }

    /// The name in the first line. `None`: the line is damaged.
    fn label(&self) -> Option<&str> {
        let (_, line) = lines(self.bytes).next()?;
        let label = line.strip_prefix(BEGIN)?.trim_ascii_end();
        let label = std::str::from_utf8(label.strip_suffix(DASHES)?).ok()?;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b' ';
        // A file with other bytes must not act on a terminal.
        (label.len() <= 64 && label.bytes().all(is_plain)).then_some(label)
    }
}

impl fmt::Display for PemBlock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} of the file (line {}", self.number, self.line)?;
        match self.label() {
            Some(label) => write!(f, ": {label})"),
            None => f.write_str(")"),
        }
    }
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=' | b' ' | b'\t')
}

/// The lines of a file with their offsets, without their ends. A line ends with LF, CR LF or CR.
fn lines(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> + Clone {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let begin = at;
        let length = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        let line = &rest[..length.unwrap_or(rest.len())];
        let end = match &rest[line.len()..] {
            [b'\r', b'\n', ..] => 2,
            [] => 0,
            _ => 1,
        };
        at += line.len() + end;
        Some((begin, line))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "-----BEGIN CERTIFICATE-----\nMIIB\nAAAA\n-----END CERTIFICATE-----\n";

    fn faults(file: &str) -> Vec<String> {
        let found = blocks(file.as_bytes());
        found.iter().map(PemBlock::fault).collect()
    }

    #[test]
    fn blocks_have_their_numbers_and_lines() {
        for end in ["\n", "\r\n", "\r"] {
            let text = format!("a note\n{GOOD}\n# another\n{GOOD}").replace('\n', end);
            let found = blocks(text.as_bytes());
            let places: Vec<_> = found
                .iter()
                .map(|block| (block.number, block.line))
                .collect();
            assert_eq!(places, [(1, 2), (2, 8)], "{end:?}");
            assert!(
                found[0]
                    .bytes
                    .ends_with(format!("# another{end}").as_bytes())
            );
            assert!(found[1].bytes.starts_with(BEGIN));
            assert_eq!(
                found[1].to_string(),
                "block 2 of the file (line 8: CERTIFICATE)"
            );
        }
        assert!(blocks(b"").is_empty() && blocks(b"MIIB\n").is_empty());
    }

    #[test]
    fn fault_has_block_line_and_remedy_and_no_content() {
        let key = "-----BEGIN PRIVATE KEY-----\nSECRET\nSEC!RET\n-----END PRIVATE KEY-----\n";
        for (damaged, words) in [
            (
                key,
                "block 2 of the file (line 5: PRIVATE KEY) is damaged: line 7 has characters",
            ),
            (
                "-----BEGIN PRIVATE KEY-----\nSECRET\n",
                "(line 5: PRIVATE KEY) is cut off: it has no line -----END PRIVATE KEY-----",
            ),
            (
                "-----BEGIN PRIVATE KEY-----\nSECRE\n-----END PRIVATE KEY-----\n",
                "is damaged: its base64 is incomplete",
            ),
            (
                "-----BEGIN PRIVATE KEY\nSECRET\n",
                "block 2 of the file (line 5) has a damaged first line",
            ),
            (
                "-----BEGIN \u{1b}[31m-----\nSECRET\n",
                "block 2 of the file (line 5) has a damaged first line",
            ),
        ] {
            let said = faults(&format!("{GOOD}{damaged}{GOOD}")).remove(1);
            assert!(said.contains(words), "{said}");
            assert!(
                said.ends_with("; copy the whole file again from its source"),
                "{said}"
            );
            assert!(!said.contains("SEC") && !said.contains('\u{1b}'), "{said}");
        }
    }

    #[test]
    fn der_is_recognized() {
        assert!(is_der(&[0x30, 0x82, 1, 2]) && is_der(&[0x30, 0x81, 200]));
        assert!(!is_der(GOOD.as_bytes()) && !is_der(b"0") && !is_der(b""));
    }
}
