//! The rules of every pass as plain scalar code: the reference that each backend must match bit
//! for bit.
//!
//! Everything here works on slices, one element after the other, in the order of operations that
//! the rule states: no fused multiply-add, no reassociation, no flush to zero. Lengths are the
//! caller's business ([`Job::check`](crate::Job::check) has compared them); a function that is
//! given slices of different lengths panics.

mod adamw;
mod amax;
mod cast;
mod elements;
mod gradient;
mod split;
mod update;

pub use adamw::{Adam, EmitMut, MasterMut, Shard, adam_element, optimize};
pub use amax::{abs_bits, amax_word};
pub use cast::{cast, decode, transpose};
pub use elements::{
    CANONICAL_BF16_NAN, CANONICAL_F16_NAN, CANONICAL_NAN, Elements, ElementsMut, bf16_to_f32,
    canonical, f16_to_f32, f32_to_bf16, f32_to_f16,
};
pub use gradient::{
    accumulate, control, divide, divide_in_place, norm, norm_tile, power, sum_norms,
};
pub use split::{is_corrupt, join, join_all, split, split_all, validate_all};
pub use update::update_scales;
