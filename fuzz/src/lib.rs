//! Invariants that hold for every input; shared by the fuzz targets.

pub mod kernel_maps;

use std::collections::BTreeSet;

use cproxy::report::{self, FrontendRow};
use cproxy_core::{
    Action, Address, Backend, KernelTable, Limits, Problem, Reserve, Row, Scope, Store, TablePlanner, resolve,
};
use cproxy_datapath::bpf::KernelMaps;

/// The Service that keeps its last backends, so that a full recomputation can differ for it.
const PROTECTED: (&str, &str) = ("default", "kubernetes");

/// Limits of maps with hardly any room.
const CRAMPED: Limits = Limits {
    frontends: 5,
    sets: 3,
    slots: 4,
    run_backends: 2,
    reserved: Reserve { sets: 0, slots: 0 },
    ..KernelMaps::LIMITS
};

/// The tables of an agent that follows a store: one with room, and one without.
pub struct TablePlanners {
    table: TablePlanner,
    cramped: TablePlanner,
    is_synced: bool,
}

impl Default for TablePlanners {
    fn default() -> Self {
        let table = |limits| TablePlanner::new(limits, KernelTable::default());
        Self { table: table(KernelMaps::LIMITS), cramped: table(CRAMPED), is_synced: false }
    }
}

impl TablePlanners {
    /// Updates the tables from the store as the agent does, once the store is complete, and checks them.
    pub fn write(&mut self, store: &mut Store) {
        let dirty = store.take_dirty();
        if !store.is_complete() {
            return;
        }
        for table in [&mut self.table, &mut self.cramped] {
            if self.is_synced {
                table.update(store, dirty.clone())
            } else {
                table.sync(store)
            };
            check_problems(store.problems().chain(&table.problems()));
            check_rows(&table.rows());
        }
        self.is_synced = true;
        self.check_followed(store);
    }

    fn check_followed(&mut self, store: &Store) {
        let (rows, expected) = (self.table.rows(), resolve(store));
        let is_same = rows.len() == expected.len() && rows.iter().zip(&expected).all(|(row, other)| same(row, other));
        assert!(is_same, "the table has\n{rows:#?}\nand a full recomputation says\n{expected:#?}");
        assert_eq!(self.table.update(store, BTreeSet::new()), [], "what has not changed is not written");
        assert_eq!(self.table.sync(store), [], "a full sync finds nothing to do");
    }
}

fn same(row: &Row, expected: &Row) -> bool {
    let is_protected = (&*row.service.namespace, &*row.service.name) == PROTECTED;
    let has_kept = is_protected && expected.backends().is_empty() && row.frontend == expected.frontend;
    row == expected || has_kept
}

/// Checks that each problem is one line without control characters, whatever the object contains.
pub fn check_problems<'a>(problems: impl IntoIterator<Item = &'a Problem>) {
    for problem in problems {
        let line = problem.to_string();
        assert!(!line.contains(char::is_control), "{line:?} has control characters");
        assert!(!problem.object.is_empty() && !problem.message.is_empty(), "{problem:?} says nothing");
    }
}

/// Checks that each row is consistent and that its printed form can be read back.
fn check_rows(rows: &[Row]) {
    assert!(rows.is_sorted_by(|a, b| a.frontend < b.frontend), "one row for each frontend, sorted: {rows:#?}");
    rows.iter().for_each(check_row);
    let report: Vec<_> = rows.iter().map(FrontendRow::from).collect();
    let text = report::table_text(&report, report::Layout::Plain);
    assert!(!text.replace('\n', "").contains(char::is_control), "{text:?} has control characters");
    let mut json = Vec::new();
    report::write_frontends_json(report.iter().cloned(), &mut json).unwrap();
    let read: Vec<serde_json::Value> = serde_json::from_slice(&json).unwrap();
    assert_eq!(read.iter().map(|row| FrontendRow::read(row).unwrap()).collect::<Vec<_>>(), report);
}

fn check_row(row: &Row) {
    let address = row.frontend.address;
    assert!(!address.is_special() && row.frontend.port != 0, "{row:#?} is no Service's");
    check_backends(row.backends(), address, row);
    check_backends(row.kept(), address, row);
    assert!(row.kept().iter().all(|backend| !row.backends().contains(backend)), "a backend is in both runs: {row:#?}");
    assert_eq!(row.action == Action::Forward, !row.backends().is_empty(), "{row:#?}");
    assert!(row.scope != Scope::Denied || row.action == Action::Drop, "who is denied is dropped: {row:#?}");
    assert!(row.session_affinity_seconds.is_none_or(|seconds| (1..=86_400).contains(&seconds)), "{row:#?}");
}

fn check_backends(backends: &[Backend], frontend: Address, row: &Row) {
    assert!(backends.is_sorted_by(|a, b| a < b), "backends are sorted, each is there once: {row:#?}");
    for backend in backends {
        assert_eq!(backend.address.family(), frontend.family(), "a backend of the other family: {row:#?}");
        assert_ne!(backend.port, 0, "{row:#?}");
    }
}
