//! Frontends that several Services, or several ports of one, claim.

use std::collections::BTreeMap;

use super::TablePlanner;
use crate::{
    Frontend, Problem, ServiceName,
    problem::{FRONTENDS_NAMED_MAX, some_of},
};

/// Owner of a contested frontend.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Owner<'a> {
    Port(&'a str),
    Service(&'a ServiceName),
}

/// Frontends that one Service loses to one owner.
#[derive(Default)]
struct Lost {
    count: usize,
    first: Vec<Frontend>,
    last: Option<Frontend>,
}

impl TablePlanner {
    /// Remembers whether a frontend, whose claims have changed, has several.
    pub(super) fn mark_contested(&mut self, frontend: Frontend) {
        let is_contested = self.frontends.claims(frontend).len() > 1;
        let was_contested =
            if is_contested { !self.contested.insert(frontend) } else { self.contested.remove(&frontend) };
        self.has_other_problems |= is_contested || was_contested;
    }

    /// One problem for each Service that loses frontends, and each owner that it loses them to.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = Problem> {
        let mut all = BTreeMap::<(&ServiceName, Owner<'_>), Lost>::new();
        for &frontend in &self.contested {
            let [first, losers @ ..] = self.frontends.claims(frontend) else { continue };
            for claim in losers {
                let is_own = first.service == claim.service;
                let owner = if is_own { Owner::Port(&first.port_name) } else { Owner::Service(&first.service) };
                all.entry((&claim.service, owner)).or_default().add(frontend);
            }
        }
        all.into_iter().map(|((service, owner), lost)| lost.problem(service, &owner))
    }
}

impl Lost {
    fn add(&mut self, frontend: Frontend) {
        if self.last.replace(frontend) == Some(frontend) {
            return;
        }
        self.count += 1;
        if self.first.len() < FRONTENDS_NAMED_MAX {
            self.first.push(frontend);
        }
    }

    fn problem(&self, service: &ServiceName, owner: &Owner<'_>) -> Problem {
        let belong = if self.count == 1 { "belongs" } else { "belong" };
        let owner = match owner {
            Owner::Port(name) => format!("its own port {name:?}"),
            Owner::Service(name) => format!("Service {name}"),
        };
        let frontends = some_of(&self.first, self.count);
        let message = format!("{frontends} {belong} to {owner}, which comes first");
        Problem::new(format_args!("Service {service}"), "", message)
    }
}
