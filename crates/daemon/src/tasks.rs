//! Background tasks of a process, none of which ends unseen.

use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use tokio::{runtime::Handle, task::JoinHandle};

/// Background tasks. Those that run for ever and end nevertheless are logged, and named by [`Self::ended`]. Clones are
/// the same set.
#[derive(Clone, Debug, Default)]
pub struct Tasks(Arc<Mutex<BTreeSet<&'static str>>>);

/// Life of a task that runs for ever.
struct Life {
    tasks: Tasks,
    name: &'static str,
    has_returned: bool,
}

impl Tasks {
    /// Starts a task that runs for ever, in this runtime. It takes the place of one of the same name that has ended.
    pub fn keep(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.keep_in(&Handle::current(), name, task)
    }

    /// The same in another runtime.
    pub fn keep_in(
        &self,
        runtime: &Handle,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.names().remove(name);
        let life = Life { tasks: self.clone(), name, has_returned: false };
        // Boxed, so that there is one spawn in the program for all tasks.
        let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(task);
        runtime.spawn(life.live(task))
    }

    /// Names of tasks that have ended and should run for ever.
    #[must_use]
    pub fn ended(&self) -> Vec<&'static str> {
        self.names().iter().copied().collect()
    }

    fn names(&self) -> MutexGuard<'_, BTreeSet<&'static str>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Life {
    async fn live(mut self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        task.await;
        self.has_returned = true;
    }
}

impl Drop for Life {
    /// A task that is aborted, also at the end of the process, was ended by intention.
    fn drop(&mut self) {
        if self.has_returned || thread::panicking() {
            let name = self.name;
            tracing::error!(name: "task_ended", "the task \"{name}\" has ended: start the process again");
            self.tasks.names().insert(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::{runtime::Builder, task::yield_now};

    use super::*;

    #[test]
    fn a_task_that_ends_is_named_until_it_is_started_again() {
        let tasks = Tasks::default();
        Builder::new_current_thread().build().unwrap().block_on(async {
            let aborted = tasks.keep("aborted", pending());
            tasks.keep("running", pending());
            tasks.keep("returned", async {});
            tasks.keep("panicked", async { panic!("as expected") });
            yield_now().await;
            aborted.abort();
            yield_now().await;
            assert_eq!(tasks.ended(), ["panicked", "returned"]);
            tasks.keep("returned", pending());
            yield_now().await;
            assert_eq!(tasks.ended(), ["panicked"]);
        });
        assert_eq!(tasks.ended(), ["panicked"], "the end of the process ends tasks, too");
    }
}
