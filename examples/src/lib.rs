//! Code that the examples and the conformance tests share.
