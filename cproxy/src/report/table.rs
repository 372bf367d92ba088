//! Tables of text: aligned columns that fit a terminal.

use cproxy_core::printable;
use cproxy_daemon::hanging;

/// Maximum number of names in a cell where the width is not known; the others are counted.
const NAMED_MAX: usize = 6;

/// Width to which a list is shortened before columns are left out: a backend, and the number of the others.
const LIST_CHARS: usize = 34;

/// Width to which it is shortened before names are cut: the number of its items.
const LIST_CHARS_MIN: usize = 8;

/// Width to which a name is cut at most.
pub(super) const NAME_CHARS_MIN: usize = 12;

/// Width that prose has at least, where names can be cut.
const PROSE_CHARS_MIN: usize = 40;

/// Columns between cells.
const GAP: usize = 3;

/// Space for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// All columns, and six names in a list: for scripts and files.
    Plain,
    /// All columns and all names, however long.
    Wide,
    /// A terminal with this many columns: less important columns are left out, lists and names shortened.
    Columns(usize),
}

/// Column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub(super) header: &'static str,
    /// 0: it is always shown; of the others, the one with the highest rank is left out first.
    pub(super) rank: u8,
    /// Its text may be cut: it is a name, and no address.
    pub(super) is_name: bool,
}

impl Column {
    /// Column that is always shown, and never cut.
    #[must_use]
    pub const fn fixed(header: &'static str) -> Self {
        Self { header, rank: 0, is_name: false }
    }

    pub(super) const fn name(header: &'static str) -> Self {
        Self { header, rank: 0, is_name: true }
    }

    /// The same column, which is left out before those of lower ranks.
    pub(super) const fn rank(self, rank: u8) -> Self {
        Self { rank, ..self }
    }
}

/// Cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// Text as it is.
    Text(String),
    /// Sentences, which go on in the next line; in the last column.
    Prose(String),
    /// Names, of which a part may be counted only; in the last column.
    List(Vec<String>),
}

impl Cell {
    /// Printable text, or a dash.
    pub(super) fn or_dash(text: Option<&str>) -> Self {
        Self::Text(text.filter(|text| !text.is_empty()).map_or_else(|| "-".to_owned(), printable))
    }

    fn natural_chars(&self) -> usize {
        match self {
            Self::Text(text) => chars(text),
            Self::Prose(text) => chars(text).min(PROSE_CHARS_MIN),
            Self::List(names) => names.iter().map(|name| chars(name) + 2).sum::<usize>().saturating_sub(2).max(1),
        }
    }
}

/// Row of a table.
pub trait TableRow {
    /// Columns of its table.
    const COLUMNS: &'static [Column];

    /// Identity of the row, by which a later state of it is known.
    type Key: Ord;

    /// Its identity.
    fn key(&self) -> Self::Key;

    /// Its cells, one for each column.
    fn cells(&self) -> Vec<Cell>;
}

/// Columns of a table whose widths are settled, for rows that come later as well.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// Index and width of each column that is shown.
    shown: Vec<(usize, usize)>,
    layout: Layout,
}

impl Fitted {
    /// Columns for these rows.
    #[must_use]
    pub fn new(columns: &[Column], rows: &[Vec<Cell>], layout: Layout) -> Self {
        let last = columns.len().saturating_sub(1);
        let width = |(index, column): (usize, &Column)| {
            let cells = rows.iter().filter_map(|row| row.get(index)).map(Cell::natural_chars);
            (index, cells.chain([chars(column.header)]).max().unwrap_or(0))
        };
        let mut shown: Vec<_> = columns.iter().enumerate().map(width).collect();
        if let Layout::Columns(available) = layout {
            let is_list = rows.iter().any(|row| matches!(row.get(last), Some(Cell::List(_))));
            let list_chars = shown.last().map_or(0, |(_, width)| *width);
            let set_list = |shown: &mut Vec<(usize, usize)>, chars: usize| match shown.last_mut() {
                Some((index, width)) if is_list && *index == last => *width = chars,
                _ => {}
            };
            set_list(&mut shown, list_chars.min(LIST_CHARS));
            leave_out(&mut shown, columns, available);
            set_list(&mut shown, list_chars.min(LIST_CHARS_MIN));
            cut_names(&mut shown, columns, available);
            let taken = total(&shown);
            set_list(&mut shown, list_chars.min(list_chars.min(LIST_CHARS_MIN) + available.saturating_sub(taken)));
        }
        Self { shown, layout }
    }

    /// The line of headers.
    #[must_use]
    pub fn header(&self, columns: &[Column]) -> String {
        let header = |column: &Column| Cell::Text(column.header.to_owned());
        self.line(&columns.iter().map(header).collect::<Vec<_>>())
    }

    /// The line of a row.
    #[must_use]
    pub fn line(&self, row: &[Cell]) -> String {
        let mut line = String::new();
        for &(index, width) in &self.shown {
            let text = match (row.get(index), self.layout) {
                (None, _) => String::new(),
                (Some(Cell::Text(text)), Layout::Columns(_)) => cut(text, width),
                (Some(Cell::Prose(text)), Layout::Columns(available)) => hanging(available, chars(&line), text),
                (Some(Cell::Text(text) | Cell::Prose(text)), _) => text.clone(),
                (Some(Cell::List(names)), Layout::Columns(_)) => list_within(names, width),
                (Some(Cell::List(names)), Layout::Plain) => list_first(names, NAMED_MAX),
                (Some(Cell::List(names)), Layout::Wide) => list_first(names, names.len()),
            };
            line.push_str(&pad(text, width));
            line.push_str(&" ".repeat(GAP));
        }
        format!("{}\n", line.trim_end())
    }
}

/// Table of rows, with its headers.
#[must_use]
pub fn table_text<'r, R: TableRow + 'r>(rows: impl IntoIterator<Item = &'r R>, layout: Layout) -> String {
    let rows: Vec<_> = rows.into_iter().map(TableRow::cells).collect();
    let fitted = Fitted::new(R::COLUMNS, &rows, layout);
    let lines = rows.iter().map(|row| fitted.line(row));
    std::iter::once(fitted.header(R::COLUMNS)).chain(lines).collect()
}

fn leave_out(shown: &mut Vec<(usize, usize)>, columns: &[Column], available: usize) {
    let rank = |index: usize| columns.get(index).map_or(0, |column| column.rank);
    while total(shown) > available {
        let least = shown.iter().enumerate().max_by_key(|(_, (index, _))| rank(*index));
        match least {
            Some((place, (index, _))) if rank(*index) > 0 => drop(shown.remove(place)),
            _ => return,
        }
    }
}

fn cut_names(shown: &mut [(usize, usize)], columns: &[Column], available: usize) {
    let is_name = |index: usize| columns.get(index).is_some_and(|column| column.is_name);
    for _ in available..total(shown) {
        let names = shown.iter_mut().filter(|(index, width)| is_name(*index) && *width > NAME_CHARS_MIN);
        if let Some((_, width)) = names.max_by_key(|(_, width)| *width) {
            *width -= 1;
        }
    }
}

fn total(shown: &[(usize, usize)]) -> usize {
    shown.iter().map(|(_, width)| width + GAP).sum::<usize>().saturating_sub(GAP)
}

pub(super) fn chars(text: &str) -> usize {
    text.chars().count()
}

/// Text, or its beginning, an ellipsis and its end: names of one namespace or Deployment begin alike.
pub(super) fn cut(text: &str, width: usize) -> String {
    let length = chars(text);
    if length <= width {
        return text.to_owned();
    }
    let room = width.saturating_sub(1);
    let start = text.chars().take(room.div_ceil(2));
    let end = text.chars().skip(length - room / 2);
    start.chain(['…']).chain(end).collect()
}

/// Text with spaces up to this width. `format!` panics at a width of more than 65,535.
pub(super) fn pad(mut text: String, width: usize) -> String {
    let missing = width.saturating_sub(chars(&text));
    text.extend(std::iter::repeat_n(' ', missing));
    text
}

/// First names, and the number of the others.
fn list_first(names: &[String], most: usize) -> String {
    let first: Vec<_> = names.iter().take(most).map(String::as_str).collect();
    match names.len().saturating_sub(most) {
        0 if first.is_empty() => "-".to_owned(),
        0 => first.join(", "),
        more => format!("{}, and {more} more", first.join(", ")),
    }
}

/// As many names as fit, and the number of the others; if none fits, the number alone.
fn list_within(names: &[String], width: usize) -> String {
    // Each of them has at least one character, and a comma and a space before the next.
    let mut most = names.len().min(width.div_ceil(3).max(1));
    loop {
        match list_first(names, most) {
            text if chars(&text) <= width => return text,
            _ if most <= 1 => return names.len().to_string(),
            _ => most -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[
        Column::name("SERVICE"),
        Column::fixed("PORT").rank(1),
        Column::fixed("FRONTEND"),
        Column::fixed("AFFINITY").rank(2),
        Column::fixed("BACKENDS"),
    ];

    fn row(service: &str, backends: usize) -> Vec<Cell> {
        let text = |text: &str| Cell::Text(text.to_owned());
        let backends = (1..=backends).map(|host| format!("10.244.0.{host}:8080")).collect();
        vec![text(service), text("http"), text("10.96.0.10:80/TCP"), text("-"), Cell::List(backends)]
    }

    fn lines(rows: &[Vec<Cell>], layout: Layout) -> Vec<String> {
        let fitted = Fitted::new(COLUMNS, rows, layout);
        let lines = rows.iter().map(|row| fitted.line(row));
        std::iter::once(fitted.header(COLUMNS)).chain(lines).map(|line| line.trim_end().to_owned()).collect()
    }

    #[test]
    fn a_table_fits_the_terminal() {
        for backends in [0, 1, 3, 300] {
            for service in ["default/web", "monitoring/kube-prometheus-stack-prometheus-node-exporter"] {
                let rows = [row(service, backends), row("default/other", 1)];
                for width in [80, 120, 200] {
                    let lines = lines(&rows, Layout::Columns(width));
                    assert!(lines.iter().all(|line| chars(line) <= width), "{width}: {lines:#?}");
                    assert!(lines[1].contains("10.96.0.10:80/TCP"), "{lines:#?}");
                }
            }
        }
    }

    #[test]
    fn lists_use_the_width_that_there_is() {
        let rows = [row("default/web", 300)];
        let shown = |width| lines(&rows, Layout::Columns(width))[1].matches("10.244.").count();
        assert!(shown(80) >= 1 && shown(120) > shown(80) && shown(200) > shown(120) + 3, "{}", shown(200));
        assert!(lines(&rows, Layout::Columns(200))[1].ends_with(" more"));
        assert_eq!(lines(&rows, Layout::Wide)[1].matches("10.244.").count(), 300);
        assert!(lines(&rows, Layout::Plain)[1].ends_with("10.244.0.6:8080, and 294 more"));
    }

    #[test]
    fn columns_are_left_out_before_names_are_cut() {
        let rows = [row("default/web", 1)];
        assert_eq!(lines(&rows, Layout::Columns(66))[0], "SERVICE       PORT   FRONTEND            BACKENDS");
        assert_eq!(lines(&rows, Layout::Columns(55))[0], "SERVICE       FRONTEND            BACKENDS");
        let long = [row("default/a-name-that-is-longer-than-the-terminal-is-wide", 1)];
        let line = &lines(&long, Layout::Columns(60))[1];
        assert!(
            line.starts_with("default/") && line.contains("…") && line.contains("-wide   10.96.") && chars(line) <= 60,
            "{line}"
        );
        assert!(lines(&long, Layout::Plain)[1].contains("is-wide   http"));
    }

    #[test]
    fn names_that_are_cut_share_the_room() {
        let columns = [Column::name("SERVICE"), Column::fixed("PORT"), Column::name("POD")];
        let row = [250, 3, 400].map(|length| Cell::Text("x".repeat(length)));
        let fitted = Fitted::new(&columns, &[row.to_vec()], Layout::Columns(80));
        let widths: Vec<_> = fitted.line(&row).split_whitespace().map(chars).collect();
        assert_eq!(widths, [35, 3, 35]);
    }

    #[test]
    fn prose_is_whole() {
        let columns = [Column::name("OBJECT"), Column::fixed("SINCE"), Column::fixed("PROBLEM")];
        let row = |object: usize| {
            let object = Cell::Text("x".repeat(object));
            [object, Cell::Text("3 s".to_owned()), Cell::Prose("all the words ".repeat(20).trim_end().to_owned())]
        };
        for object in [10, 250] {
            let row = row(object);
            let text = |layout| Fitted::new(&columns, &[row.to_vec()], layout).line(&row);
            let lines = text(Layout::Columns(80));
            assert!(lines.lines().all(|line| chars(line) <= 80), "{lines}");
            assert_eq!(lines.matches("words").count(), 20, "{lines}");
            assert_eq!(text(Layout::Plain).lines().count(), 1);
        }
    }

    #[test]
    fn a_cell_may_be_longer_than_any_width_of_a_format() {
        let mut long = row("default/web", 0);
        long[0] = Cell::Text("x".repeat(70_000));
        long[4] = Cell::List(vec!["10.244.100.100:8080".to_owned(); usize::from(u16::MAX)]);
        for layout in [Layout::Plain, Layout::Wide, Layout::Columns(80)] {
            assert_eq!(lines(&[long.clone(), row("default/other", 1)], layout).len(), 3, "{layout:?}");
        }
    }

    #[test]
    fn a_list_without_room_is_a_number() {
        let names = vec!["[fd00:10:244::1]:8080".to_owned(); 12];
        assert_eq!(list_within(&names, 10), "12");
        assert_eq!(list_within(&[], 10), "-");
    }
}
