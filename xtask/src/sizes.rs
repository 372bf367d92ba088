//! `cargo xtask size`: the agent's size. Machine code and data by crate, so that the cost of a new dependency shows,
//! then the parts of the file. Of the relay, the size of the file.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use object::{
    LittleEndian, Object as _, ObjectSection as _, ObjectSymbol as _, SectionKind,
    elf::{ELFMAG, EM_BPF, FileHeader64, SHF_ALLOC, SHF_EXECINSTR, SHT_NOBITS},
    read::elf::{ElfFile64, ElfSymbol64, FileHeader as _, SectionHeader as _},
};

use crate::{
    architecture::Architecture,
    binary::{AGENT, Binary, Program, RELAY},
};

type Header = FileHeader64<LittleEndian>;
type Elf<'data> = ElfFile64<'data, LittleEndian>;

const SHOWN: usize = 30;

/// Options of `size`.
#[derive(Args)]
pub(crate) struct SizeArguments {
    /// As `cargo xtask test` does: the programs are built, and fail if they are larger than promised
    #[arg(long, hide = true)]
    as_test: bool,
}

/// Builds the programs and prints the tables.
pub(crate) fn run(arguments: &SizeArguments) -> Result<()> {
    if arguments.as_test {
        let host = Architecture::of_host()?;
        return [AGENT, RELAY].iter().try_for_each(|program| check(program, &program.binary(host)));
    }
    tables()
}

/// Prints the tables.
pub(crate) fn tables() -> Result<()> {
    print(&AGENT.build()?)?;
    print_relay(&RELAY.build()?)
}

/// Fails if the shipped file of a program exceeds its limit.
fn check(program: &Program, binary: &Binary) -> Result<()> {
    let (bytes, limit_bytes) = (binary.bytes()?, program.limit_bytes);
    ensure!(
        bytes <= limit_bytes,
        "{} has {bytes} bytes, the limit is {limit_bytes}: see `cargo xtask size`, and docs/decisions/016 for what has \
         been tried",
        binary.shipped.display()
    );
    Ok(())
}

/// Crates with code or data in a program, by the file with its symbols, and its bytes.
pub(crate) fn linked(debug: &Path) -> Result<BTreeMap<String, u64>> {
    let image = read(debug)?;
    let mut linked = BTreeMap::new();
    for symbol in elf(&image, debug)?.symbols().filter(|symbol| symbol.is_definition() && symbol.size() > 0) {
        let name = symbol.name().with_context(|| format!("reading the symbols of {}", debug.display()))?;
        let name = format!("{:#}", rustc_demangle::demangle(name));
        *linked.entry(crate_of(&name).to_owned()).or_default() += symbol.size();
    }
    Ok(linked)
}

fn print_relay(relay: &Binary) -> Result<()> {
    println!("\n     bytes  of the relay");
    println!("{:>10}  all", relay.bytes()?);
    println!("{:>10}  the limit", RELAY.limit_bytes);
    Ok(())
}

/// Prints the tables.
fn print(agent: &Binary) -> Result<()> {
    let (image, with_symbols) = (read(&agent.shipped)?, read(&agent.with_symbols)?);
    let file = Parts::of(&elf(&image, &agent.shipped)?, image.len() as u64)?;
    let mut crates = by_crate(symbols(&elf(&with_symbols, &agent.with_symbols)?));
    crates.insert("(the socket programs)".to_owned(), Sums { code: 0, data: embedded_object(&image) });
    println!("      code       data  by crate, in bytes");
    for (name, Sums { code, data }) in rows(crates, &file) {
        println!("{code:>10} {data:>10}  {name}");
    }
    println!("\n     bytes  in the file");
    for (bytes, what) in file.rows() {
        println!("{bytes:>10}  {what}");
    }
    println!("{:>10}  the limit", AGENT.limit_bytes);
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("reading {}", file.display()))
}

fn elf<'data>(image: &'data [u8], file: &Path) -> Result<Elf<'data>> {
    Elf::parse(image).with_context(|| format!("reading {}", file.display()))
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

/// The largest crates, the sum of the others, bytes without a crate, and the sum of all, which is the file's.
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

/// Parts of a file, in bytes.
#[derive(Default, Debug, PartialEq, Eq)]
struct Parts {
    code: u64,
    data: u64,
    unwinding: u64,
    relocations: u64,
    all: u64,
}

impl Parts {
    /// Sums up the sections of a file with so many bytes.
    fn of(file: &Elf<'_>, all: u64) -> Result<Self> {
        let mut parts = Self { all, ..Self::default() };
        for section in file.sections() {
            let header = section.elf_section_header();
            let has = |flag: u32| header.sh_flags(LittleEndian) & u64::from(flag) != 0;
            *match section.name().context("reading the name of a section")? {
                _ if !has(SHF_ALLOC) || header.sh_type(LittleEndian) == SHT_NOBITS => continue,
                ".eh_frame" | ".eh_frame_hdr" | ".gcc_except_table" => &mut parts.unwinding,
                name if name.starts_with(".rela.") || name.starts_with(".relr.") => &mut parts.relocations,
                _ if has(SHF_EXECINSTR) => &mut parts.code,
                _ => &mut parts.data,
            } += section.size();
        }
        Ok(parts)
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

/// The size of the BPF object that the file has in it: it ends with its table of sections.
fn embedded_object(image: &[u8]) -> u64 {
    let mut starts = image.windows(ELFMAG.len()).enumerate().filter(|(_, window)| *window == ELFMAG);
    let size = |start| {
        let header = Header::parse(image.get(start..)?).ok()?;
        let table = u64::from(header.e_shentsize(LittleEndian)) * u64::from(header.e_shnum(LittleEndian));
        (header.e_machine(LittleEndian) == EM_BPF).then(|| header.e_shoff(LittleEndian) + table)
    };
    starts.find_map(|(start, _)| size(start)).unwrap_or_default()
}

fn by_crate(symbols: Vec<Symbol>) -> BTreeMap<String, Sums> {
    let mut sums: BTreeMap<String, Sums> = BTreeMap::new();
    let mut last = 0;
    for symbol in symbols {
        // Functions that turned out the same are one function with several names.
        if symbol.address == last {
            continue;
        }
        last = symbol.address;
        let sums = sums.entry(crate_of(&symbol.name).to_owned()).or_default();
        *(if symbol.is_code { &mut sums.code } else { &mut sums.data }) += symbol.bytes;
    }
    sums
}

/// Code or data in the file that has a name.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Symbol {
    address: u64,
    name: String,
    bytes: u64,
    is_code: bool,
}

/// The symbols that take room in the file, by their addresses.
fn symbols(file: &Elf<'_>) -> Vec<Symbol> {
    let symbol = |symbol: ElfSymbol64<'_, '_, LittleEndian>| {
        let section = file.section_by_index(symbol.section_index()?).ok()?.kind();
        let is_in_file = !matches!(section, SectionKind::UninitializedData | SectionKind::UninitializedTls);
        let name = format!("{:#}", rustc_demangle::demangle(symbol.name().ok()?));
        let (address, bytes, is_code) = (symbol.address(), symbol.size(), section == SectionKind::Text);
        (is_in_file && bytes > 0).then_some(Symbol { address, name, bytes, is_code })
    };
    let mut symbols: Vec<_> = file.symbols().filter_map(symbol).collect();
    symbols.sort();
    symbols
}

/// The crate of a demangled symbol: `std` for all of the standard library, `c` for a symbol without a path, which is of
/// the C library.
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
    use object::{BinaryFormat, Endianness, SymbolFlags, SymbolKind, SymbolScope, write};

    use super::*;

    #[test]
    fn one_byte_too_many_is_an_error_that_says_what_to_do() {
        let file = std::env::temp_dir().join(format!("cproxy-size-{}", std::process::id()));
        let agent = Binary { shipped: file.clone(), with_symbols: file.clone(), debug: file.clone() };
        let verdicts = [AGENT.limit_bytes, AGENT.limit_bytes + 1].map(|bytes| {
            fs::File::create(&file).unwrap().set_len(bytes).unwrap();
            check(&AGENT, &agent)
        });
        fs::remove_file(&file).unwrap();
        assert!(verdicts[0].is_ok());
        let error = verdicts[1].as_ref().unwrap_err().to_string();
        let bytes = (AGENT.limit_bytes + 1).to_string();
        assert!(error.contains(&bytes) && error.contains("cargo xtask size"), "{error}");
    }

    /// An object file with sections of so many bytes, each with a symbol of the same size and of the name beside it.
    fn object_file(sections: &[(&str, SectionKind, &str, u64)]) -> Vec<u8> {
        let mut file = write::Object::new(BinaryFormat::Elf, object::Architecture::X86_64, Endianness::Little);
        for &(section, kind, symbol, bytes) in sections {
            let section = file.add_section(Vec::new(), section.into(), kind);
            match kind {
                SectionKind::UninitializedData => file.append_section_bss(section, bytes, 1),
                _ => file.append_section_data(section, &vec![0; bytes as usize], 1),
            };
            file.add_symbol(write::Symbol {
                name: symbol.into(),
                value: 0,
                size: bytes,
                kind: if kind == SectionKind::Text { SymbolKind::Text } else { SymbolKind::Data },
                scope: SymbolScope::Linkage,
                weak: false,
                section: write::SymbolSection::Section(section),
                flags: SymbolFlags::None,
            });
        }
        file.write().unwrap()
    }

    #[test]
    fn symbols_that_take_room_in_the_file_are_read() {
        let file = object_file(&[
            (".text", SectionKind::Text, "_RNvCs1234_3foo3bar", 255),
            (".rodata", SectionKind::ReadOnlyData, "_ZN3foo5TABLE17h0123456789abcdefE", 16),
            (".bss", SectionKind::UninitializedData, "ZEROS", 8),
            (".text.start", SectionKind::Text, "_start", 0),
        ]);
        let symbol = |name: &str, bytes, is_code| Symbol { address: 0, name: name.to_owned(), bytes, is_code };
        let symbols = symbols(&Elf::parse(&*file).unwrap());
        assert_eq!(symbols, [symbol("foo::TABLE", 16, false), symbol("foo::bar", 255, true)]);
    }

    #[test]
    fn sections_are_summed_by_what_they_are() {
        let file = object_file(&[
            (".rela.dyn", SectionKind::ReadOnlyData, "a", 0x10),
            (".rodata", SectionKind::ReadOnlyString, "b", 0x100),
            (".eh_frame", SectionKind::ReadOnlyData, "c", 0x20),
            (".text", SectionKind::Text, "d", 0x1000),
            (".data.rel.ro", SectionKind::ReadOnlyDataWithRel, "e", 0x200),
            (".bss", SectionKind::UninitializedData, "f", 0x64a0),
            (".comment", SectionKind::OtherString, "g", 0xb2),
        ]);
        let parts = Parts::of(&Elf::parse(&*file).unwrap(), 0x2000).unwrap();
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
        let object =
            |architecture| write::Object::new(BinaryFormat::Elf, architecture, Endianness::Little).write().unwrap();
        let (other, programs) = (object(object::Architecture::X86_64), object(object::Architecture::Bpf));
        let image = [&*other, &[0; 7], &*programs, &[0; 9]].concat();
        assert_eq!(embedded_object(&image), programs.len() as u64);
        assert_eq!(embedded_object(&other), 0);
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
    fn symbols_without_a_path_are_from_c() {
        assert_eq!(crate_of("memcpy"), "c");
        assert_eq!(crate_of("__vfscanf_internal"), "c");
    }

    #[test]
    fn bytes_are_summed_once() {
        let symbol = |address, bytes, is_code, name: &str| Symbol { address, name: name.to_owned(), bytes, is_code };
        let sums = by_crate(vec![
            symbol(1, 16, true, "foo::a"),
            symbol(2, 1, true, "foo::b"),
            symbol(2, 1, true, "foo::c"),
            symbol(3, 2, true, "memcpy"),
            symbol(4, 5, false, "foo::D"),
        ]);
        let foo = Sums { code: 17, data: 5 };
        assert_eq!(sums, BTreeMap::from([("c".to_owned(), Sums { code: 2, data: 0 }), ("foo".to_owned(), foo)]));
    }
}
