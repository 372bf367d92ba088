//! Tracing set of the programs: `cproxy trace` puts it behind the links in the place of the agent's programs, and puts
//! those back at its end.
//!
//! `<pin-dir>/v<layout>/trace/` holds the programs of the set under the names of their links, and the agent's program
//! of each link. The tracer has the directory locked. Programs there without a lock are the rest of a tracer that was
//! killed: the agent puts its own back at its next look, and so does the next tracer.

mod denials;
mod directory;
mod error;
mod event;
mod filter;
mod switch;

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf},
};
use cproxy_ebpf::FrontendKey;

use self::{
    denials::DenialFilter,
    directory::{is_at, lock, remove_all, remove_pins},
    switch::{Slot, put_back, switch_in, switch_out},
};
pub(super) use self::{
    directory::remove_leftover,
    switch::{is_tracing, replaced_program},
};
pub use self::{
    error::TraceError,
    event::{TraceEvent, TracedDenial},
    filter::{TraceDestination, TraceFilter},
};
use super::{
    error::root_cause,
    load::{find_program, load_object, load_program, loader, take_map},
    map_spec::SERVICE_COUNTS,
    object::ProgramSet,
    pins::PinDir,
    policy::send_events,
    probe::Features,
    program::Program,
    service_counters::{self, CountsMap, ServiceCounters},
    signals::SignalsBlocked,
    syscalls::{obj_pin, program_id},
};

// Maps that the plain set has not.
const EVENTS: &str = "TRACE_EVENTS";
const FILTER: &str = "TRACE_FILTER";
const ADDRESSES: &str = "TRACE_ADDRESSES";
const LOST: &str = "TRACE_LOST";

/// The tracing set while it is switched in. Dropping it switches it out, without a report of errors.
pub struct Tracing {
    pins: PinDir,
    slots: Vec<Slot>,
    denials: DenialFilter,
    events: RingBuf<MapData>,
    lost: PerCpuArray<MapData, u64>,
    counts: CountsMap,
    /// Counters from before the start, if the map is the agent's.
    counts_before: ServiceCounters,
    /// Opened and locked directory; `None` after the end.
    dir: Option<OwnedFd>,
}

impl Tracing {
    /// Loads the tracing set and puts it behind all links.
    ///
    /// # Errors
    /// No table is installed, another process traces, or the kernel refuses. Everything is then as it was.
    pub fn start(pins: &PinDir, features: Features, filter: &TraceFilter) -> Result<Self, TraceError> {
        let _blocked = SignalsBlocked::new();
        pins.check_installed()?;
        let dir = lock(pins)?;
        put_back(pins)?;
        let loaded = Self::load(pins, dir, features, filter);
        if loaded.is_err() {
            // The reason for removing is the error that is being reported.
            remove_all(pins).ok();
        }
        let mut loaded = loaded?;
        // From here on, dropping it undoes everything.
        loaded.switch_in()?;
        Ok(loaded)
    }

    fn load(pins: &PinDir, dir: OwnedFd, features: Features, filter: &TraceFilter) -> Result<Self, TraceError> {
        remove_pins(pins)?;
        let mut loader = loader(features);
        loader.map_max_entries(SERVICE_COUNTS, service_counters::entries());
        for name in PinDir::map_names() {
            loader.map_pin_path(name, pins.object(name));
        }
        let failed_counts = |error| TraceError::Io(service_counters::path(pins), error);
        if service_counters::is_pinned(pins).map_err(failed_counts)? {
            loader.map_pin_path(SERVICE_COUNTS, service_counters::path(pins));
        }
        let mut object = load_object(&mut loader, ProgramSet::Tracing)?;
        let slots =
            Program::ALL.into_iter().map(|program| slot(pins, &mut object, program)).collect::<Result<_, _>>()?;
        write_filter(&mut object, filter)?;
        let events = take_map(&mut object, EVENTS)?;
        if let (Map::RingBuf(ring), true) = (&events, filter.denials) {
            send_events(pins, Some(ring.fd().as_fd()))?;
        }
        let events = RingBuf::try_from(events).map_err(failed(EVENTS))?;
        let lost = PerCpuArray::try_from(take_map(&mut object, LOST)?).map_err(failed(LOST))?;
        let counts = take_map(&mut object, SERVICE_COUNTS)?.try_into().map_err(failed(SERVICE_COUNTS))?;
        let counts_before = ServiceCounters::of(&counts).map_err(failed_counts)?;
        Ok(Self {
            pins: pins.clone(),
            slots,
            denials: DenialFilter::new(filter),
            events,
            lost,
            counts,
            counts_before,
            dir: Some(dir),
        })
    }

    /// Puts the set behind the links that do not lead to it: an agent that starts puts its own programs there.
    ///
    /// # Errors
    /// A link is gone, or a program cannot be opened.
    pub fn switch_in(&mut self) -> Result<(), TraceError> {
        // The agent makes the directory again if it was removed, but not the pins in it.
        let directory = directory::directory(&self.pins);
        if !self.dir.as_ref().is_some_and(|dir| is_at(dir, &directory)) {
            return Err(TraceError::Removed(directory));
        }
        self.slots.iter().try_for_each(|slot| switch_in(&self.pins, slot))
    }

    /// Next event, if there is one.
    pub fn next_event(&mut self) -> Option<TraceEvent> {
        loop {
            // An event of another size would be one of another build, which the lock rules out.
            let item = self.events.next()?;
            if let Some(event) = TraceEvent::read(&item).filter(|event| self.denials.passes(event)) {
                return Some(event);
            }
        }
    }

    /// Number of events so far that found the ring buffer full.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.get(&0, 0).map_or(0, |counts| counts.iter().sum())
    }

    /// Counters since the start.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn counters(&mut self) -> io::Result<ServiceCounters> {
        Ok(ServiceCounters::of(&self.counts)?.since(&mut self.counts_before))
    }

    /// Puts the agent's programs back and removes the pins. Events from before can still be read.
    ///
    /// # Errors
    /// A program could not be put back: its pins stay, by which the agent and the next tracer see that.
    pub fn switch_out(&mut self) -> Result<(), TraceError> {
        let directory = directory::directory(&self.pins);
        // The lock is released at the end, whatever it is.
        let Some(dir) = self.dir.take().filter(|dir| is_at(dir, &directory)) else { return Ok(()) };
        // All that can be put back are, before the first error is reported.
        let results: Vec<_> = self.slots.iter().map(|slot| switch_out(&self.pins, slot)).collect();
        results.into_iter().collect::<Result<(), _>>()?;
        send_events(&self.pins, None)?;
        remove_all(&self.pins).map_err(|error| TraceError::Io(directory, error))?;
        drop(dir);
        Ok(())
    }
}

impl AsRawFd for Tracing {
    /// Descriptor that can be read when there are events.
    fn as_raw_fd(&self) -> RawFd {
        self.events.as_raw_fd()
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        // After an error that is being reported. The agent mends what is left.
        self.switch_out().ok();
    }
}

/// Loads a program and pins it.
fn slot(pins: &PinDir, object: &mut Ebpf, program: Program) -> Result<Slot, TraceError> {
    load_program(object, program)?;
    let pin = directory::path(pins, program.link);
    let failed = |error| TraceError::Io(pin.clone(), error);
    let loaded = find_program(object, program)?;
    let tracing = loaded.fd().map_err(io::Error::other).and_then(|fd| fd.try_clone_to_owned()).map_err(failed)?;
    obj_pin(tracing.as_fd(), &pin).map_err(failed)?;
    Ok(Slot { program, id: program_id(tracing.as_fd()).map_err(failed)?, tracing })
}

fn write_filter(object: &mut Ebpf, filter: &TraceFilter) -> Result<(), TraceError> {
    let mut addresses =
        HashMap::<_, FrontendKey, u32>::try_from(take_map(object, ADDRESSES)?).map_err(failed(ADDRESSES))?;
    for key in filter.keys() {
        addresses.insert(key, 1, 0).map_err(failed(ADDRESSES))?;
    }
    let mut wanted = Array::try_from(take_map(object, FILTER)?).map_err(failed(FILTER))?;
    wanted.set(0, filter.for_kernel(), 0).map_err(failed(FILTER))
}

fn failed(name: &'static str) -> impl Fn(MapError) -> TraceError {
    move |error| TraceError::Io(name.into(), io::Error::other(root_cause(&error)))
}
