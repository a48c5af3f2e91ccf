//! Code that the examples and their tests share: the parts of `bench`, `doctor` and `export`, and for `train` a
//! small GPT whose parameters live in a weight store, a seeded generator, and the text that it learns.

pub mod bench;
pub mod doctor;
pub mod driver;
pub mod export;
pub mod gpt;
pub mod random;
pub mod reference;
pub mod seat;
pub mod size;
pub mod text;
pub mod weights;
pub mod whole_file;
