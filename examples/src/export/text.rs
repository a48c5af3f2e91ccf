//! Error texts that hold names and messages of strangers.

/// Longer texts are cut.
const LONGEST: usize = 600;

/// One printable line: control characters are escaped (a tensor's name may hold line ends or what a
/// terminal obeys), and a text that goes on and on is cut.
pub fn one_line(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars() {
        if line.len() >= LONGEST {
            line.push('…');
            break;
        }
        if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}') {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}
