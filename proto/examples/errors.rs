//! Writes the tables of `docs/src/errors.md` from the comments of `wald/v1/errors.proto`.
//!
//! `cargo run -p wald-proto --example errors`

use std::path::Path;

use wald_proto::reasons::{Answer, ReasonEntry, Section, catalogue};

const PAGE: &str = "../docs/src/errors.md";
const START: &str = "<!-- reasons: written by `cargo run -p wald-proto --example errors` -->\n";
const END: &str = "<!-- end of reasons -->";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = std::fs::read_to_string(&path)?;
    std::fs::write(path, renewed(&page, &catalogue()?)?)?;
    Ok(())
}

/// The page with new tables between its two marks.
fn renewed(page: &str, sections: &[Section]) -> Result<String, String> {
    let parts = page.split_once(START).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some((before, after))
    });
    let (before, after) = parts.ok_or("the page has no marks for the tables")?;
    let tables: String = sections.iter().map(table).collect();
    Ok(format!("{before}{START}{tables}\n{END}{after}"))
}

fn table(section: &Section) -> String {
    let Section {
        title,
        text,
        entries,
    } = section;
    let rows: String = entries.iter().map(row).collect();
    format!(
        "\n## {title}\n\n{text}\n\n| reason | meaning | code, outcome, retry | facts | remedy |\n|---|---|---|---|---|\n{rows}"
    )
}

fn row(entry: &ReasonEntry) -> String {
    let ReasonEntry {
        reason,
        meaning,
        answers,
        facts,
        remedy,
    } = entry;
    let answers: Vec<String> = answers.iter().map(answer).collect();
    let answers = answers.join("<br>");
    format!("| {reason} | {meaning} | {answers} | {facts} | {remedy} |\n")
}

fn answer(answer: &Answer) -> String {
    let Answer {
        code,
        outcome,
        retry,
        case,
    } = answer;
    let case = match case.is_empty() {
        true => String::new(),
        false => format!(": {case}"),
    };
    format!("{code}, {outcome}, {retry}{case}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "what fails here fails the test")]
mod tests {
    use super::*;

    #[test]
    fn page_of_errors_is_as_the_contract_has_it() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
        let page = std::fs::read_to_string(path).unwrap();
        assert!(
            page == renewed(&page, &catalogue().unwrap()).unwrap(),
            "docs/src/errors.md is stale: cargo run -p wald-proto --example errors"
        );
    }
}
