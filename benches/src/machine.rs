//! The machine of a result, without which a time has no meaning.

use std::{fmt, fs, thread};

use serde_json::{Value, json};

/// Description of this machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Name of the processor.
    pub processor: String,
    /// How many CPUs this process may use.
    pub cpus: usize,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// The description from the kernel's data.
    #[must_use]
    pub fn this() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let processor = processor(&text("/proc/cpuinfo")).unwrap_or(std::env::consts::ARCH).to_owned();
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self { processor, cpus, kernel: text("/proc/sys/kernel/osrelease").trim().to_owned() }
    }

    /// JSON for a file of results.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"processor": self.processor, "cpus": self.cpus, "kernel": self.kernel})
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} CPUs, Linux {}", self.processor, self.cpus, self.kernel)
    }
}

fn processor(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.split_once(':')?.1.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named_where_the_kernel_names_it() {
        assert_eq!(processor("processor\t: 0\nmodel name\t: A B\nmodel name\t: A B\n"), Some("A B"));
        assert_eq!(processor("processor\t: 0\n"), None);
    }
}
