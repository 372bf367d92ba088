//! Views that clients have at the moment, each once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use super::view::{ClientView, Shown};

/// Largest number of views that are shared. The views of further clients are their own.
const VIEWS_MAX: usize = 65_536;

/// Views that are in use, by token.
#[derive(Debug, Default)]
pub(super) struct InternedViews(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    views: HashMap<String, Weak<ClientView>>,
    /// Number of views that were left after the last removal of unused ones.
    in_use: usize,
}

impl InternedViews {
    /// The view with this content.
    pub(super) fn share(&self, shown: Shown) -> Arc<ClientView> {
        let token = shown.token();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = known.views.get(&token).and_then(Weak::upgrade) {
            return view;
        }
        let view = Arc::new(ClientView::narrowed(shown, token.clone()));
        known.remove_unused_if_many();
        if known.views.len() < VIEWS_MAX {
            known.views.insert(token, Arc::downgrade(&view));
        }
        view
    }
}

impl Known {
    /// Views that come and go must not fill the memory.
    fn remove_unused_if_many(&mut self) {
        if self.views.len() >= (2 * self.in_use + 64).min(VIEWS_MAX) {
            self.views.retain(|_, view| view.strong_count() > 0);
            self.in_use = self.views.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{super::view::Namespaces, *};

    fn shown(node: usize) -> Shown {
        Shown::new(Namespaces::All, &Arc::new(BTreeSet::new()), Some(format!("node-{node}")))
    }

    #[test]
    fn a_view_is_shared_as_long_as_it_is_in_use() {
        let views = InternedViews::default();
        let kept = views.share(shown(0));
        for node in 1..1000 {
            drop(views.share(shown(node)));
        }
        assert!(views.0.lock().unwrap().views.len() < 100);
        assert!(Arc::ptr_eq(&kept, &views.share(shown(0))));
    }

    #[test]
    fn views_in_use_are_bounded() {
        let views = InternedViews::default();
        let all: Vec<_> = (0..VIEWS_MAX + 100).map(|node| views.share(shown(node))).collect();
        assert_eq!(views.0.lock().unwrap().views.len(), VIEWS_MAX);
        assert!(Arc::ptr_eq(all.first().unwrap(), &views.share(shown(0))));
    }
}
