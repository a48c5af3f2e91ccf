//! Ranks as processes: how they find and recognise each other, and how contributions travel.

pub(crate) mod door;
pub(crate) mod handshake;
pub(crate) mod mesh;
pub(crate) mod post;
pub(crate) mod proof;
pub(crate) mod rendezvous;
#[cfg(unix)]
pub(crate) mod token;
pub(crate) mod wire;
