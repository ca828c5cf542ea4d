//! Which logs a command takes: all with a prefix, or those whose names match a pattern.

use anyhow::Result;
use glob::Pattern;
use wald_client::Client;
use wald_client::proto::Log;

use crate::exit::Usage;

/// Number of logs requested at a time.
pub(crate) const PAGE: u32 = 1_000;

/// Characters that make a name a pattern.
const WILD: [char; 3] = ['*', '?', '['];

/// A choice of logs by their names.
#[derive(Debug, Clone)]
pub(crate) struct NamePattern {
    /// The beginning that all of them have; the server looks for it.
    prefix: String,
    /// The pattern that they match; `None`: any name with the prefix.
    pattern: Option<Pattern>,
}

impl NamePattern {
    /// All logs whose names start with this.
    pub(crate) fn with_prefix(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            pattern: None,
        }
    }

    /// Logs whose names match, as a shell matches a word: `*`, `?` and `[...]`; `*` matches slashes, too. A pattern
    /// without these is a name.
    ///
    /// # Errors
    /// If the pattern cannot be read.
    pub(crate) fn matching(pattern: &str) -> Result<Self> {
        let compiled = Pattern::new(pattern)
            .map_err(|error| Usage(format!("the pattern {pattern:?} cannot be read: {error}")))?;
        let prefix = pattern.split(WILD).next().unwrap_or_default();
        Ok(Self {
            prefix: prefix.to_owned(),
            pattern: Some(compiled),
        })
    }

    /// Logs that match a pattern if there is one, otherwise all with a prefix.
    ///
    /// # Errors
    /// If the pattern cannot be read.
    pub(crate) fn of(pattern: Option<&str>, prefix: &str) -> Result<Self> {
        pattern.map_or_else(|| Ok(Self::with_prefix(prefix)), Self::matching)
    }

    /// Whether this text is a pattern, and no name.
    pub(crate) fn is_pattern(text: &str) -> bool {
        text.contains(WILD)
    }

    fn matches(&self, name: &str) -> bool {
        self.pattern
            .as_ref()
            .is_none_or(|pattern| pattern.matches(name))
    }

    /// The logs, `limit` of them at most (0: all), and the token of the page behind them.
    ///
    /// # Errors
    /// The errors of ListLogs.
    pub(crate) async fn list(
        &self,
        client: &Client,
        limit: u32,
        mut token: Option<String>,
    ) -> Result<(Vec<Log>, Option<String>)> {
        let mut logs: Vec<Log> = Vec::new();
        loop {
            let page_size = match limit {
                0 => PAGE,
                limit => {
                    let have = u32::try_from(logs.len()).unwrap_or(u32::MAX);
                    limit.saturating_sub(have).min(PAGE)
                }
            };
            let prefix = self.prefix.as_str();
            let page = client.list_logs(prefix, page_size, token.take()).await?;
            let matching = page.logs.into_iter().filter(|log| self.matches(&log.name));
            logs.extend(matching);
            token = page.next_page_token;
            let enough = limit != 0 && logs.len() as u64 >= u64::from(limit);
            if token.is_none() || enough {
                return Ok((logs, token));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_is_matched_as_by_a_shell_and_its_beginning_is_asked_for() {
        let names = NamePattern::matching("shop/*/or?er[s]").unwrap();
        assert_eq!(names.prefix, "shop/");
        assert!(names.matches("shop/de/orders"));
        assert!(names.matches("shop/de/berlin/orders"));
        assert!(!names.matches("shop/de/order"));
        assert!(!names.matches("xshop/de/orders"));
    }

    #[test]
    fn name_without_wild_characters_is_only_itself() {
        let names = NamePattern::matching("orders").unwrap();
        assert!(names.matches("orders") && !names.matches("orders2"));
        assert!(!NamePattern::is_pattern("orders") && NamePattern::is_pattern("o*"));
        assert!(NamePattern::matching("[a").is_err());
    }
}
