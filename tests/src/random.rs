//! Random numbers that a seed repeats.

use std::time::{SystemTime, UNIX_EPOCH};

/// Says which seed to take: the one that a failed run has printed.
const SEED_VARIABLE: &str = "CPROXY_SEED";

/// xorshift64* (Marsaglia 2003, Vigna 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers that belong to `seed`.
    pub fn new(seed: u64) -> Self {
        // Of zero nothing else would ever come.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// One of `0..count`.
    ///
    /// # Panics
    /// When there is none.
    pub fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.draw()).expect("32 bits fit") % count
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
        *among.get(self.below(among.len())).expect("below the length")
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
        let mut rest = among.to_vec();
        (0..self.below(most + 1).min(rest.len())).map(|_| rest.swap_remove(self.below(rest.len()))).collect()
    }

    /// All of several, in any order.
    pub fn shuffled<T: Clone>(&mut self, all: &[T]) -> Vec<T> {
        let mut rest = all.to_vec();
        (0..rest.len()).map(|_| rest.swap_remove(self.below(rest.len()))).collect()
    }
}

/// The seed that is asked for, or one that no run has had.
///
/// # Panics
/// When what is asked for is no number.
pub fn seed() -> u64 {
    match std::env::var(SEED_VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={text:?} is no number")),
        Err(_) => u64::from(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos())),
    }
}

/// Whether random tests are to take their time.
pub fn is_soak() -> bool {
    std::env::var_os("CPROXY_SOAK").is_some()
}
