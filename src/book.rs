//! The examples of the README and of the book's chapters, compiled and run as documentation tests.

#[doc = include_str!("../README.md")]
struct Readme;
#[doc = include_str!("../docs/zh/README.md")]
struct ReadmeChinese;

// What the chapters show comes with these features.
#[cfg(all(
    feature = "allocator-api2",
    feature = "bytes",
    feature = "codec",
    feature = "global",
    feature = "loopback"
))]
mod chapters {
    #[doc = include_str!("../docs/start.md")]
    struct Start;
    #[doc = include_str!("../docs/guide-service.md")]
    struct Service;
    #[doc = include_str!("../docs/guide-framework.md")]
    struct Framework;
    #[doc = include_str!("../docs/tuning.md")]
    struct Tuning;
    #[doc = include_str!("../docs/security.md")]
    struct Security;
}
