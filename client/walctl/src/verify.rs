//! `walctl verify`: has a running server check all that it stores.

use std::io::IsTerminal as _;

use anyhow::Result;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use wald_client::Client;
use wald_client::proto::{Finding, FindingKind, FindingSeverity};
use wald_text::shown::escaped;

use crate::args::VerifyArgs;
use crate::exit::ExitKind;
use crate::logs::word;
use crate::output::{Out, Output};
use crate::parse;

pub(crate) async fn run(client: &Client, args: VerifyArgs, output: Output) -> Result<ExitKind> {
    parse::warn_of_slow(args.max_bytes_per_second);
    let mut verification = client
        .verify(args.segment, args.max_bytes_per_second)
        .await?;
    let bar = bar();
    let mut out = Out::new(output);
    let (mut findings, mut checked) = (Vec::new(), 0);
    loop {
        let answer = match verification.next().await {
            Ok(Some(answer)) => answer,
            Ok(None) => break,
            Err(error) => {
                bar.finish_and_clear();
                return Err(error.into());
            }
        };
        checked = answer.checked_bytes;
        bar.set_length(answer.total_bytes);
        bar.set_position(checked);
        for finding in answer.findings {
            match output {
                Output::Text | Output::Raw | Output::Delimited => {
                    let told = bar.suspend(|| {
                        out.line(&line(&finding))?;
                        out.line(&format!("        {}", escaped(&finding.advice)))?;
                        out.flush()
                    });
                    told?;
                }
                Output::Jsonl => {
                    out.json(&json!({ "finding": value(&finding) }))?;
                    out.flush()?;
                }
                Output::Json => {}
            }
            findings.push(finding);
        }
    }
    bar.finish_and_clear();
    let worst = findings.iter().map(Finding::severity).max();
    let worst = worst.unwrap_or(FindingSeverity::Unspecified);
    let name = match worst {
        FindingSeverity::Unspecified => "none".to_owned(),
        _ => severity(worst),
    };
    let summary = json!({ "checked_bytes": checked, "severity": name });
    match output {
        Output::Text | Output::Raw | Output::Delimited => {
            out.line(&in_words(&findings, checked))?
        }
        Output::Jsonl => out.json(&json!({ "summary": summary }))?,
        Output::Json => {
            let mut document = summary;
            document["findings"] = findings.iter().map(value).collect();
            out.json(&document)?;
        }
    }
    out.flush()?;
    Ok(match worst {
        FindingSeverity::Unspecified | FindingSeverity::Note => ExitKind::Ok,
        FindingSeverity::Damage | FindingSeverity::Loss => ExitKind::DataLoss,
    })
}

fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "verifying {wide_bar} {percent:>3}%  {binary_bytes}/{binary_total_bytes}  \
         {binary_bytes_per_sec}  {eta} left",
    );
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn severity(severity: FindingSeverity) -> String {
    word(severity.as_str_name(), "FINDING_SEVERITY_").unwrap_or_default()
}

fn in_words(findings: &[Finding], checked: u64) -> String {
    let count = |wanted| findings.iter().filter(|f| f.severity() == wanted).count();
    let result = match (count(FindingSeverity::Loss), count(FindingSeverity::Damage)) {
        (0, 0) => "nothing is wrong".to_owned(),
        (0, damaged) => format!("{damaged} damaged, no record lost"),
        (lost, damaged) => format!("{lost} with records lost, {damaged} damaged"),
    };
    format!("{} checked: {result}", HumanBytes(checked))
}

/// A finding on one line.
fn line(finding: &Finding) -> String {
    let level = match finding.severity() {
        FindingSeverity::Loss => "LOSS".to_owned(),
        other => severity(other),
    };
    let mut place = Vec::new();
    if !finding.log.is_empty() {
        place.push(format!("log {:?}", finding.log));
    } else if finding.log_id != 0 {
        place.push(format!("log id {}", finding.log_id));
    }
    if let (Some(from), Some(to)) = (finding.from_lsn, finding.to_lsn) {
        // People count inclusively: show the last lsn, not the one after it.
        let last = to.saturating_sub(1);
        place.push(match last == from {
            true => format!("lsn {from}"),
            false => format!("lsn {from} to {last}"),
        });
    }
    if !finding.file.is_empty() && !finding.detail.starts_with(&finding.file) {
        place.push(escaped(&finding.file));
    }
    if let (Some(from), Some(to)) = (finding.from_position, finding.to_position) {
        place.push(match from == to {
            true => format!("position {from}"),
            false => format!("positions {from} to {to}"),
        });
    }
    let mut line = format!("{level:<8}{}", place.join(", "));
    if !place.is_empty() {
        line.push_str(": ");
    }
    line + &escaped(&finding.detail)
}

fn value(finding: &Finding) -> Value {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    json!({
        "kind": word(FindingKind::as_str_name(&finding.kind()), "FINDING_KIND_"),
        "severity": severity(finding.severity()),
        "file": text(&finding.file),
        "segment": finding.segment_id.map(|id| format!("{id:016x}")),
        "from_position": finding.from_position,
        "to_position": finding.to_position,
        "log": text(&finding.log),
        "log_id": (finding.log_id != 0).then_some(finding.log_id),
        "from_lsn": finding.from_lsn,
        "to_lsn": finding.to_lsn,
        "detail": finding.detail,
        "advice": finding.advice,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_names_log_lsns_file_and_positions_without_control_characters() {
        let mut finding = Finding {
            log: "fl\x1bights".into(),
            from_lsn: Some(7),
            to_lsn: Some(9),
            file: "journal/1.seg".into(),
            from_position: Some(64),
            to_position: Some(128),
            detail: "bytes\nare bad".into(),
            ..Default::default()
        };
        finding.set_severity(FindingSeverity::Loss);
        assert_eq!(
            line(&finding),
            "LOSS    log \"fl\\u{1b}ights\", lsn 7 to 8, journal/1.seg, positions 64 to 128: \
             bytes\\nare bad"
        );
        assert_eq!(
            in_words(&[finding], 2048),
            "2.00 KiB checked: 1 with records lost, 0 damaged"
        );
    }
}
