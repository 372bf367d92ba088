//! Progress of a command: its steps, and the time that the remaining ones take.

use crate::run;

/// A step and its usual time on two cores; zero if nothing has to be built.
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) seconds: u64,
}

impl Step {
    pub(crate) fn new(name: impl Into<String>, seconds: u64) -> Self {
        Self { name: name.into(), seconds }
    }

    /// A step that takes this time only once.
    pub(crate) fn once(name: impl Into<String>, is_done: bool, seconds: u64) -> Self {
        Self::new(name, if is_done { 0 } else { seconds })
    }
}

/// The steps of a command, announced one by one.
pub(crate) struct Steps {
    verb: &'static str,
    steps: Vec<Step>,
    begun: usize,
}

impl Steps {
    pub(crate) fn new(verb: &'static str, steps: impl Into<Vec<Step>>) -> Self {
        Self { verb, steps: steps.into(), begun: 0 }
    }

    /// Announces the next step.
    pub(crate) fn next(&mut self) {
        if let Some(line) = self.line() {
            run::report(line);
            self.begun += 1;
        }
    }

    fn line(&self) -> Option<String> {
        let (step, later) = self.steps.get(self.begun..)?.split_first()?;
        let name = format!("{}: step {} of {}: {}", self.verb, self.begun + 1, self.steps.len(), step.name);
        let all = step.seconds + later.iter().map(|step| step.seconds).sum::<u64>();
        Some(match step.seconds {
            0 => name,
            seconds if seconds == all => format!("{name}, {} on two cores", about(seconds)),
            seconds => format!("{name}, {} on two cores, {} to the end", about(seconds), about(all)),
        })
    }
}

fn about(seconds: u64) -> String {
    match (seconds + 30) / 60 {
        0 => "half a minute".to_owned(),
        1 => "about a minute".to_owned(),
        minutes => format!("about {minutes} minutes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(steps: Vec<Step>) -> Vec<String> {
        let mut steps = Steps::new("demo", steps);
        let mut lines = Vec::new();
        while let Some(line) = steps.line() {
            lines.push(line);
            steps.begun += 1;
        }
        lines
    }

    #[test]
    fn each_step_says_how_long_it_and_all_that_is_left_take() {
        let steps = vec![Step::new("packages", 60), Step::once("compiling", false, 90), Step::new("running", 0)];
        assert_eq!(
            lines(steps),
            [
                "demo: step 1 of 3: packages, about a minute on two cores, about 3 minutes to the end",
                "demo: step 2 of 3: compiling, about 2 minutes on two cores",
                "demo: step 3 of 3: running",
            ]
        );
    }

    #[test]
    fn a_step_with_nothing_to_do_promises_nothing() {
        assert_eq!(lines(vec![Step::once("compiling", true, 90)]), ["demo: step 1 of 1: compiling"]);
    }
}
