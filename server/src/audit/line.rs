//! Lines of the audit log: JSON, in which no character acts on a terminal.

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;
use wald_text::shown::escaped_json;

use super::facts::ShownFacts;

/// Maximum length of a text from a request, in characters. A name of a log is shorter.
const TEXT_CHARS: usize = 1024;

/// Outcomes of calls.
pub(super) const OK: &str = "ok";
pub(super) const FAILED: &str = "failed";
/// The change may have been applied.
pub(super) const UNKNOWN: &str = "unknown";
pub(super) const DENIED: &str = "denied";
pub(super) const UNAUTHENTICATED: &str = "unauthenticated";

/// One line. Fields without a value are left out.
#[derive(Serialize, Default)]
pub(super) struct AuditLine<'a> {
    /// RFC 3339, UTC, with microseconds.
    pub(super) time: String,
    pub(super) event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peer: Option<String>,
    /// Empty if it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) principal: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) credential: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rpc: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) op: Option<&'static str>,
    #[serde(flatten)]
    pub(super) facts: Option<ShownFacts<'a>>,
    #[serde(flatten)]
    pub(super) details: Option<Value>,
    pub(super) outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// The fault of a credential, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) why: Option<String>,
}

impl AuditLine<'_> {
    /// The line with the time of now and its line end.
    pub(super) fn text(mut self) -> String {
        self.time = format!("{:.6}", Timestamp::now());
        // A struct of texts and numbers is always JSON.
        let mut text = serde_json::to_string(&self).unwrap_or_default();
        text.push('\n');
        escaped_json(&text)
    }
}

/// The beginning of a text that came with a request.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_json_whose_characters_do_not_act_on_a_terminal() {
        let odd = "a\u{202e}\"\n\u{1b}[2J\u{9b}\u{200b}\u{e0041}";
        let line = AuditLine {
            event: "call",
            principal: Some(odd),
            outcome: OK,
            reason: Some(odd.to_owned()),
            ..AuditLine::default()
        };
        let text = line.text();
        let json = text.strip_suffix('\n').unwrap();
        assert!(!json.chars().any(wald_text::shown::is_unsafe), "{json}");
        let read: Value = serde_json::from_str(json).unwrap();
        assert_eq!(read["principal"], odd);
        assert_eq!(read["reason"], odd);
        let time = read["time"].as_str().unwrap();
        assert_eq!(time.len(), "2026-11-27T18:00:00.000000Z".len(), "{time}");
        assert!(time.ends_with('Z'), "{time}");
        assert!(read.get("log").is_none());
    }

    #[test]
    fn long_text_of_a_request_is_cut() {
        let text = "ü".repeat(TEXT_CHARS + 1);
        assert_eq!(shortened(&text).chars().count(), TEXT_CHARS + 1);
        assert!(shortened(&text).ends_with('…'));
        assert_eq!(shortened("ü"), "ü");
    }
}
