//! Random numbers with a reproducible seed.

use fastrand::Rng;

/// Variable with the seed, as printed by a failed run.
const SEED_VARIABLE: &str = "CPROXY_SEED";

/// A source of random numbers.
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(Rng::with_seed(seed))
    }

    /// A random number of `0..count`.
    ///
    /// # Panics
    /// When the range is empty.
    pub fn below(&mut self, count: usize) -> usize {
        self.0.usize(..count)
    }

    /// True with a probability of `chance` percent.
    pub fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    /// A random element.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        self.0.choice(among.iter().copied()).expect("there is nothing to pick from")
    }

    /// A random element, with a probability in proportion to its weight.
    pub fn weighted<T: Copy>(&mut self, among: &[(usize, T)]) -> T {
        let mut left = self.below(among.iter().map(|(weight, _)| weight).sum());
        for &(weight, item) in among {
            if left < weight {
                return item;
            }
            left -= weight;
        }
        unreachable!("the weights add up")
    }

    /// At most `most` random elements, in random order.
    pub fn some<T: Clone>(&mut self, among: &[T], most: usize) -> Vec<T> {
        let mut some = self.shuffled(among);
        some.truncate(self.below(most + 1));
        some
    }

    /// All elements in random order.
    pub fn shuffled<T: Clone>(&mut self, all: &[T]) -> Vec<T> {
        let mut shuffled = all.to_vec();
        self.0.shuffle(&mut shuffled);
        shuffled
    }
}

/// The seed from the environment, or a new one.
///
/// # Panics
/// When the variable is not a number.
pub fn seed() -> u64 {
    match std::env::var(SEED_VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={text:?} is no number")),
        Err(_) => u64::from(fastrand::u32(..)),
    }
}

/// Whether random tests are to run for longer.
pub fn is_soak() -> bool {
    std::env::var_os("CPROXY_SOAK").is_some()
}
