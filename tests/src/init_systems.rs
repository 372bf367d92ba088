//! Other init systems than systemd: their programs, and the documented steps of an installation.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_documents::blocks;

use crate::guest::path_from_env;

/// Variable with an archive of OpenRC, runit, s6, logrotate and their libraries.
const VARIABLE: &str = "CPROXY_INIT_SYSTEMS";

/// Page with the steps.
const PAGE: &str = "docs/integrations/plain-node.md";

/// Path of the archive.
///
/// # Panics
/// When the variable is not set.
pub fn archive() -> PathBuf {
    path_from_env(VARIABLE, "cargo xtask test")
}

/// The page's commands that contain these words.
///
/// # Panics
/// When it has none.
pub fn steps(words: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE);
    let page = fs::read_to_string(page).unwrap_or_else(|error| panic!("{PAGE}: {error}"));
    let block = blocks(&page).into_iter().find(|block| block.text.contains(words));
    block.unwrap_or_else(|| panic!("{PAGE} has no block with {words:?}")).text
}
