//! Measured figures with their budgets. All are printed before the first excess fails the test.

use std::time::Duration;

use cproxy_tests::{pinned, population::Shape, sandbox::Sandbox};

/// Figures of a test so far.
pub(crate) struct Figures {
    exceeded: Vec<String>,
}

impl Figures {
    pub(crate) fn new(shape: Shape) -> Self {
        eprintln!("{} Services with {} endpoints each", shape.services, shape.endpoints);
        Self { exceeded: Vec::new() }
    }

    pub(crate) fn heading(&self, what: &str) {
        eprintln!("{what}");
    }

    pub(crate) fn time(&mut self, what: &str, found: Duration, budget: Duration) {
        let milliseconds = |time: Duration| format!("{} ms", time.as_millis());
        self.add(what, milliseconds(found), milliseconds(budget), found > budget);
    }

    pub(crate) fn memory(&mut self, what: &str, bytes: u64, budget: u64) {
        self.add(what, kibibytes(bytes), kibibytes(budget), bytes > budget);
    }

    /// Records the kernel memory of all maps together.
    pub(crate) fn maps(&mut self, sandbox: &Sandbox, budget: u64) {
        let maps = pinned::maps(sandbox);
        for map in &maps {
            eprintln!("    {:<40} {:>12}", map.name, kibibytes(map.bytes));
        }
        self.memory("kernel memory of the maps", maps.iter().map(|map| map.bytes).sum(), budget);
    }

    /// Fails if any figure exceeds its budget, and names each of them.
    pub(crate) fn check(self) {
        assert!(self.exceeded.is_empty(), "over budget:\n{}", self.exceeded.join("\n"));
    }

    fn add(&mut self, what: &str, found: String, budget: String, is_exceeded: bool) {
        let line = format!("  {what:<42} {found:>12}, the budget is {budget}");
        eprintln!("{line}");
        if is_exceeded {
            self.exceeded.push(line);
        }
    }
}

fn kibibytes(bytes: u64) -> String {
    format!("{} KiB", bytes.div_ceil(1 << 10))
}
