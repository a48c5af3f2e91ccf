//! Sizes as people write them.

/// Bytes: a number with K, M or G for 2^10, 2^20, 2^30, from 1K to 1024G.
///
/// # Errors
/// What to write instead.
pub fn size(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (text.get(..at), 1 << 10),
        Some((at, 'M' | 'm')) => (text.get(..at), 1 << 20),
        Some((at, 'G' | 'g')) => (text.get(..at), 1 << 30),
        _ => (Some(text), 1_u64),
    };
    let number = digits.and_then(|digits| digits.parse::<u64>().ok());
    let bytes = number.and_then(|number| number.checked_mul(unit));
    let bytes = bytes.filter(|bytes| (1 << 10..=1 << 40).contains(bytes));
    bytes.ok_or_else(|| "give a number of bytes from 1K to 1024G, such as 256M".to_owned())
}
