//! Imports between the modules of a crate: `use` declarations, and paths from `crate`, `super` or `self` anywhere else.
//! A name that the crate's root exports again is its file's.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// First words of a path within the crate.
const OWN: [&str; 3] = ["crate", "super", "self"];

/// Names of a module, from below the crate's root.
pub(super) type Module = Vec<String>;

/// Files of a crate with their imports, by module.
pub(super) struct Imports {
    files: BTreeMap<Module, File>,
}

/// File of a module.
struct File {
    path: PathBuf,
    source: Source,
    /// It is compiled for tests alone.
    is_test: bool,
}

/// Import of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Import {
    /// Modules and name, from below the crate's root.
    pub(super) path: Module,
    /// It is for tests alone.
    pub(super) is_test: bool,
    /// It only exports the name again.
    pub(super) is_export: bool,
}

impl Imports {
    /// Reads the crate whose sources are in `directory`.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        super::collect(directory, &mut paths)?;
        let mut texts = Vec::new();
        for path in paths.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            texts.push((path.strip_prefix(directory)?.to_owned(), text));
        }
        Self::of(texts)
    }

    /// Reads the texts of files, each with its path below the crate's `src`.
    pub(super) fn of(texts: impl IntoIterator<Item = (PathBuf, String)>) -> Result<Self> {
        let mut files = BTreeMap::new();
        for (path, text) in texts {
            let module = module(&path);
            if module.is_empty() && files.contains_key(&module) && path == Path::new("main.rs") {
                // The library is the root of both.
                continue;
            }
            let tokens: TokenStream = text.parse().map_err(|error| anyhow!("{}: {error}", path.display()))?;
            let mut source = Source { module: module.clone(), ..Source::default() };
            source.read(&tokens.into_iter().collect::<Vec<_>>());
            files.insert(module, File { path, source, is_test: false });
        }
        let test_modules: Vec<_> = files.values().flat_map(|file| file.source.test_modules.clone()).collect();
        for (module, file) in &mut files {
            file.is_test = test_modules.iter().any(|test_module| module.starts_with(test_module));
        }
        Ok(Self { files })
    }

    /// Files, each with its module and imports.
    pub(super) fn files(&self) -> impl Iterator<Item = (&Path, &Module, Vec<Import>)> {
        self.files.iter().map(|(module, file)| {
            let imports = file.source.imports.iter().filter_map(|import| self.resolve(import, file.is_test));
            (&*file.path, module, imports.collect())
        })
    }

    /// Files that each file imports, but for those that it only exports again.
    pub(super) fn graph(&self) -> BTreeMap<&Path, Vec<&Path>> {
        let files = self.files().filter(|(_, module, _)| !module.is_empty());
        let exports = self.root_exports();
        let imported = |own: &Path, imports: Vec<Import>| {
            let counting = imports.into_iter().filter(|import| !import.is_test && !import.is_export);
            let files = counting.filter_map(|import| {
                let exported = || exports.get(import.path.first()?).and_then(|path| self.file_of(path));
                self.file_of(&import.path).or_else(exported)
            });
            files.filter(|file| *file != own).collect()
        };
        files.map(|(path, _, imports)| (path, imported(path, imports))).collect()
    }

    /// Names that the crate's root exports, each with its path.
    fn root_exports(&self) -> BTreeMap<String, Module> {
        let root = self.files().filter(|(_, module, _)| module.is_empty()).flat_map(|(.., imports)| imports);
        let exports = root.filter(|import| import.is_export);
        exports.filter_map(|import| Some((import.path.last()?.clone(), import.path))).collect()
    }

    /// The import from the crate's root; `None` for one of another crate.
    fn resolve(&self, import: &Written, is_in_test: bool) -> Option<Import> {
        let is_own = !import.is_relative || self.files.contains_key(import.path.get(..=import.module_length)?);
        let Written { is_test, is_export, .. } = *import;
        is_own.then(|| Import { path: import.path.clone(), is_test: is_test || is_in_test, is_export })
    }

    /// File of the innermost module in a path, unless it is the crate's root.
    fn file_of(&self, path: &[String]) -> Option<&Path> {
        let mut modules = (1..=path.len()).rev().filter_map(|end| path.get(..end));
        modules.find_map(|module| self.files.get(module)).map(|file| &*file.path)
    }
}

/// Module of a file, whose path is from the crate's `src`.
fn module(path: &Path) -> Module {
    let module = path.with_extension("");
    if module == Path::new("lib") || module == Path::new("main") {
        return Module::new();
    }
    module.iter().map(|name| name.to_string_lossy().into_owned()).collect()
}

/// Import as a file has it.
struct Written {
    path: Module,
    /// Length of the module that the path was written in.
    module_length: usize,
    /// It begins with a name, which may be another crate's.
    is_relative: bool,
    is_test: bool,
    is_export: bool,
}

/// Imports of a file so far, and the position in it.
#[derive(Default)]
struct Source {
    module: Module,
    is_test: bool,
    is_export: bool,
    imports: Vec<Written>,
    /// Modules with files of their own that are compiled for tests alone.
    test_modules: Vec<Module>,
}

impl Source {
    /// Reads items, or what is inside them.
    fn read(&mut self, tokens: &[TokenTree]) {
        let mut rest = tokens;
        while let Some((first, after)) = rest.split_first() {
            rest = match first {
                _ if is_test_attribute(rest) => self.read_for_tests(rest.get(2..).unwrap_or_default()),
                TokenTree::Ident(word) if word == "pub" => self.read_public(after),
                TokenTree::Ident(word) if word == "use" && !is_punct(after.first(), '<') => self.read_use(after),
                TokenTree::Ident(word) if word == "mod" => self.read_module(after),
                TokenTree::Ident(_) => self.read_path(rest),
                TokenTree::Group(group) => {
                    self.read(&group.stream().into_iter().collect::<Vec<_>>());
                    after
                }
                _ => after,
            };
        }
    }

    /// Reads the item after `#[cfg(test)]`, and returns the rest.
    fn read_for_tests<'a>(&mut self, tokens: &'a [TokenTree]) -> &'a [TokenTree] {
        let is_use = tokens.iter().take(3).any(|token| matches!(token, TokenTree::Ident(word) if word == "use"));
        let ends = |token: &TokenTree| match token {
            TokenTree::Punct(punct) => punct.as_char() == ';',
            TokenTree::Group(group) => group.delimiter() == Delimiter::Brace && !is_use,
            _ => false,
        };
        let length = tokens.iter().position(ends).map_or(tokens.len(), |last| last + 1);
        let (item, rest) = tokens.split_at_checked(length).unwrap_or((tokens, &[]));
        let was_test = std::mem::replace(&mut self.is_test, true);
        self.read(item);
        self.is_test = was_test;
        rest
    }

    /// Reads what follows on `pub`: with `use`, it exports names again.
    fn read_public<'a>(&mut self, tokens: &'a [TokenTree]) -> &'a [TokenTree] {
        let item = match tokens.split_first() {
            Some((TokenTree::Group(group), item)) if group.delimiter() == Delimiter::Parenthesis => item,
            _ => tokens,
        };
        let Some((TokenTree::Ident(word), tree)) = item.split_first() else { return item };
        if word != "use" {
            return item;
        }
        self.is_export = true;
        let rest = self.read_use(tree);
        self.is_export = false;
        rest
    }

    /// Reads the declaration after `use`.
    fn read_use<'a>(&mut self, tokens: &'a [TokenTree]) -> &'a [TokenTree] {
        let length = tokens.iter().position(|token| is_punct(Some(token), ';')).unwrap_or(tokens.len());
        let (tree, rest) = tokens.split_at_checked(length).unwrap_or((tokens, &[]));
        self.read_tree(&Module::new(), tree);
        rest
    }

    /// Reads a list of trees, such as `a::{b, c}, d`.
    fn read_tree(&mut self, start: &[String], list: &[TokenTree]) {
        for tree in list.split(|token| is_punct(Some(token), ',')).filter(|tree| !tree.is_empty()) {
            let mut path = start.to_vec();
            let mut is_list = false;
            for token in tree {
                match token {
                    TokenTree::Ident(word) if word == "as" => break,
                    TokenTree::Ident(word) => path.push(word.to_string()),
                    TokenTree::Group(group) => {
                        is_list = true;
                        self.read_tree(&path, &group.stream().into_iter().collect::<Vec<_>>());
                    }
                    _ => {}
                }
            }
            if !is_list {
                self.add(path);
            }
        }
    }

    /// Reads what follows on `mod`: a name, and perhaps the module itself.
    fn read_module<'a>(&mut self, tokens: &'a [TokenTree]) -> &'a [TokenTree] {
        let [TokenTree::Ident(name), body, rest @ ..] = tokens else { return tokens };
        self.module.push(name.to_string());
        match body {
            TokenTree::Group(group) => self.read(&group.stream().into_iter().collect::<Vec<_>>()),
            _ if self.is_test => self.test_modules.push(self.module.clone()),
            _ => {}
        }
        self.module.pop();
        rest
    }

    /// Reads a path, of which `tokens` has the first word, and returns the rest.
    fn read_path<'a>(&mut self, tokens: &'a [TokenTree]) -> &'a [TokenTree] {
        let mut path = Module::new();
        let mut rest = tokens;
        while let [TokenTree::Ident(word), after @ ..] = rest {
            path.push(word.to_string());
            rest = after;
            let [colon, other, after @ ..] = after else { break };
            if !is_punct(Some(colon), ':') || !is_punct(Some(other), ':') {
                break;
            }
            rest = after;
        }
        if path.len() > 1 && path.first().is_some_and(|first| OWN.contains(&&**first)) {
            self.add(path);
        }
        rest
    }

    /// Adds a path as it is written.
    fn add(&mut self, written: Module) {
        let mut words = written.into_iter().peekable();
        let first = words.peek().cloned().unwrap_or_default();
        let mut path = if first == "crate" { Module::new() } else { self.module.clone() };
        let is_relative = !OWN.contains(&&*first);
        while let Some(word) = words.next_if(|word| OWN.contains(&&**word)) {
            if word == "super" {
                path.pop();
            }
        }
        // `self` at the end of a list is the module before it.
        path.extend(words.filter(|word| word != "self"));
        let (is_test, is_export) = (self.is_test, self.is_export);
        self.imports.push(Written { path, module_length: self.module.len(), is_relative, is_test, is_export });
    }
}

fn is_punct(token: Option<&TokenTree>, char: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == char)
}

/// Whether `#[cfg(test)]` comes next.
fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let [hash, TokenTree::Group(group), ..] = tokens else { return false };
    is_punct(Some(hash), '#') && group.to_string().replace(' ', "") == "[cfg(test)]"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Imports {
        Imports::of(files.iter().map(|(path, text)| (path.into(), (*text).to_owned()))).unwrap()
    }

    /// Paths that the first file imports, with a mark at those of tests and those that are exported again.
    fn imports(files: &[(&str, &str)]) -> Vec<String> {
        let imports = read(files);
        let (.., found) = imports.files().find(|(path, ..)| *path == Path::new(files[0].0)).unwrap();
        let mark = |import: &Import| {
            let marks = [if import.is_test { " (test)" } else { "" }, if import.is_export { " (export)" } else { "" }];
            format!("{}{}", import.path.join("::"), marks.concat())
        };
        found.iter().map(mark).collect()
    }

    #[test]
    fn a_use_declaration_is_a_tree() {
        let text = "use std::fs;\nuse crate::{\n    a::{self, B, c::*}, d as e,\n};\nuse super::{f, super::g};\n\
            use self::h::I;";
        let expected = ["a", "a::B", "a::c", "d", "x::f", "g", "x::y::h::I"];
        assert_eq!(imports(&[("x/y.rs", text)]), expected);
    }

    #[test]
    fn paths_count_wherever_they_are() {
        let text = "fn f(a: &[crate::a::A; 2]) -> impl Iterator + use<'_> { vec![super::b::B, std::c::C] }";
        assert_eq!(imports(&[("x.rs", text)]), ["a::A", "b::B"]);
        assert_eq!(imports(&[("x.rs", "// crate::a::B\nconst A: &str = \"crate::a::B\";")]), [""; 0]);
    }

    #[test]
    fn modules_below_are_known_by_their_files() {
        let text = "mod a;\nuse a::A;\nuse b::B;\nfn f() { a::f() }\nmod inner { use super::a::C; use a::D; }";
        assert_eq!(imports(&[("x.rs", text), ("x/a.rs", "")]), ["x::a::A", "x::a::C"]);
        assert_eq!(imports(&[("lib.rs", text), ("a.rs", "")]), ["a::A", "a::C"]);
    }

    #[test]
    fn tests_and_exports_are_marked() {
        let text = "pub(crate) use crate::a::A;\npub use crate::b::B;\n#[cfg(test)]\nuse crate::{c::C, d::D};\nuse \
            crate::e::E;\n#[cfg(test)]\nmod tests {\n    use super::F;\n}\nuse crate::g::G;";
        let expected = ["a::A (export)", "b::B (export)", "c::C (test)", "d::D (test)", "e::E", "x::F (test)", "g::G"];
        assert_eq!(imports(&[("x.rs", text)]), expected);
        let parent = ("x.rs", "#[cfg(test)]\nmod cases;");
        assert_eq!(imports(&[("x/cases/a.rs", "use crate::a::A;"), parent]), ["a::A (test)"]);
    }

    #[test]
    fn the_graph_has_files() {
        let files = [
            ("lib.rs", "pub use a::A;\nuse a::B;"),
            ("a.rs", "mod c;\nuse c::C;\nuse crate::{Root, b::d::E};"),
            ("a/c.rs", "use super::B;\nuse super::c::D;"),
            ("b.rs", "#[cfg(test)]\nuse crate::a::A;"),
        ];
        let imports = read(&files);
        let graph = imports.graph();
        let imported =
            |file: &str| graph[Path::new(file)].iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(imported("a.rs"), ["a/c.rs", "b.rs"]);
        assert_eq!(imported("a/c.rs"), ["a.rs"]);
        assert_eq!(imported("b.rs"), [""; 0]);
        assert!(!graph.contains_key(Path::new("lib.rs")));
    }
}
