//! Random scripts against a naive model of the pool; see `model`.
#![cfg(feature = "fault")]

mod model;

use model::{Model, Shape};
use proptest::prelude::*;

fn cases() -> u32 {
    if std::env::var_os("PINPOOL_GUEST").is_some() { 4 } else { 96 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_pool_agrees_with_the_model(
        words in proptest::collection::vec(any::<u64>(), 1..300),
        // Half of them without guards.
        shape in prop_oneof![0u8..2, any::<u8>()],
    ) {
        Model::run(words, Shape::from_word(shape));
    }
}
