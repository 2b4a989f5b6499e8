//! Scripts from a fuzzer's bytes, against the naive model: the same actions as tests/host_model.rs.
#![no_main]

#[path = "../../tests/model/mod.rs"]
mod model;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (words, rest) = bytes.as_chunks::<8>();
    // Without a word more, a pool without guards.
    let shape = model::Shape::from_word(rest.first().copied().unwrap_or(0));
    model::Model::run(words.iter().map(|w| u64::from_le_bytes(*w)), shape);
});
