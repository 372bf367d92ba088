//! Products that take minutes to build: built in the background, one after the other, while suites that need none run.

use std::{
    path::PathBuf,
    sync::mpsc::{self, Receiver, Sender},
    thread::Scope,
};

use anyhow::{Result, anyhow};

use crate::{
    binary::{AGENT, Binary, Program, RELAY},
    debian, dist,
    fleet::FleetFiles,
    fuzz::Fuzzer,
    older,
    releases::{HELM, KUBERNETES, OLDEST_KUBERNETES, PROMETHEUS, Release},
    run, sizes, vm,
};

/// A product, or why there is none.
pub(super) type Built<T> = Result<T, String>;

/// The reason as text, which can be into_built more than once.
pub(super) fn into_built<T>(result: Result<T>) -> Built<T> {
    result.map_err(|error| format!("{error:#}"))
}

/// Which products to build besides the agent and the relay.
pub(super) struct Wanted {
    /// The control plane, or why it cannot run here.
    pub(super) control_plane: Option<Built<()>>,
    /// That of the oldest release that is supported.
    pub(super) is_with_oldest: bool,
    /// The latest promtool.
    pub(super) is_with_promtool: bool,
    /// Images and kernels of guests, or why guests cannot run here.
    pub(super) guests: Option<Built<()>>,
    /// A release and a system to install its packages in, or why they cannot be made here.
    pub(super) packages: Option<Built<()>>,
    /// The files of a fleet.
    pub(super) is_with_fleet: bool,
    pub(super) is_with_fuzzer: bool,
    pub(super) is_with_older: bool,
}

/// Products that are built so far.
#[derive(Default)]
struct Finished {
    agent: Option<Built<Binary>>,
    /// Whether the agent is as small as it is promised to be.
    agent_size: Option<Built<()>>,
    relay: Option<Built<Binary>>,
    /// The same of the relay.
    relay_size: Option<Built<()>>,
    control_plane: Option<Built<PathBuf>>,
    helm: Option<Built<PathBuf>>,
    oldest: Option<Built<PathBuf>>,
    promtool: Option<Built<PathBuf>>,
    guests: Option<Built<(vm::GuestFiles, PathBuf)>>,
    packages: Option<Built<Packages>>,
    fleet: Option<Built<FleetFiles>>,
    fuzzer: Option<Built<Fuzzer>>,
    older: Option<Built<String>>,
}

/// A release, and a system to install its packages in.
pub(super) struct Packages {
    pub(super) release: PathBuf,
    pub(super) debian: PathBuf,
}

/// A change to [`Finished`].
type Product = Box<dyn FnOnce(&mut Finished) + Send>;

/// Everything that is built in the background.
pub(super) struct Products {
    finished: Finished,
    receiver: Receiver<Product>,
}

impl Products {
    /// Starts to build.
    pub(super) fn build<'scope>(scope: &'scope Scope<'scope, '_>, wanted: Wanted) -> Self {
        let (sender, receiver) = mpsc::channel();
        scope.spawn(move || {
            run::lower_priority();
            build(wanted, &sender);
        });
        Self { finished: Finished::default(), receiver }
    }

    /// The shipped agent.
    pub(super) fn agent(&mut self) -> Result<&Binary> {
        self.wait_for(|finished| finished.agent.as_ref())
    }

    /// The shipped relay.
    pub(super) fn relay(&mut self) -> Result<&Binary> {
        self.wait_for(|finished| finished.relay.as_ref())
    }

    /// Fails when the agent or the relay is larger than promised.
    pub(super) fn check_sizes(&mut self) -> Result<()> {
        self.wait_for(|finished| finished.agent_size.as_ref())?;
        self.wait_for(|finished| finished.relay_size.as_ref()).copied()
    }

    /// The directory of the control plane's binaries.
    pub(super) fn control_plane(&mut self) -> Result<&PathBuf> {
        self.wait_for(|finished| finished.control_plane.as_ref())
    }

    /// The directory of Helm's binary.
    pub(super) fn helm(&mut self) -> Result<&PathBuf> {
        self.wait_for(|finished| finished.helm.as_ref())
    }

    /// The directory of the oldest supported control plane's binaries.
    pub(super) fn oldest(&mut self) -> Result<&PathBuf> {
        self.wait_for(|finished| finished.oldest.as_ref())
    }

    /// The directory of the latest promtool.
    pub(super) fn promtool(&mut self) -> Result<&PathBuf> {
        self.wait_for(|finished| finished.promtool.as_ref())
    }

    /// Files that guests are started with, and their kernel.
    pub(super) fn guests(&mut self) -> Result<&(vm::GuestFiles, PathBuf)> {
        self.wait_for(|finished| finished.guests.as_ref())
    }

    /// A release, and a system to install its packages in.
    pub(super) fn packages(&mut self) -> Result<&Packages> {
        self.wait_for(|finished| finished.packages.as_ref())
    }

    /// The files of a fleet.
    pub(super) fn fleet(&mut self) -> Result<&FleetFiles> {
        self.wait_for(|finished| finished.fleet.as_ref())
    }

    /// The fuzz targets.
    pub(super) fn fuzzer(&mut self) -> Result<&Fuzzer> {
        self.wait_for(|finished| finished.fuzzer.as_ref())
    }

    /// Agents of older layouts.
    pub(super) fn older(&mut self) -> Result<&String> {
        self.wait_for(|finished| finished.older.as_ref())
    }

    /// Waits until nothing is left to build.
    pub(super) fn wait_for_all(&mut self) {
        while self.receive() {}
    }

    fn wait_for<T>(&mut self, product: impl Fn(&Finished) -> Option<&Built<T>>) -> Result<&T> {
        while product(&self.finished).is_none() && self.receive() {}
        match product(&self.finished) {
            Some(built) => built.as_ref().map_err(|reason| anyhow!("{reason}")),
            None => Err(anyhow!("left out")),
        }
    }

    /// Whether there was another product.
    fn receive(&mut self) -> bool {
        match self.receiver.recv() {
            Ok(product) => {
                product(&mut self.finished);
                true
            }
            Err(_) => false,
        }
    }
}

fn build(wanted: Wanted, sender: &Sender<Product>) {
    let send = |product: Product| {
        // The receiver is gone when the tests have ended early.
        sender.send(product).ok();
    };
    let (agent, size) = build_program(&AGENT);
    let programs = agent.clone();
    send(Box::new(move |finished| (finished.agent, finished.agent_size) = (Some(agent), Some(size))));
    if wanted.is_with_older {
        let built = into_built(older::ensure());
        send(Box::new(|finished| finished.older = Some(built)));
    }
    let release = |release: &Release| into_built(release.ensure());
    if let Some(can_run) = &wanted.control_plane {
        let built = can_run.clone().and_then(|()| release(&KUBERNETES));
        send(Box::new(|finished| finished.control_plane = Some(built)));
        let built = release(&HELM);
        send(Box::new(|finished| finished.helm = Some(built)));
    }
    let (relay, size) = build_program(&RELAY);
    let packages = wanted.packages.map(|can_run| {
        let programs = can_run.and_then(|()| Ok((programs.clone()?, relay.clone()?)));
        programs.and_then(|(agent, relay)| into_built(packages(&agent, &relay)))
    });
    let both = programs.clone().and_then(|agent| Ok((agent, relay.clone()?)));
    send(Box::new(move |finished| (finished.relay, finished.relay_size) = (Some(relay), Some(size))));
    send(Box::new(|finished| finished.packages = packages));
    if let Some(can_run) = wanted.guests {
        let built = can_run.and(programs).and_then(|agent| into_built(guests(&agent.shipped)));
        send(Box::new(|finished| finished.guests = Some(built)));
    }
    if wanted.is_with_fuzzer {
        let built = into_built(Fuzzer::build_logged());
        send(Box::new(|finished| finished.fuzzer = Some(built)));
    }
    if wanted.is_with_oldest {
        let built = wanted.control_plane.unwrap_or(Ok(())).and_then(|()| release(&OLDEST_KUBERNETES));
        send(Box::new(|finished| finished.oldest = Some(built)));
    }
    if wanted.is_with_fleet {
        let built = both.and_then(|(agent, relay)| into_built(FleetFiles::new(&agent.shipped, &relay.shipped)));
        send(Box::new(|finished| finished.fleet = Some(built)));
    }
    if wanted.is_with_promtool {
        let built = release(&PROMETHEUS);
        send(Box::new(|finished| finished.promtool = Some(built)));
    }
}

/// A program, and whether it is as small as promised.
fn build_program(program: &Program) -> (Built<Binary>, Built<()>) {
    let binary = into_built(program.build_logged());
    let size = binary.as_ref().map_err(Clone::clone).and_then(|binary| into_built(sizes::check(program, binary)));
    (binary, size)
}

fn guests(agent: &std::path::Path) -> Result<(vm::GuestFiles, PathBuf)> {
    Ok((vm::GuestFiles::for_tests(agent)?, vm::GuestFiles::kernel()?))
}

fn packages(agent: &Binary, relay: &Binary) -> Result<Packages> {
    Ok(Packages { release: dist::for_tests(agent, relay)?, debian: debian::root()? })
}
