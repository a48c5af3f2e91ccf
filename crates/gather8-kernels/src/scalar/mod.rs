//! The rules of every pass as plain scalar code: the reference that each backend must match bit
//! for bit.

/// The only f32 NaN that is ever stored.
pub const CANONICAL_NAN: u32 = 0x7fc0_0000;
