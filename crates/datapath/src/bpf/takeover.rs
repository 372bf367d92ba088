//! Taking over a table of an older layout, without a gap.
//!
//! A map whose content both layouts read in the same way stays in force: it gets a pin in the directory of this layout,
//! too. The others are made anew. Each link is then updated to the new program, so that a call runs either the old
//! program or the new one. Where a map was made anew that has state of sockets, the programs that show and free this
//! state stay attached beside the new ones, until the last socket from before has been closed.
//!
//! Every step can be the last one of an agent that is killed: the next one goes on from what is pinned.

mod kept;
mod maps;
mod removal;

use std::path::PathBuf;

use self::maps::carry_maps;
pub use self::{kept::has_kept, removal::end_takeover};
pub(super) use self::{
    kept::{kept_map, kept_programs},
    maps::give_maps_back,
    removal::retire,
};
use super::{
    pins::{PinDir, PinError, PinLock, lock_other_layout, make_and_lock},
    predecessors::{PREDECESSORS, Predecessor},
};

/// Becomes the only agent on a pin directory, and makes the directory of this layout in it. Maps of an older layout
/// that stay in force are then pinned there.
///
/// # Errors
/// Another agent holds it, it holds a layout that cannot be taken over, or a map in it is not ours.
pub fn lock_pins(pins: &PinDir) -> Result<PinLock, PinError> {
    let others = pins.other_layouts()?;
    if let Some(layout) = others.iter().find(|layout| Predecessor::of(**layout).is_none()) {
        return Err(PinError::OtherLayout(pins.directory().to_owned(), *layout));
    }
    // Before anything is made here: it would keep a running older agent from starting again.
    let older = others.into_iter().map(|layout| lock_other_layout(pins, layout)).collect::<Result<_, _>>()?;
    let dir = make_and_lock(pins)?;
    carry_maps(pins)?;
    pins.check_maps()?;
    PinLock::new(pins, dir, older)
}

/// Makes the directory of a lock again and locks it, if it was removed. Returns whether it was.
///
/// # Errors
/// As [`lock_pins`].
pub fn restore_lock(lock: &mut PinLock) -> Result<bool, PinError> {
    if lock.is_in_place()? {
        return Ok(false);
    }
    *lock = lock_pins(lock.pins())?;
    Ok(true)
}

/// Paths at which older layouts may have a link that is to be updated to the new program, the newest layout first.
pub(super) fn links_to_update(pins: &PinDir, name: &str) -> impl Iterator<Item = PathBuf> {
    let updated = PREDECESSORS.into_iter().filter(move |predecessor| !predecessor.keeps(name));
    updated.map(move |predecessor| pins.layout_dir(predecessor.layout).join(name))
}
