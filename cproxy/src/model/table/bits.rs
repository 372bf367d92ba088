//! A set of small numbers.

/// One bit for each number up to the largest there was.
#[derive(Debug, Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub(super) fn set(&mut self, number: u32, is_in: bool) {
        let index = (number / u64::BITS) as usize;
        if is_in && index >= self.0.len() {
            self.0.resize(index + 1, 0);
        }
        let bit = 1 << (number % u64::BITS);
        if let Some(word) = self.0.get_mut(index) {
            *word = if is_in { *word | bit } else { *word & !bit };
        }
    }

    pub(super) fn has(&self, number: u32) -> bool {
        let word = self.0.get((number / u64::BITS) as usize);
        word.is_some_and(|word| word & 1 << (number % u64::BITS) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_is_there_until_it_is_taken_out() {
        let mut bits = Bits::default();
        for number in [0, 63, 64, 1000] {
            assert!(!bits.has(number));
            bits.set(number, true);
            assert!(bits.has(number) && !bits.has(number + 1));
            bits.set(number, false);
            assert!(!bits.has(number));
        }
    }
}
