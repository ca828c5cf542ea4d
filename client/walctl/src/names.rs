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
    /// The pattern that they match, as text, too: it may be a name. `None`: any name with the prefix.
    pattern: Option<(Pattern, String)>,
}

/// Logs that were chosen.
#[derive(Debug, Default)]
pub(crate) struct ChosenLogs {
    pub(crate) logs: Vec<Log>,
    /// Asks for the page behind them. A pattern has none.
    pub(crate) token: Option<String>,
    /// Whether there are more.
    pub(crate) has_more: bool,
}

impl NamePattern {
    /// All logs whose names start with this.
    pub(crate) fn with_prefix(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            pattern: None,
        }
    }

    /// Logs whose names match, as a shell matches a word: `*`, `?` and `[...]`; `*` matches slashes, too. A log whose name is the
    /// pattern itself matches, too.
    ///
    /// # Errors
    /// If the pattern cannot be read.
    pub(crate) fn matching(pattern: &str) -> Result<Self> {
        let mut plain = pattern.to_owned();
        // The library takes `**` for directories.
        while plain.contains("**") {
            plain = plain.replace("**", "*");
        }
        let compiled = Pattern::new(&plain)
            .map_err(|error| Usage(format!("the pattern {pattern:?} cannot be read: {error}")))?;
        let prefix = pattern.split(WILD).next().unwrap_or_default();
        Ok(Self {
            prefix: prefix.to_owned(),
            pattern: Some((compiled, pattern.to_owned())),
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
        let pattern = self.pattern.as_ref();
        pattern.is_none_or(|(pattern, text)| text == name || pattern.matches(name))
    }

    /// The logs of one page of the server's list, and the token of the page behind it.
    ///
    /// # Errors
    /// The errors of ListLogs.
    pub(crate) async fn page(
        &self,
        client: &Client,
        page_size: u32,
        token: Option<String>,
    ) -> Result<(Vec<Log>, Option<String>)> {
        let mut page = client
            .list_logs(self.prefix.as_str(), page_size, token)
            .await?;
        page.logs.retain(|log| self.matches(&log.name));
        Ok((page.logs, page.next_page_token))
    }

    /// The logs, `limit` of them at most (0: all), from the page of a token on.
    ///
    /// # Errors
    /// The errors of ListLogs.
    pub(crate) async fn list(
        &self,
        client: &Client,
        limit: u32,
        mut token: Option<String>,
    ) -> Result<ChosenLogs> {
        let most = match limit {
            0 => usize::MAX,
            limit => limit as usize,
        };
        let mut chosen = ChosenLogs::default();
        loop {
            let missing = u32::try_from(most - chosen.logs.len()).unwrap_or(PAGE);
            // Few logs of a page may match.
            let page_size = match self.pattern {
                Some(_) => PAGE,
                None => missing.min(PAGE),
            };
            let (logs, next) = self.page(client, page_size, token.take()).await?;
            let mut logs = logs.into_iter();
            chosen.logs.extend(logs.by_ref().take(missing as usize));
            let is_cut = logs.next().is_some();
            token = next;
            if chosen.logs.len() >= most || token.is_none() {
                chosen.has_more = is_cut || token.is_some();
                chosen.token = token.filter(|_| self.pattern.is_none());
                return Ok(chosen);
            }
        }
    }

    /// All of the logs.
    ///
    /// # Errors
    /// The errors of ListLogs.
    pub(crate) async fn all(&self, client: &Client) -> Result<Vec<Log>> {
        Ok(self.list(client, 0, None).await?.logs)
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
        let odd = NamePattern::matching("a[b]").unwrap();
        assert!(odd.matches("a[b]") && odd.matches("ab") && !odd.matches("a[b"));
        assert!(NamePattern::matching("a**b").unwrap().matches("a/x/b"));
        assert!(!NamePattern::is_pattern("orders") && NamePattern::is_pattern("o*"));
        assert!(NamePattern::matching("[a").is_err());
    }
}
