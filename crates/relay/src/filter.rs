//! Objects that a client sees.

use std::sync::Arc;

use crate::{
    kind::Kind,
    object::{Meta, Object},
    selector::Selector,
    watchers::Topics,
};

/// Part of the cluster that a client may see.
pub trait Visibility: Send + Sync {
    /// True if the client may see the object.
    fn allows(&self, kind: Kind, meta: &Meta) -> bool;

    /// Topics of all events that the client may see; `None`: there are too many to name.
    fn topics(&self) -> Option<Vec<Box<str>>> {
        None
    }
}

/// Objects that a request is about: those of its client, namespace and selector.
#[derive(Clone, Default)]
pub struct Filter {
    /// Objects that the client may see; `None`: all.
    pub visibility: Option<Arc<dyn Visibility>>,
    /// Namespace in the path; `None`: all.
    pub namespace: Option<String>,
    /// Selector, without requirements that all objects of the relay meet.
    pub selector: Selector,
}

impl Filter {
    /// True if it has all objects.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.visibility.is_none() && self.namespace.is_none() && self.selector.is_everything()
    }

    /// Topics of all events that concern it; `None`: all.
    pub(crate) fn topics(&self) -> Topics {
        let of_view = self.visibility.as_ref().and_then(|visibility| visibility.topics());
        let of_name = || self.selector.name().map(|name| vec![name.into()]);
        of_view.or_else(of_name)
    }

    /// True if it has the object.
    #[must_use]
    pub fn has(&self, object: &Object) -> bool {
        self.has_meta(object.kind, &object.meta)
    }

    /// True if it has an object with these names and fields.
    #[must_use]
    pub fn has_meta(&self, kind: Kind, meta: &Meta) -> bool {
        self.namespace.as_deref().is_none_or(|namespace| namespace == &*meta.namespace)
            && self.selector.matches(meta)
            && self.visibility.as_ref().is_none_or(|visibility| visibility.allows(kind, meta))
    }
}
