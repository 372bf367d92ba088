//! `cargo xtask size`: what the agent's bytes are for. Machine code and data by the crate they come from, so that a pull
//! request that adds a dependency shows its price, then everything that is in the file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::agent::{self, Agent};
use crate::run;

/// What the project promises about the shipped file.
const LIMIT_BYTES: u64 = 7 << 20;

const SHOWN: usize = 30;

/// Builds the agent and prints the tables.
pub(crate) fn run() -> Result<()> {
    print(&agent::build()?)
}

/// Fails when the shipped file is larger than promised.
pub(crate) fn check(agent: &Agent) -> Result<()> {
    let bytes = bytes_of(&agent.shipped)?;
    ensure!(
        bytes <= LIMIT_BYTES,
        "{} has {bytes} bytes, the limit is {LIMIT_BYTES}; `cargo xtask size` shows what they are for, and \
         docs/decisions/016 what has been tried",
        agent.shipped.display()
    );
    Ok(())
}

/// Prints the tables.
fn print(agent: &Agent) -> Result<()> {
    let file = Parts::of(&capture("readelf", &["--sections", "--wide"], &agent.shipped)?, bytes_of(&agent.shipped)?);
    let listing = capture("nm", &["--numeric-sort", "--print-size", "--demangle"], &agent.with_symbols)?;
    let mut crates = by_crate(&listing);
    let image = fs::read(&agent.shipped).with_context(|| format!("reading {}", agent.shipped.display()))?;
    crates.insert("(the socket programs)".to_owned(), Sums { code: 0, data: embedded_object(&image) });
    println!("      code       data  by crate, in bytes");
    for (name, Sums { code, data }) in rows(crates, &file) {
        println!("{code:>10} {data:>10}  {name}");
    }
    println!("\n     bytes  in the file");
    for (bytes, what) in file.rows() {
        println!("{bytes:>10}  {what}");
    }
    println!("{:>10}  the limit", LIMIT_BYTES);
    Ok(())
}

fn capture(program: &str, arguments: &[&str], binary: &Path) -> Result<String> {
    run::capture(Command::new(program).args(arguments).arg(binary))
}

fn bytes_of(file: &Path) -> Result<u64> {
    Ok(file.metadata().with_context(|| format!("reading {}", file.display()))?.len())
}

/// Bytes of machine code and of data.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Sums {
    code: u64,
    data: u64,
}

impl Sums {
    fn of<'a>(all: impl Iterator<Item = &'a Self>) -> Self {
        all.fold(Self::default(), |sum, one| Self { code: sum.code + one.code, data: sum.data + one.data })
    }
}

/// The largest crates, what the others have together, what belongs to none, and the sum, which is the file's.
fn rows(crates: BTreeMap<String, Sums>, file: &Parts) -> Vec<(String, Sums)> {
    let named = Sums::of(crates.values());
    let unnamed = Sums { code: file.code.saturating_sub(named.code), data: file.data.saturating_sub(named.data) };
    let mut rows: Vec<_> = crates.into_iter().collect();
    rows.sort_by_key(|(_, sums)| std::cmp::Reverse(sums.code + sums.data));
    let rest = rows.split_off(rows.len().min(SHOWN));
    rows.push((format!("({} more)", rest.len()), Sums::of(rest.iter().map(|(_, sums)| sums))));
    rows.push(("(strings and constants without a name, padding)".to_owned(), unnamed));
    rows.push(("all".to_owned(), Sums { code: file.code, data: file.data }));
    rows
}

/// What a file is made of, in bytes.
#[derive(Default, Debug, PartialEq, Eq)]
struct Parts {
    code: u64,
    data: u64,
    unwinding: u64,
    relocations: u64,
    all: u64,
}

impl Parts {
    /// Sums up the listing that `readelf` prints of a file with so many bytes.
    fn of(listing: &str, all: u64) -> Self {
        let mut parts = Self { all, ..Self::default() };
        for (name, flags, bytes) in listing.lines().filter_map(section) {
            *match name {
                _ if !flags.contains('A') => continue,
                ".eh_frame" | ".eh_frame_hdr" | ".gcc_except_table" => &mut parts.unwinding,
                _ if name.starts_with(".rela.") || name.starts_with(".relr.") => &mut parts.relocations,
                _ if flags.contains('X') => &mut parts.code,
                _ => &mut parts.data,
            } += bytes;
        }
        parts
    }

    fn rows(&self) -> [(u64, &'static str); 6] {
        let rest = self.all.saturating_sub(self.code + self.data + self.unwinding + self.relocations);
        [
            (self.code, "machine code"),
            (self.data, "data"),
            (self.unwinding, "unwind tables"),
            (self.relocations, "relocations"),
            (rest, "headers, padding, names"),
            (self.all, "all"),
        ]
    }
}

/// Name, flags and size of a section in a line of `readelf`, if it takes room in the file: number in brackets, name, type,
/// address, offset, size, size of an entry, flags, which may be missing.
fn section(line: &str) -> Option<(&str, &str, u64)> {
    let (_, line) = line.trim_start().strip_prefix('[')?.split_once(']')?;
    let mut fields = line.split_whitespace();
    let (name, kind) = (fields.next()?, fields.next()?);
    let bytes = u64::from_str_radix(fields.nth(2)?, 16).ok()?;
    let flags = fields.nth(1)?;
    (kind != "NOBITS").then_some((name, flags, bytes))
}

/// The size of the BPF object that the file has in it: it ends with its table of sections.
fn embedded_object(image: &[u8]) -> u64 {
    const MAGIC: &[u8] = b"\x7fELF\x02\x01";
    const BPF: [u8; 2] = 247u16.to_le_bytes();
    let number = |header: &[u8], at: usize| Some(u64::from(u16::from_le_bytes(*header.get(at..)?.first_chunk()?)));
    let bytes = |header: &[u8]| {
        let table = u64::from_le_bytes(*header.get(40..)?.first_chunk()?);
        Some(table + number(header, 58)? * number(header, 60)?)
    };
    let header = image.windows(64).find(|header| header.starts_with(MAGIC) && header.get(18..20) == Some(&BPF));
    header.and_then(bytes).unwrap_or_default()
}

fn by_crate(listing: &str) -> BTreeMap<String, Sums> {
    let mut sums: BTreeMap<String, Sums> = BTreeMap::new();
    let mut last = 0;
    for symbol in listing.lines().filter_map(symbol) {
        // Functions that turned out the same are one function with several names.
        if symbol.address == last {
            continue;
        }
        last = symbol.address;
        let sums = sums.entry(crate_of(symbol.name).to_owned()).or_default();
        *(if symbol.is_code { &mut sums.code } else { &mut sums.data }) += symbol.bytes;
    }
    sums
}

/// Something in the file that has a name.
#[derive(Debug, PartialEq, Eq)]
struct Symbol<'a> {
    address: u64,
    bytes: u64,
    is_code: bool,
    name: &'a str,
}

/// What is in a line of `nm`: address, size, kind, name.
fn symbol(line: &str) -> Option<Symbol<'_>> {
    let mut fields = line.splitn(4, ' ');
    let mut number = || u64::from_str_radix(fields.next()?, 16).ok();
    let (address, bytes) = (number()?, number()?);
    let is_code = match fields.next()? {
        "t" | "T" | "w" | "W" | "i" => true,
        "r" | "R" | "d" | "D" | "v" | "V" => false,
        _ => return None,
    };
    Some(Symbol { address, bytes, is_code, name: fields.next()? })
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
    fn one_byte_too_many_is_an_error_that_says_what_to_do() {
        let file = std::env::temp_dir().join(format!("cproxy-size-{}", std::process::id()));
        let agent = Agent { shipped: file.clone(), with_symbols: file.clone() };
        let verdicts = [LIMIT_BYTES, LIMIT_BYTES + 1].map(|bytes| {
            fs::File::create(&file).unwrap().set_len(bytes).unwrap();
            check(&agent)
        });
        fs::remove_file(&file).unwrap();
        assert!(verdicts[0].is_ok());
        let error = verdicts[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("7340033") && error.contains("cargo xtask size"), "{error}");
    }

    #[test]
    fn lines_of_symbols_are_read() {
        let line = "0000000000001000 00000000000000ff t <foo::Bar as core::fmt::Debug>::fmt";
        let name = "<foo::Bar as core::fmt::Debug>::fmt";
        assert_eq!(symbol(line), Some(Symbol { address: 0x1000, bytes: 255, is_code: true, name }));
        assert!(!symbol("0000000000001000 00000000000000ff r foo::TABLE").unwrap().is_code);
        for other in
            ["0000000000001000 00000000000000ff b foo::ZEROS", "                 U memcpy", "0000000000001000 T _start"]
        {
            assert_eq!(symbol(other), None, "{other}");
        }
    }

    #[test]
    fn sections_are_summed_by_what_they_are() {
        let listing = "\
Section Headers:
  [Nr] Name              Type            Address          Off    Size   ES Flg Lk Inf Al
  [ 0]                   NULL            0000000000000000 000000 000000 00      0   0  0
  [ 6] .rela.dyn         RELA            0000000000000328 000328 000010 18   A  3   0  8
  [ 7] .rodata           PROGBITS        0000000000059000 059000 000100 00 AMS  0   0 4096
  [10] .eh_frame         PROGBITS        00000000001692a8 1692a8 000020 00   A  0   0  8
  [11] .text             PROGBITS        000000000021bac0 21aac0 001000 00  AX  0   0 64
  [20] .data.rel.ro      PROGBITS        000000000069dd40 69bd40 000200 00  WA  0   0 32
  [30] .bss              NOBITS          00000000006e5220 6e2210 0064a0 00  WA  0   0 32
  [32] .comment          PROGBITS        0000000000000000 6e2210 0000b2 01  MS  0   0  1
  [47] .strtab           STRTAB          0000000000000000 a17ef2 135ccc 00      0   0  1
";
        let parts = Parts::of(listing, 0x2000);
        let expected = Parts { code: 0x1000, data: 0x300, unwinding: 0x20, relocations: 0x10, all: 0x2000 };
        assert_eq!(parts, expected);
        assert_eq!(parts.rows().iter().take(5).map(|(bytes, _)| bytes).sum::<u64>(), parts.all);
    }

    #[test]
    fn the_table_of_crates_adds_up_to_the_file() {
        let crates = (0..40).map(|n| (format!("c{n}"), Sums { code: n, data: 1 })).collect();
        let rows = rows(crates, &Parts { code: 1000, data: 50, ..Parts::default() });
        let (last, others) = rows.split_last().unwrap();
        assert_eq!(Sums::of(others.iter().map(|(_, sums)| sums)), last.1);
        assert_eq!(rows[0].0, "c39");
        assert_eq!(rows[SHOWN].0, "(10 more)");
    }

    #[test]
    fn the_object_in_the_file_is_found() {
        let header = |machine: u16, table: u64, sections: u16| {
            let mut header = vec![0; 64];
            header[..6].copy_from_slice(b"\x7fELF\x02\x01");
            header[18..20].copy_from_slice(&machine.to_le_bytes());
            header[40..48].copy_from_slice(&table.to_le_bytes());
            header[58..60].copy_from_slice(&64u16.to_le_bytes());
            header[60..62].copy_from_slice(&sections.to_le_bytes());
            header
        };
        let image = [header(62, 9000, 9), vec![0; 7], header(247, 500, 2)].concat();
        assert_eq!(embedded_object(&image), 628);
        assert_eq!(embedded_object(&header(62, 9000, 9)), 0);
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
    fn bytes_are_summed_once() {
        let sums = by_crate("1 10 t foo::a\n2 1 T foo::b\n2 1 T foo::c\n3 2 T memcpy\n4 5 r foo::D\n");
        let foo = Sums { code: 17, data: 5 };
        assert_eq!(sums, BTreeMap::from([("c".to_owned(), Sums { code: 2, data: 0 }), ("foo".to_owned(), foo)]));
    }
}
