//! Reason for a new connection that the session does not know yet, while it is locked by an attempt to connect.

use tokio::sync::{Mutex as AsyncMutex, MutexGuard, watch};

use crate::credentials::configuration::{ApiServer, Configuration};

/// Reason for a new connection.
#[derive(Debug)]
pub(super) enum Renewal {
    /// Options that replace those of the session, and what was read for them.
    Options(Box<(ApiServer, Configuration)>),
    /// The present connection and credentials may be worth nothing.
    Restored,
}

/// The reason, and the one task that tries until it is settled.
#[derive(Debug)]
pub(super) struct PendingRenewal {
    /// Attempts to connect receive what is announced, and begin anew with it.
    reason: watch::Sender<Option<Renewal>>,
    /// Locked by the task.
    only: AsyncMutex<()>,
}

impl PendingRenewal {
    pub(super) fn new() -> Self {
        Self { reason: watch::Sender::new(None), only: AsyncMutex::new(()) }
    }

    /// The right to try until the reason is settled; `None` while another task has it.
    pub(super) fn begin(&self) -> Option<MutexGuard<'_, ()>> {
        self.only.try_lock().ok()
    }

    /// Replaces the options, in place of any earlier reason. The present attempt begins anew.
    pub(super) fn set_options(&self, options: ApiServer, configuration: Configuration) {
        self.reason.send_replace(Some(Renewal::Options(Box::new((options, configuration)))));
    }

    /// Has the next attempt make a new connection.
    pub(super) fn request(&self) {
        self.reason.send_if_modified(|pending| {
            pending.get_or_insert(Renewal::Restored);
            false
        });
    }

    /// Has the present attempt begin anew.
    pub(super) fn interrupt(&self) {
        self.reason.send_modify(|_| {});
    }

    /// Waits until the present attempt has to begin anew.
    pub(super) fn interrupted(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.reason.subscribe();
        async move { receiver.changed().await.unwrap_or_default() }
    }

    /// The reason, which is known to the session from now on.
    pub(super) fn take(&self) -> Option<Renewal> {
        let mut taken = None;
        self.reason.send_if_modified(|pending| {
            taken = pending.take();
            false
        });
        taken
    }

    pub(super) fn is_some(&self) -> bool {
        self.reason.borrow().is_some()
    }
}
