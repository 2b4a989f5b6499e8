//! Scripts from a fuzzer's bytes, against the naive model: the same actions as tests/host_model.rs.
#![no_main]

#[path = "../../tests/model/mod.rs"]
mod model;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (words, rest) = bytes.as_chunks::<8>();
    let colouring = rest.len() % 2 == 1;
    model::Model::run(words.iter().map(|w| u64::from_le_bytes(*w)), colouring);
});
