//! State that the task that owns the table reports: plain data, without a way to anybody.

mod canary_state;
mod measures;
mod restore_sign;
mod service_calls;
mod status;

pub use canary_state::{CanaryState, Untried};
pub(crate) use measures::{Measures, ResumeReason};
pub use restore_sign::RestoreSign;
pub use service_calls::ServiceCalls;
pub use status::Status;
