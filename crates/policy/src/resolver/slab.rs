//! Values by small numbers, which are used again.

/// Values with their ids.
pub(super) struct Slab<T> {
    values: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { values: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Adds a value and returns its id.
    pub(super) fn insert(&mut self, value: T) -> u32 {
        if let Some(id) = self.free.pop() {
            if let Some(place) = self.values.get_mut(id as usize) {
                *place = Some(value);
            }
            return id;
        }
        if self.values.len() == self.values.capacity() {
            // Twice the room would be half empty.
            self.values.reserve_exact(16 + self.values.len() / 8);
        }
        self.values.push(Some(value));
        (self.values.len() - 1) as u32
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<T> {
        let value = self.values.get_mut(id as usize).and_then(Option::take)?;
        self.free.push(id);
        Some(value)
    }

    pub(super) fn get(&self, id: u32) -> Option<&T> {
        self.values.get(id as usize).and_then(Option::as_ref)
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.values.get_mut(id as usize).and_then(Option::as_mut)
    }

    /// All values with their ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.values.iter().zip(0..).filter_map(|(value, id)| Some((id, value.as_ref()?)))
    }
}
