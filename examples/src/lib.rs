//! Code that the examples and the conformance tests share.

pub mod bench;
pub mod export;
pub mod whole_file;
