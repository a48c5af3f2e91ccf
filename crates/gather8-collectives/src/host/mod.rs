//! Collectives that the host performs, for ranks whose memory the host can read: contributions are
//! exchanged whole and combined in rank order. How they travel is a [`Link`](seat::Link)'s matter:
//! not at all between threads, over connections between processes.

pub(crate) mod board;
pub(crate) mod combine;
pub(crate) mod group;
pub(crate) mod message;
pub(crate) mod seat;
pub(crate) mod world;
