//! Characters that people do not see, or that move the cursor of a terminal.
//!
//! A name or a payload may hold them to look like another one (`pay\u{202e}lla`), to hide a part, or to
//! give the terminal orders. [`escaped`] is for text, [`escaped_json`] for JSON, whose meaning
//! stays the same.

use std::fmt::Write as _;

/// Whether a character has no width or changes the order of its neighbours: bidirectional
/// controls, joiners, variation selectors, tags, and line and paragraph separators. Source:
/// `Default_Ignorable_Code_Point` of Unicode 16, with U+2028, U+2029, U+FFF9 to U+FFFB and the
/// format controls of hieroglyphs.
pub fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Whether a character is blank and is not the plain space: U+00A0, wide and thin spaces, the
/// empty Braille pattern.
pub fn is_odd_blank(character: char) -> bool {
    matches!(
        character,
        '\u{a0}' | '\u{1680}' | '\u{2000}'
            ..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{2800}' | '\u{3000}'
    )
}

/// Whether a terminal must not get a character as it is.
pub fn is_unsafe(character: char) -> bool {
    character.is_control() || is_invisible(character)
}

/// Text for a terminal, on one line: characters that are controls or invisible are escaped.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match is_unsafe(character) {
            true => safe.extend(character.escape_default()),
            false => safe.push(character),
        }
    }
    safe
}

/// Bytes for a terminal, on one line: as [`escaped`] if they are text, each odd byte as `\xff`
/// otherwise.
pub fn escaped_bytes(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => escaped(text),
        Err(_) => bytes.escape_ascii().to_string(),
    }
}

/// JSON for a terminal. Characters that are controls or invisible become `\u` escapes, which
/// mean the same within strings; JSON has none of them elsewhere. Line ends stay.
pub fn escaped_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for character in json.chars() {
        if character == '\n' || !is_unsafe(character) {
            safe.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(safe, "\\u{unit:04x}");
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_for_a_terminal_has_no_control_and_no_invisible_character() {
        assert_eq!(escaped("grün\t\x1b[2J\n"), "grün\\t\\u{1b}[2J\\n");
        assert_eq!(escaped("a\u{9b}31m\u{7f}"), "a\\u{9b}31m\\u{7f}");
        assert_eq!(escaped("pay\u{202e}lla"), "pay\\u{202e}lla");
        assert_eq!(escaped("a\u{200b}b\u{feff}"), "a\\u{200b}b\\u{feff}");
    }

    #[test]
    fn bytes_that_are_no_text_are_escaped_one_by_one() {
        assert_eq!(escaped_bytes(b"\xff\x1b\n"), "\\xff\\x1b\\n");
        assert_eq!(escaped_bytes("é".as_bytes()), "é");
    }

    #[test]
    fn json_for_a_terminal_has_escapes_of_the_same_meaning() {
        assert_eq!(
            escaped_json("{\"a\u{202e}\":\"\u{9b}\u{e0041}\"}\n"),
            "{\"a\\u202e\":\"\\u009b\\udb40\\udc41\"}\n"
        );
    }

    #[test]
    fn visible_text_of_many_scripts_stays_as_it_is() {
        for text in ["héllo wörld", "日本語　ログ", "العربية", "नमस्ते", "🙂 €"]
        {
            assert_eq!(escaped(text), text);
            assert_eq!(escaped_json(text), text);
        }
    }

    #[test]
    fn blanks_other_than_the_plain_space_are_known() {
        assert!(is_odd_blank('\u{a0}') && is_odd_blank('\u{3000}'));
        assert!(!is_odd_blank(' ') && !is_odd_blank('x'));
    }
}
