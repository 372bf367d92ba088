//! The pin directory: `<pin-dir>/v<layout>/` holds our maps and links by name, and nothing else is ever touched.

mod dir;
mod lock;
mod remove;

pub use self::{
    dir::{PinDir, PinError},
    lock::PinLock,
    remove::Removed,
};
pub(super) use self::{
    dir::{TRACE_DIRECTORY, difference, list, remove_if_empty, remove_pins_in, remove_with_pins},
    lock::{lock_other_layout, make_and_lock},
};
