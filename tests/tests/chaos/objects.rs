//! Changes of the objects on the API server.

use cproxy_tests::{
    process::cproxy_binary,
    random::Random,
    storm::{
        Storm,
        addresses::{self, CROWD_FRONTENDS, FRONTENDS, SERVICES, Set},
        kernel,
        sets::Sets,
    },
    writer::Writer,
};

use crate::cluster::{Cluster, FRONTENDS_BESIDE};

/// Probability in percent, and limit on the number of backends, of a Service's random sets. A slice has at most 1,000.
const SIZES: &[(usize, u32)] = &[(60, 5), (30, 50), (10, MANY)];
const MANY: u32 = 300;

/// Limit on the number of crowds of other Services, and on the backends of their largest.
const CROWDS: usize = 4;
const CROWD_LARGEST: u32 = 500;

/// Number of times that all Services change after a backup, which is more than the API server writes itself.
const CHANGES_AFTER_BACKUP: usize = 20;

/// Objects that were written.
pub(crate) struct Objects<'s> {
    storm: &'s Storm,
    is_there: [bool; SERVICES],
    crowds: usize,
}

/// All objects at one time.
pub(crate) struct Snapshot {
    is_there: [bool; SERVICES],
    sets: [Set; SERVICES],
    crowds: usize,
}

impl<'s> Objects<'s> {
    /// Creates all Services.
    pub(crate) fn create(storm: &'s Storm, writer: &Writer, random: &mut Random) -> Self {
        let mut objects = Self { storm, is_there: [false; SERVICES], crowds: 0 };
        (0..SERVICES).for_each(|service| objects.replace(writer, service, random));
        objects
    }

    fn sets(&self) -> Sets<'s> {
        Sets { history: &self.storm.history, sizes: SIZES }
    }

    pub(crate) fn replace(&mut self, writer: &Writer, service: usize, random: &mut Random) {
        self.sets().replace(service, random);
        self.write(writer, service);
    }

    pub(crate) fn shift(&mut self, writer: &Writer, service: usize, random: &mut Random) {
        self.sets().shift(service, random);
        self.write(writer, service);
    }

    pub(crate) fn scale(&mut self, writer: &Writer, service: usize) {
        for count in [1, MANY, 1] {
            self.sets().resize(service, count);
            self.write(writer, service);
        }
    }

    fn write(&mut self, writer: &Writer, service: usize) {
        let objects = addresses::objects(service, 0, self.sets().latest(service));
        if std::mem::replace(&mut self.is_there[service], true) {
            writer.replace(objects);
        } else {
            writer.create(objects);
        }
    }

    pub(crate) fn delete(&mut self, writer: &Writer, service: usize) {
        let objects = addresses::objects(service, 0, self.sets().latest(service));
        self.storm.history.announce(service, None);
        writer.delete(objects);
        self.is_there[service] = false;
    }

    /// Makes this many crowds be there.
    pub(crate) fn grow(&mut self, writer: &Writer, random: &mut Random) {
        let more = 1 + random.below(CROWDS);
        (self.crowds..CROWDS.min(self.crowds + more))
            .for_each(|crowd| writer.create(addresses::crowd(crowd, CROWD_LARGEST)));
        self.crowds = CROWDS.min(self.crowds + more);
    }

    pub(crate) fn shrink(&mut self, writer: &Writer, random: &mut Random) {
        let fewer = random.below(self.crowds.max(1));
        (fewer..self.crowds).for_each(|crowd| writer.delete(addresses::crowd(crowd, CROWD_LARGEST)));
        self.crowds = fewer;
    }

    /// Changes everything so often that versions are far ahead of those before.
    pub(crate) fn change_often(&mut self, writer: &Writer, random: &mut Random) {
        for _ in 0..CHANGES_AFTER_BACKUP {
            (0..SERVICES).for_each(|service| self.shift(writer, service, random));
        }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let sets = std::array::from_fn(|service| self.sets().latest(service));
        Snapshot { is_there: self.is_there, sets, crowds: self.crowds }
    }

    /// The API server is about to have these objects again.
    pub(crate) fn return_to(&mut self, snapshot: &Snapshot) {
        for (service, set) in snapshot.sets.into_iter().enumerate() {
            self.storm.history.announce(service, snapshot.is_there[service].then_some(set));
        }
        (self.is_there, self.crowds) = (snapshot.is_there, snapshot.crowds);
    }

    /// Calls may find no Service from now on.
    pub(crate) fn begin_outage(&self) {
        (0..SERVICES).for_each(|service| self.storm.history.announce(service, None));
    }

    /// The Services are there again.
    pub(crate) fn end_outage(&self) {
        for service in (0..SERVICES).filter(|service| self.is_there[*service]) {
            self.storm.history.announce(service, Some(self.sets().latest(service)));
        }
    }

    /// Waits until the kernel has all that was written last.
    pub(crate) fn wait(&self, cluster: &Cluster<'_>) {
        let history = &self.storm.history;
        let wanted: Vec<_> = (0..SERVICES).map(|service| (service, history.latest(service))).collect();
        let there = self.is_there.iter().filter(|is_there| **is_there).count();
        let frontends = there * FRONTENDS + self.crowds * CROWD_FRONTENDS + FRONTENDS_BESIDE;
        kernel::wait(cluster.sandbox, &cproxy_binary(), &wanted, frontends);
    }

    /// Everything was in the kernel.
    pub(crate) fn confirm(&self) {
        (0..SERVICES).for_each(|service| self.storm.history.confirm(service));
    }
}
