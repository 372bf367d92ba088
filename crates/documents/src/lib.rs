//! Command lines in the repository's documents, checked against the programs' own definitions: a document that names a
//! command or a flag which does not exist fails a test.

mod blocks;
mod commands;

pub use self::{
    blocks::{Block, blocks},
    commands::{DocumentCommand, breach, commands},
};
