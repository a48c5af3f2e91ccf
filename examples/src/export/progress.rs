//! How far an export has come.

/// Is told how many of the input's bytes are done.
pub trait Progress {
    /// The work begins: so many bytes.
    fn begin(&mut self, bytes: u64);
    /// So many more are done.
    fn advance(&mut self, bytes: u64);
    /// The output is in its place.
    fn end(&mut self);
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: u64) {}

    fn advance(&mut self, _: u64) {}

    fn end(&mut self) {}
}
