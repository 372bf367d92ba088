//! Settings in force.

use super::table::{Cell, Column, TableRow};
use crate::config::SettingRow;

impl TableRow for SettingRow {
    const COLUMNS: &'static [Column] = &[Column::fixed("SETTING"), Column::name("VALUE"), Column::fixed("FROM")];

    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }

    fn cells(&self) -> Vec<Cell> {
        [Some(&*self.name), self.value.as_deref(), Some(&self.origin)].map(Cell::or_dash).into()
    }
}
