//! The passes as they run: the functions of [`scalar`](crate::scalar), bit for bit.

pub use crate::scalar::{
    accumulate, amax_word, cast, decode, divide, divide_in_place, norm, norm_tile, optimize,
    transpose,
};
