//! Circles of imports between the files of a crate.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::Path,
};

/// Breaches of the crate with this graph of imports, each with the files of a circle in order.
pub(super) fn breaches(graph: &BTreeMap<&Path, Vec<&Path>>) -> Vec<String> {
    let mut seen: BTreeSet<&Path> = BTreeSet::new();
    let mut breaches = Vec::new();
    for file in graph.keys() {
        let Some(circle) = (!seen.contains(file)).then(|| shortest(graph, file)).flatten() else { continue };
        seen.extend(&circle);
        let names: Vec<_> = circle.iter().chain([file]).map(|file| file.display().to_string()).collect();
        breaches.push(format!("{}: is in a circle of imports: {}", file.display(), names.join(" -> ")));
    }
    breaches
}

/// The shortest circle from `start`, which begins with it.
fn shortest<'a>(graph: &BTreeMap<&'a Path, Vec<&'a Path>>, start: &'a Path) -> Option<Vec<&'a Path>> {
    let mut importers = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(file) = queue.pop_front() {
        for imported in graph.get(file).into_iter().flatten() {
            if *imported == start {
                let mut circle: Vec<_> =
                    std::iter::successors(Some(file), |file| importers.get(file).copied()).collect();
                circle.reverse();
                return Some(circle);
            }
            if !importers.contains_key(imported) {
                importers.insert(*imported, file);
                queue.push_back(imported);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(edges: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut graph: BTreeMap<&Path, Vec<&Path>> = BTreeMap::new();
        for (file, imported) in edges {
            graph.entry(Path::new(file)).or_default().push(Path::new(imported));
        }
        breaches(&graph)
    }

    #[test]
    fn a_circle_is_named_in_order() {
        assert_eq!(found(&[("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")]), [""; 0]);
        let circle = found(&[("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"), ("c", "e")]);
        assert_eq!(circle, ["b: is in a circle of imports: b -> c -> d -> b"]);
    }

    #[test]
    fn each_file_in_a_circle_is_named_once() {
        let circles = found(&[("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("x", "y"), ("y", "x")]);
        let expected = ["a -> b -> a", "c -> b -> c", "x -> y -> x"];
        assert_eq!(circles, expected.map(|circle| format!("{}: is in a circle of imports: {circle}", &circle[..1])));
    }
}
