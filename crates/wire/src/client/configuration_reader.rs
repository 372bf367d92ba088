//! The configuration of the API servers, read anew for each request.
//!
//! There are few requests, so that files with credentials need not be watched.

use std::{mem, sync::Arc};

use kube::config::ExecConfig;

use crate::credentials::{
    configuration::{ApiServer, Configuration, configure},
    exec_plugin::{self, ExecCredentials},
    setup_error::Reason,
};

/// Reader of the configuration, with what it has read last.
#[derive(Debug)]
pub(super) struct ConfigurationReader {
    options: ApiServer,
    /// Read for these options, and not used yet.
    next: Option<Configuration>,
    /// Last configuration that could be read.
    last: Arc<Configuration>,
    /// Credentials of the user's program, and the program with its arguments.
    exec: Option<(String, ExecCredentials)>,
    /// A warning about the configuration was logged, and it still holds.
    has_warned: bool,
}

impl ConfigurationReader {
    /// A reader for `options`, which were read as `configuration`.
    pub(super) fn new(options: ApiServer, configuration: Configuration) -> Self {
        let last = Arc::new(configuration.clone());
        Self { options, next: Some(configuration), last, exec: None, has_warned: false }
    }

    /// Replaces the options, which were read as `configuration`.
    pub(super) fn replace(&mut self, options: ApiServer, configuration: Configuration) {
        (self.options, self.next) = (options, Some(configuration));
    }

    /// Forgets the credentials of the user's program, so that it is asked again.
    pub(super) fn forget_credentials(&mut self) {
        self.exec = None;
    }

    /// Last configuration that could be read.
    pub(super) fn last(&self) -> &Arc<Configuration> {
        &self.last
    }

    /// Reads files and programs again. If files cannot be read, the last configuration is used.
    ///
    /// # Errors
    /// The user's program returns no credentials, and there are no earlier ones.
    pub(super) async fn read(&mut self) -> Result<Arc<Configuration>, Reason> {
        let configuration = match self.next.take() {
            Some(configuration) => Ok(configuration),
            None => configure(&self.options).await,
        };
        match configuration {
            Ok(mut configuration) => {
                self.has_warned = false;
                if let Some(exec) = configuration.exec.clone() {
                    configuration.add(self.run(&exec).await?)?;
                }
                self.last = Arc::new(configuration);
            }
            // client-go keeps the last token, too.
            Err(error) if !mem::replace(&mut self.has_warned, true) => {
                tracing::warn!("{error}; what was read last stays in use");
            }
            Err(_) => {}
        }
        Ok(self.last.clone())
    }

    /// Credentials of the user's program, which runs if there are none or if they are about to expire.
    async fn run(&mut self, exec: &ExecConfig) -> Result<ExecCredentials, Reason> {
        let key = format!("{exec:?}");
        let known = self.exec.as_ref().filter(|(of, _)| *of == key).map(|(_, credentials)| credentials.clone());
        let credentials = match known {
            Some(known) if known.are_fresh() => known,
            known => match (exec_plugin::run(exec).await, known) {
                (Ok(new), _) => new,
                (Err(error), Some(known)) if known.are_valid() => {
                    tracing::warn!("{error}; its last credentials stay in use until they expire");
                    known
                }
                (Err(error), _) => return Err(error),
            },
        };
        self.exec = Some((key, credentials.clone()));
        Ok(credentials)
    }
}
