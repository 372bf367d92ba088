//! Changes of the objects at their source.

use std::{thread, time::Duration};

use cproxy_tests::{
    random::Random,
    sandbox::Sandbox,
    storm::{
        Storm,
        addresses::{self, CROWD_FRONTENDS, FRONTENDS, SERVICES, Set},
        kernel,
        sets::Sets,
    },
};

use crate::source::{Limits, Source};

/// Number of times that all Services change after a backup, which is more than the API server writes itself.
const CHANGES_AFTER_BACKUP: usize = 20;

/// Number of sets of a Service in [`Change::Hurry`], and the longest life of each.
const HURRIED: usize = 30;
const HURRY_MS: usize = 30;

/// Indices of all Services.
pub(crate) const ALL: [usize; SERVICES] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Change of some Services, or of those beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Change {
    /// Some Services get entirely different backends.
    Replace,
    /// Some lose some backends, at once or after their termination, and get new or former ones.
    Shift,
    /// Some go from one backend to many and back.
    Scale,
    /// Some are deleted and come back at the same address.
    Recreate,
    /// The same without waiting in between.
    RecreateAtOnce,
    /// Other Services take over the addresses, at once where the source allows it.
    Rename,
    /// Other Services claim the same addresses, and then the first ones go. Manifests alone can have that.
    Inherit,
    /// All Services change faster than clients connect, so that freed sets are reused at once.
    Hurry,
    /// Many other Services are added: maps grow.
    Grow,
    /// They are deleted: maps shrink.
    Shrink,
}

impl Change {
    pub(crate) const ALL: [Self; 10] = [
        Self::Replace,
        Self::Shift,
        Self::Scale,
        Self::Recreate,
        Self::RecreateAtOnce,
        Self::Rename,
        Self::Inherit,
        Self::Hurry,
        Self::Grow,
        Self::Shrink,
    ];
}

/// Objects that were written.
pub(crate) struct Objects<'s> {
    sandbox: &'s Sandbox,
    storm: &'s Storm,
    limits: Limits,
    present: Present,
}

/// The objects that are there.
#[derive(Clone, Copy)]
struct Present {
    services: [bool; SERVICES],
    /// Index of each Service's current name.
    names: [usize; SERVICES],
    crowds: usize,
}

/// All objects at one time.
pub(crate) struct Snapshot {
    present: Present,
    sets: [Set; SERVICES],
}

impl<'s> Objects<'s> {
    /// Creates all Services.
    pub(crate) fn create(sandbox: &'s Sandbox, storm: &'s Storm, source: &Source<'_>, random: &mut Random) -> Self {
        let present = Present { services: [false; SERVICES], names: [0; SERVICES], crowds: 0 };
        let mut objects = Self { sandbox, storm, limits: source.limits(), present };
        ALL.into_iter().for_each(|service| objects.replace(source, service, random));
        objects
    }

    /// Makes a change, and waits for the kernel in between if an agent can follow.
    pub(crate) fn make(
        &mut self,
        change: Change,
        services: &[usize],
        source: &Source<'_>,
        can_follow: bool,
        random: &mut Random,
    ) {
        let each = services.iter().copied();
        let wait = |objects: &Self| {
            if can_follow {
                objects.wait();
                objects.confirm();
            }
        };
        match change {
            Change::Replace => each.for_each(|service| self.replace(source, service, random)),
            Change::Shift => each.for_each(|service| self.shift(source, service, random)),
            Change::Scale => {
                for count in [1, self.limits.many, 1] {
                    for service in each.clone() {
                        self.sets().resize(service, count);
                        self.write(source, service);
                    }
                    wait(self);
                }
            }
            Change::Recreate | Change::RecreateAtOnce => {
                each.clone().for_each(|service| self.delete(source, service));
                if change == Change::Recreate {
                    wait(self);
                }
                each.for_each(|service| self.replace(source, service, random));
            }
            Change::Rename => each.for_each(|service| self.rename(source, service, random)),
            Change::Inherit => self.inherit(source, services),
            Change::Hurry => {
                for _ in 0..HURRIED {
                    ALL.into_iter().for_each(|service| self.replace(source, service, random));
                    pause(random);
                }
            }
            Change::Grow => self.grow(source, random),
            Change::Shrink => {
                let fewer = random.below(self.present.crowds.max(1));
                self.set_crowds(source, fewer);
            }
        }
    }

    fn sets(&self) -> Sets<'s> {
        Sets { history: &self.storm.history, sizes: self.limits.sizes }
    }

    fn replace(&mut self, source: &Source<'_>, service: usize, random: &mut Random) {
        self.sets().replace(service, random);
        self.write(source, service);
    }

    fn shift(&mut self, source: &Source<'_>, service: usize, random: &mut Random) {
        self.sets().shift(service, random);
        self.write(source, service);
    }

    fn write(&mut self, source: &Source<'_>, service: usize) {
        let objects = addresses::objects(service, self.present.names[service], self.sets().latest(service));
        let are_there = std::mem::replace(&mut self.present.services[service], true);
        source.write(&file(service), objects, are_there);
    }

    fn delete(&mut self, source: &Source<'_>, service: usize) {
        let objects = addresses::objects(service, self.present.names[service], self.sets().latest(service));
        self.storm.history.announce(service, None);
        source.delete(&file(service), objects);
        self.present.services[service] = false;
    }

    fn rename(&mut self, source: &Source<'_>, service: usize, random: &mut Random) {
        // At an API server, two Services cannot have one address.
        if let Source::Cluster(_) = source {
            self.delete(source, service);
        }
        self.present.names[service] ^= 1;
        self.shift(source, service, random);
    }

    /// Lets other Services claim the addresses. The names decide which claim comes first, so the heir is in force at
    /// once or when the other Service goes.
    fn inherit(&mut self, source: &Source<'_>, services: &[usize]) {
        let heir = |service: usize| format!("heir-{service}");
        let objects = |objects: &Self, service: usize| {
            addresses::objects(service, objects.present.names[service], objects.sets().latest(service))
        };
        for &service in services {
            self.present.names[service] ^= 1;
            self.sets().follow(service);
            source.write(&heir(service), objects(self, service), false);
        }
        kernel::wait_until_contested(self.sandbox);
        for &service in services {
            self.write(source, service);
            source.delete(&heir(service), objects(self, service));
        }
    }

    /// To the limit, or by a random number where that takes time.
    fn grow(&mut self, source: &Source<'_>, random: &mut Random) {
        let most = self.limits.crowds;
        let crowds = match source {
            Source::Manifests(_) => most,
            Source::Cluster(_) => most.min(self.present.crowds + 1 + random.below(most)),
        };
        self.set_crowds(source, crowds);
    }

    fn set_crowds(&mut self, source: &Source<'_>, crowds: usize) {
        let name = |crowd: usize| format!("crowd-{crowd}");
        let objects = |crowd: usize| addresses::crowd(crowd, self.limits.crowd_largest);
        (crowds..self.present.crowds).for_each(|crowd| source.delete(&name(crowd), objects(crowd)));
        (self.present.crowds..crowds).for_each(|crowd| source.write(&name(crowd), objects(crowd), false));
        self.present.crowds = crowds;
    }

    /// Changes everything so often that versions are far ahead of those before.
    pub(crate) fn change_often(&mut self, source: &Source<'_>, random: &mut Random) {
        for _ in 0..CHANGES_AFTER_BACKUP {
            ALL.into_iter().for_each(|service| self.shift(source, service, random));
        }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot { present: self.present, sets: ALL.map(|service| self.sets().latest(service)) }
    }

    /// The source is about to have these objects again.
    pub(crate) fn return_to(&mut self, snapshot: &Snapshot) {
        self.present = snapshot.present;
        for service in ALL {
            self.storm.history.announce(service, self.present.services[service].then_some(snapshot.sets[service]));
        }
    }

    /// Calls may find no Service from now on.
    pub(crate) fn begin_outage(&self) {
        ALL.into_iter().for_each(|service| self.storm.history.announce(service, None));
    }

    /// The Services are there again.
    pub(crate) fn end_outage(&self) {
        for service in ALL.into_iter().filter(|service| self.present.services[*service]) {
            self.storm.history.announce(service, Some(self.sets().latest(service)));
        }
    }

    /// Waits until the kernel has all that was written last.
    pub(crate) fn wait(&self) {
        let wanted = ALL.map(|service| (service, self.storm.history.latest(service)));
        let there = self.present.services.iter().filter(|is_there| **is_there).count();
        let others = self.present.crowds * CROWD_FRONTENDS + self.limits.frontends_beside;
        kernel::wait(self.sandbox, &wanted, there * FRONTENDS + others);
    }

    /// Everything was in the kernel.
    pub(crate) fn confirm(&self) {
        ALL.into_iter().for_each(|service| self.storm.history.confirm(service));
    }
}

/// Waits for a random time, shorter than a change.
pub(crate) fn pause(random: &mut Random) {
    thread::sleep(Duration::from_millis(random.below(HURRY_MS) as u64));
}

fn file(service: usize) -> String {
    format!("web-{service}")
}
