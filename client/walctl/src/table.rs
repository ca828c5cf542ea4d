//! Tables: cells that nothing can break out of, as wide as the terminal.
//!
//! Cells hold names and messages of the server, so each is escaped here and nowhere else.

use std::io::{self, IsTerminal};

use comfy_table::{CellAlignment, ContentArrangement, presets};
use wald_text::shown::escaped;

/// Fewest columns of a terminal that cells are wrapped for. A pty whose size nobody set reports
/// 0; wrapped to that, each letter would get a line.
const LEAST_COLUMNS: u16 = 40;

/// A table that grows row by row.
pub(crate) struct Table(comfy_table::Table);

impl Table {
    /// A table without a header.
    pub(crate) fn new() -> Self {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).force_no_tty();
        match columns() {
            Some(columns) => table
                .set_content_arrangement(ContentArrangement::Dynamic)
                .set_width(columns),
            None => table.set_content_arrangement(ContentArrangement::Disabled),
        };
        Self(table)
    }

    /// A table with a header.
    pub(crate) fn with_header<const N: usize>(header: [&str; N]) -> Self {
        let mut table = Self::new();
        table.0.set_header(header);
        table
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.add_row(cells.into_iter().map(|cell| escaped(&cell)));
    }

    /// Aligns columns to the right: numbers.
    pub(crate) fn right(&mut self, columns: impl IntoIterator<Item = usize>) {
        for column in columns {
            if let Some(column) = self.0.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
    }

    /// The lines, without blanks at their ends.
    pub(crate) fn text(&self) -> String {
        self.0.trim_fmt()
    }
}

/// Columns of the terminal that stdout is; `None` if it is none, or nobody knows.
fn columns() -> Option<u16> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&stdout).ok()?;
    (size.ws_col >= LEAST_COLUMNS).then_some(size.ws_col)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_cannot_add_a_row_or_move_the_cursor() {
        let mut table = Table::with_header(["LOG", "NEXT"]);
        table.row(["a\nb\u{1b}[2J\u{202e}c".to_owned(), "1".to_owned()]);
        table.right([1]);
        let text = table.text();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("a\\nb\\u{1b}[2J\\u{202e}c"), "{text}");
    }
}
