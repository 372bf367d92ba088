//! Random numbers that a seed repeats.

use fastrand::Rng;

/// Names the seed to take: the one that a failed run has printed.
const SEED_VARIABLE: &str = "CPROXY_SEED";

/// A source of random numbers.
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// The numbers that belong to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(Rng::with_seed(seed))
    }

    /// One of `0..count`.
    ///
    /// # Panics
    /// When there is none.
    pub fn below(&mut self, count: usize) -> usize {
        self.0.usize(..count)
    }

    /// True in `chance` of a hundred cases.
    pub fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    /// One of several.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        self.0.choice(among.iter().copied()).expect("there is nothing to pick from")
    }

    /// One of several, each as often as its weight says.
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

    /// Some of several, in any order, no more than `most`.
    pub fn some<T: Clone>(&mut self, among: &[T], most: usize) -> Vec<T> {
        let mut some = self.shuffled(among);
        some.truncate(self.below(most + 1));
        some
    }

    /// All of several, in any order.
    pub fn shuffled<T: Clone>(&mut self, all: &[T]) -> Vec<T> {
        let mut shuffled = all.to_vec();
        self.0.shuffle(&mut shuffled);
        shuffled
    }
}

/// The seed that is asked for, or one that no run has had.
///
/// # Panics
/// When what is asked for is no number.
pub fn seed() -> u64 {
    match std::env::var(SEED_VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={text:?} is no number")),
        Err(_) => u64::from(fastrand::u32(..)),
    }
}

/// Whether random tests are to take their time.
pub fn is_soak() -> bool {
    std::env::var_os("CPROXY_SOAK").is_some()
}
