//! Figures that are the same for each measured item.

use std::borrow::Borrow;

use serde_json::{Map, Value, json};

use super::{Table, cell};
use crate::paired::Estimate;

/// A figure of a `T`, with one sample or many.
#[derive(Debug)]
pub struct Figure<T> {
    /// Name in files.
    pub name: &'static str,
    /// Name in tables, with its unit. Two leading blanks mark a part of the figure above.
    pub meaning: &'static str,
    /// The samples.
    pub of: fn(&T) -> Vec<f64>,
}

impl<T> Figure<T> {
    /// A line for each figure, a column for each measured item.
    #[must_use]
    pub fn table(figures: &[Self], title: String, found: &[impl Borrow<T>], heading: impl Fn(&T) -> String) -> Table {
        let cells = |figure: &Self| found.iter().map(|found| cell((figure.of)(found.borrow()))).collect();
        Table {
            title,
            columns: found.iter().map(|found| heading(found.borrow())).collect(),
            rows: figures.iter().map(|figure| (figure.meaning.to_owned(), cells(figure))).collect(),
        }
    }

    /// The samples of each figure.
    #[must_use]
    pub fn samples(figures: &[Self], found: &T) -> Map<String, Value> {
        figures.iter().map(|figure| (figure.name.to_owned(), json!((figure.of)(found)))).collect()
    }

    /// The figure of that name.
    #[must_use]
    pub fn named<'f>(figures: &'f [Self], name: &str) -> Option<&'f Self> {
        figures.iter().find(|figure| figure.name == name)
    }

    /// Estimate of the figure, if there are samples.
    #[must_use]
    pub fn estimate(&self, found: &T) -> Option<Estimate> {
        Estimate::of((self.of)(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIGURES: [Figure<u8>; 2] = [
        Figure { name: "it", meaning: "itself, B", of: |&found| vec![f64::from(found)] },
        Figure { name: "none", meaning: "  nothing, s", of: |_| Vec::new() },
    ];

    #[test]
    fn each_figure_is_a_line_and_each_that_was_found_a_column() {
        let table = Figure::table(&FIGURES, "T".to_owned(), &[1, 2], |found| format!("no. {found}"));
        assert_eq!(table.columns, ["no. 1", "no. 2"]);
        let row = |name: &str, cells: [&str; 2]| (name.to_owned(), cells.map(str::to_owned).to_vec());
        assert_eq!(table.rows, [row("itself, B", ["1.00", "2.00"]), row("  nothing, s", ["-", "-"])]);
        assert_eq!(Value::from(Figure::samples(&FIGURES, &3)), json!({"it": [3.0], "none": []}));
    }

    #[test]
    fn a_figure_is_found_by_its_name() {
        let figure = |name| Figure::named(&FIGURES, name).and_then(|figure| figure.estimate(&3));
        assert_eq!(figure("it").map(|estimate| estimate.median), Some(3.0));
        assert_eq!((figure("none"), figure("other")), (None, None));
    }
}
