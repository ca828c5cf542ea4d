//! Reasons of errors: their spelling in ErrorInfo, and the catalogue in the comments of
//! `errors.proto`.
//!
//! The comment of a reason has a fixed form. [`catalogue`] reads it for the page of errors
//! (`docs/src/errors.md`), and for the tests that compare the server's answers with it.
//!
//! ```text
//! // MEANING
//! //
//! // - Code CODE, outcome OUTCOME, retry RETRY[: CASE].   (1 or more)
//! // - Facts: FACTS.                                      (optional)
//! // - Remedy: REMEDY.                                    (optional)
//! ```

use std::fmt;

use prost::Message;
use prost_types::FileDescriptorSet;

use crate::FILE_DESCRIPTOR_SET;
use crate::v1::Reason;

/// Beginning of the names in the contract. ErrorInfo omits it.
const PREFIX: &str = "REASON_";
/// Place of the values of the first enumeration in the source info of a file: field 5 of the
/// file, enumeration 0, field 2 of the enumeration.
const VALUES: [i32; 3] = [5, 0, 2];

impl Reason {
    /// The reason as ErrorInfo spells it, such as `POSITION_MISMATCH`.
    pub fn as_str(self) -> &'static str {
        let name = self.as_str_name();
        name.strip_prefix(PREFIX).unwrap_or(name)
    }

    /// Reads a reason of ErrorInfo. [`Reason::Unspecified`] if this version does not know it.
    pub fn from_text(text: &str) -> Self {
        Self::from_str_name(&format!("{PREFIX}{text}")).unwrap_or_default()
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The reasons that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Heading.
    pub title: String,
    /// Facts that are true of every reason of the section.
    pub text: String,
    /// The reasons, in the order of the contract.
    pub entries: Vec<ReasonEntry>,
}

/// A reason, as its comment describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasonEntry {
    /// The reason.
    pub reason: Reason,
    /// The event.
    pub meaning: String,
    /// Every combination of code, outcome and retry that a server may send.
    pub answers: Vec<Answer>,
    /// Keys in the metadata. Empty: none besides `outcome` and `retry`.
    pub facts: String,
    /// The next step of the caller or the operator. May be empty.
    pub remedy: String,
}

/// One combination of code, outcome and retry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code, such as `NOT_FOUND`.
    pub code: String,
    /// The outcome of a request that writes, such as `NOT_APPLIED`.
    pub outcome: String,
    /// Whether a request that writes may be repeated, such as `NEVER`.
    pub retry: String,
    /// The situation with this answer. Empty if the reason has only one.
    pub case: String,
}

impl Answer {
    /// Reads `Code CODE, outcome OUTCOME, retry RETRY[: CASE]`.
    fn parse(item: &str) -> Option<Self> {
        let (answer, case) = item.split_once(": ").unwrap_or((item, ""));
        let mut parts = answer.strip_prefix("Code ")?.split(", ");
        let found = Self {
            code: parts.next()?.to_owned(),
            outcome: parts.next()?.strip_prefix("outcome ")?.to_owned(),
            retry: parts.next()?.strip_prefix("retry ")?.to_owned(),
            case: case.to_owned(),
        };
        parts.next().is_none().then_some(found)
    }
}

/// Every reason of the contract but UNSPECIFIED.
///
/// # Errors
/// Names the first reason whose comment does not have the fixed form.
pub fn catalogue() -> Result<Vec<Section>, String> {
    let set = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).map_err(|error| error.to_string())?;
    let file = set.file.iter().find(|file| {
        let first = file.enum_type.first();
        first.is_some_and(|first| first.name() == "Reason")
    });
    let file = file.ok_or("the contract has no Reason")?;
    let mut sections: Vec<Section> = Vec::new();
    for (place, value) in (0..).zip(file.enum_type.iter().flat_map(|reasons| &reasons.value)) {
        let located = file.source_code_info.iter().flat_map(|info| &info.location);
        let mut located =
            located.filter(|at| at.path.starts_with(&VALUES) && at.path[3..] == [place]);
        let (comment, detached) = located.next().map_or(("", None), |at| {
            (at.leading_comments(), at.leading_detached_comments.first())
        });
        let Some(reason) = Reason::from_str_name(value.name()) else {
            return Err(format!("{} is not known", value.name()));
        };
        if reason == Reason::Unspecified {
            continue;
        }
        if let Some((title, text)) = detached.and_then(|text| text.split_once("\n\n")) {
            sections.push(Section {
                title: one_line(title),
                text: one_line(text),
                entries: Vec::new(),
            });
        }
        let section = sections
            .last_mut()
            .ok_or("the first section has no title")?;
        let entry = parse(reason, comment);
        section.entries.push(entry.ok_or_else(|| {
            format!(
                "the comment of {} does not have the form of a reason",
                value.name()
            )
        })?);
    }
    Ok(sections)
}

fn parse(reason: Reason, comment: &str) -> Option<ReasonEntry> {
    let (meaning, items) = comment.split_once("\n\n")?;
    let mut entry = ReasonEntry {
        reason,
        meaning: one_line(meaning),
        answers: Vec::new(),
        facts: String::new(),
        remedy: String::new(),
    };
    let items = items.trim_start().strip_prefix("- ")?;
    for item in items.split("\n - ") {
        let item = one_line(item);
        let item = item.strip_suffix('.')?;
        match item.split_once(": ") {
            Some(("Facts", facts)) => entry.facts = facts.to_owned(),
            Some(("Remedy", remedy)) => entry.remedy = remedy.to_owned(),
            _ => entry.answers.push(Answer::parse(item)?),
        }
    }
    (!entry.answers.is_empty()).then_some(entry)
}

/// The words of a comment, without its line breaks.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
