/*
 * pinpool for C++17: owners over pinpool.h, and a std::pmr::memory_resource in registered memory.
 *
 * Errors of start-up are thrown (pinpool::error, with the message that says what to change). An allocation
 * that finds nothing left gives an empty buffer, or std::bad_alloc where a memory resource must throw.
 * Threads and lifetimes are those of pinpool.h; owners may be destroyed on any thread.
 */
#ifndef PINPOOL_HPP
#define PINPOOL_HPP

#include <cstddef>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "pinpool.h"

namespace pinpool {

/* A call that failed: its code, and the message with the numbers. */
class error : public std::runtime_error {
public:
    explicit error(int status) : std::runtime_error(pinpool_last_error()), status_(status) {}
    int status() const noexcept { return status_; }

private:
    int status_;
};

/* One buffer, given back when it goes. It must not outlive its pool. */
class buffer {
public:
    buffer() noexcept = default;
    buffer(const pinpool_t *pool, const pinpool_buf_t &buf) noexcept : pool_(pool), buf_(buf) {}
    buffer(buffer &&other) noexcept { swap(other); }
    buffer &operator=(buffer &&other) noexcept {
        buffer(std::move(other)).swap(*this);
        return *this;
    }
    buffer(const buffer &) = delete;
    buffer &operator=(const buffer &) = delete;
    ~buffer() {
        if (pool_ != nullptr) pinpool_free(pool_, buf_.addr);
    }

    explicit operator bool() const noexcept { return pool_ != nullptr; }
    std::byte *data() const noexcept { return static_cast<std::byte *>(buf_.addr); }
    std::size_t size() const noexcept { return buf_.len; }
    std::uint32_t lkey() const noexcept { return buf_.lkey; }
    /* The rkey; nullptr if peers can do nothing with this memory. */
    const std::uint32_t *rkey() const noexcept { return buf_.has_rkey ? &buf_.rkey : nullptr; }

    /* Gives the buffer up: whoever has the address frees it with pinpool_free. */
    pinpool_buf_t release() noexcept {
        pool_ = nullptr;
        return std::exchange(buf_, pinpool_buf_t{});
    }
    void swap(buffer &other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(buf_, other.buf_);
    }

private:
    const pinpool_t *pool_ = nullptr;
    pinpool_buf_t buf_{};
};

/* What a pool shall be, with the defaults. */
inline pinpool_options_t options(std::size_t capacity) noexcept {
    pinpool_options_t o;
    pinpool_options_init(&o);
    o.capacity = capacity;
    return o;
}

/* A pool, closed when it goes. Buffers and containers in it must be gone by then. */
class pool {
public:
    explicit pool(const pinpool_options_t &options) {
        if (int status = pinpool_open(&options, &handle_); status != PINPOOL_OK) throw error(status);
    }
    pool(pool &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    pool &operator=(pool &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    pool(const pool &) = delete;
    pool &operator=(const pool &) = delete;
    ~pool() {
        if (handle_ != nullptr) pinpool_close(handle_);
    }

    pinpool_t *get() const noexcept { return handle_; }

    /* A buffer of len bytes; empty if there is none, and pinpool_last_error() says why. */
    buffer alloc(std::size_t len) const noexcept {
        pinpool_buf_t buf;
        return pinpool_alloc(handle_, len, &buf) == PINPOOL_OK ? buffer(handle_, buf) : buffer();
    }

    pinpool_stats_t stats() const {
        pinpool_stats_t s{};
        s.size = sizeof s;
        if (int status = pinpool_stats(handle_, &s); status != PINPOOL_OK) throw error(status);
        return s;
    }

private:
    pinpool_t *handle_ = nullptr;
};

/* Standard containers in registered memory: std::pmr::vector<char> v(&resource). Throws std::bad_alloc when
   the pool has nothing left. It must not outlive its pool. */
class memory_resource : public std::pmr::memory_resource {
public:
    explicit memory_resource(const pool &pool) noexcept : pool_(pool.get()) {}

private:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
        pinpool_buf_t buf;
        if (pinpool_alloc_aligned(pool_, bytes, alignment, &buf) != PINPOOL_OK) throw std::bad_alloc();
        return buf.addr;
    }
    void do_deallocate(void *p, std::size_t, std::size_t) override { pinpool_free(pool_, p); }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        auto *same = dynamic_cast<const memory_resource *>(&other);
        return same != nullptr && same->pool_ == pool_;
    }

    const pinpool_t *pool_;
};

} // namespace pinpool

#endif
