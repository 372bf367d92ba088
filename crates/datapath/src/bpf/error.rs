//! Failures of reading and writing the maps.

use std::{io, iter, path::PathBuf};

use aya::maps::MapError;

/// Attempts to read what the agent changes meanwhile; a change takes it some microseconds.
pub(super) const TRIES_MAX: u32 = 100;

/// Failure to read or write the table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A map could not be opened.
    #[error("cannot open {0}: {cause}; run this as root or with CAP_BPF", cause = root_cause(.1))]
    Open(PathBuf, MapError),
    /// A pinned object could not be used.
    #[error("cannot use {0}: {1}")]
    Pin(PathBuf, io::Error),
    /// There is no memory for a map of this size.
    #[error("cannot make {map} with room for {entries}: {error}")]
    NoMemory {
        /// Its name.
        map: &'static str,
        /// Its size.
        entries: u32,
        /// The kernel's error.
        error: io::Error,
    },
    /// There is no descriptor left.
    #[error("cannot duplicate a descriptor: {0}")]
    Descriptor(io::Error),
    /// The agent replaced a map each time that the table was read.
    #[error("the table was replaced at each of {TRIES_MAX} attempts to read it: try again")]
    AlwaysReplaced,
    /// The agent changed one set each time that it was read.
    #[error("SETS changed at each of {TRIES_MAX} attempts to read it: try again")]
    SetAlwaysChanged,
    /// The agent has given the table more or less room meanwhile.
    #[error("the table was replaced while it was read: try again")]
    Replaced,
    /// A map could not be mapped into memory.
    #[error("cannot map {0} into memory: {1}")]
    Mmap(&'static str, io::Error),
    /// A write failed; the table is as it was after the write before.
    #[error("cannot write {0}: {1}")]
    Write(String, MapError),
    /// A map could not be read.
    #[error("cannot read {0}: {cause}", cause = root_cause(.1))]
    Read(&'static str, MapError),
    /// The kernel gives no random numbers.
    #[error("cannot get a random seed: {0}")]
    Seed(io::Error),
    /// A slot or a set is outside the maps: a bug in the model.
    #[error("{0} is outside the map")]
    OutOfRange(String),
}

/// Innermost error, which has the cause.
pub(super) fn root_cause(error: &dyn std::error::Error) -> String {
    iter::successors(Some(error), |error| error.source()).last().unwrap_or(error).to_string()
}
