//! What each dependency costs: the machine code of the agent by the crate it comes from, so that a pull request that
//! adds a dependency shows its price.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::run;

const SHOWN: usize = 25;

/// Prints the table for a binary that has its symbols.
pub(crate) fn print(binary: &Path) -> Result<()> {
    let listing = run::capture(Command::new("nm").args(["--print-size", "--demangle"]).arg(binary))?;
    let mut rows: Vec<(String, u64)> = by_crate(&listing).into_iter().collect();
    rows.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let rest = rows.split_off(rows.len().min(SHOWN));
    if !rest.is_empty() {
        rows.push((format!("{} more", rest.len()), rest.iter().map(|(_, bytes)| bytes).sum()));
    }
    rows.push(("all".to_owned(), rows.iter().map(|(_, bytes)| bytes).sum()));
    println!("machine code by crate, in bytes:");
    for (name, bytes) in rows {
        println!("{bytes:>10}  {name}");
    }
    Ok(())
}

fn by_crate(listing: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (bytes, name) in listing.lines().filter_map(function) {
        *sums.entry(crate_of(name).to_owned()).or_default() += bytes;
    }
    sums
}

/// Size and name of a function in a line of `nm`: address, size, kind, name.
fn function(line: &str) -> Option<(u64, &str)> {
    let mut fields = line.splitn(4, ' ').skip(1);
    let bytes = u64::from_str_radix(fields.next()?, 16).ok()?;
    let kind = fields.next()?;
    let name = fields.next()?;
    matches!(kind, "t" | "T" | "w" | "W").then_some((bytes, name))
}

/// The crate that a demangled symbol comes from: `std` for all of the standard library, `c` for what has
/// no path, which is the C library.
fn crate_of(symbol: &str) -> &str {
    let glue = ["core::ptr::drop_in_place::<", "core::ptr::drop_in_place<"];
    let symbol = glue.iter().find_map(|prefix| symbol.strip_prefix(prefix)).unwrap_or(symbol);
    if symbol.starts_with("__rust") {
        return "std";
    }
    if symbol.starts_with("ring_core_") {
        return "ring"; // its C and assembly, named after its version
    }
    // In `<T as foo::Trait>::method` the type may be a parameter or a primitive: then the trait's crate is the source.
    let implemented = symbol.split_once(" as ").map_or("", |(_, interface)| interface);
    match leading_crate(symbol).or_else(|| leading_crate(implemented)) {
        Some("core" | "alloc" | "std" | "compiler_builtins") => "std",
        Some(name) => name,
        None if symbol.starts_with('<') => "std",
        None => "c",
    }
}

/// The first segment of the path that a type or a symbol starts with, without references, pointers and the like.
fn leading_crate(symbol: &str) -> Option<&str> {
    let mut rest = symbol;
    loop {
        let bare = rest.trim_start_matches(['<', '&', '*', '(', '[', ' ', '{']);
        let words = ["mut ", "const ", "dyn ", "impl ", "unsafe "];
        let next = words.iter().find_map(|word| bare.strip_prefix(word)).unwrap_or(bare);
        if next == rest {
            break;
        }
        rest = next;
    }
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    let (name, tail) = rest.split_at_checked(end)?;
    // The other mangling shows a crate's hash in brackets: `foo[1f2e]::bar`.
    let tail = tail.strip_prefix('[').and_then(|hash| hash.split_once(']')).map_or(tail, |(_, tail)| tail);
    (tail.starts_with("::") && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_functions_are_read() {
        let line = "0000000000001000 00000000000000ff t <foo::Bar as core::fmt::Debug>::fmt";
        assert_eq!(function(line), Some((255, "<foo::Bar as core::fmt::Debug>::fmt")));
        assert_eq!(function("0000000000001000 00000000000000ff r foo::TABLE"), None);
        assert_eq!(function("                 U memcpy"), None);
        assert_eq!(function("0000000000001000 T _start"), None);
    }

    #[test]
    fn symbols_count_for_the_crate_of_their_type() {
        let cases = [
            ("foo::bar::baz", "foo"),
            ("<foo::Bar as core::fmt::Debug>::fmt", "foo"),
            ("<&mut foo::Bar as core::fmt::Debug>::fmt", "foo"),
            ("<dyn foo::Bar>::call", "foo"),
            ("<[foo::Bar] as core::fmt::Debug>::fmt", "foo"),
            ("core::ptr::drop_in_place<foo::Bar>", "foo"),
            ("core::ptr::drop_in_place::<foo::Bar>", "foo"),
            ("foo[1f2e]::bar", "foo"),
            ("ring_core_0_17_14__x25519_sc_reduce", "ring"),
        ];
        for (symbol, expected) in cases {
            assert_eq!(crate_of(symbol), expected, "{symbol}");
        }
    }

    #[test]
    fn the_standard_library_is_one_row() {
        for symbol in ["<T as core::convert::Into<U>>::into", "alloc::vec::Vec<T>::push", "__rust_alloc", "<str>::trim"]
        {
            assert_eq!(crate_of(symbol), "std", "{symbol}");
        }
    }

    #[test]
    fn what_has_no_path_is_c() {
        assert_eq!(crate_of("memcpy"), "c");
        assert_eq!(crate_of("__vfscanf_internal"), "c");
    }

    #[test]
    fn bytes_are_summed() {
        let sums = by_crate("0 10 t foo::a\n0 1 T foo::b\n0 2 T memcpy\n");
        assert_eq!(sums, BTreeMap::from([("c".to_owned(), 2), ("foo".to_owned(), 17)]));
    }
}
