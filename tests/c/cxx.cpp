/*
 * The C++ header: owners free once, moves leave nothing behind, containers live in registered memory, and
 * errors carry their message.
 */
#include <cstdint>
#include <memory_resource>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pinpool.hpp"

#include "check.h"

int main() {
    pinpool_options_t o = pinpool::options(4 << 20);
    o.device = "soft";
    o.pages = PINPOOL_PAGES_BASE;
    {
        pinpool::pool pool(o);
        {
            pinpool::buffer a = pool.alloc(5000), b;
            CHECK(a && !b && a.size() == 5000 && a.rkey() == nullptr);
            a.data()[4999] = std::byte{7};
            b = std::move(a);
            CHECK(b && !a && b.data()[4999] == std::byte{7}); // NOLINT: a was left empty
            pinpool_buf_t raw = b.release();
            CHECK(!b);
            ANSWERS(pinpool_free(pool.get(), raw.addr), PINPOOL_OK);
            CHECK(!pool.alloc(std::size_t{5} << 20));
        }
        CHECK(pool.stats().live == 0);
        {
            pinpool::memory_resource resource(pool), same(pool);
            CHECK(resource == same);
            std::pmr::vector<std::uint64_t> v(&resource);
            for (std::uint64_t i = 0; i < 10000; i++) v.push_back(i);
            pinpool_keys_t keys;
            ANSWERS(pinpool_keys(pool.get(), v.data(), &keys), PINPOOL_OK);
            std::pmr::unordered_map<int, std::pmr::string> map(&resource);
            for (int i = 0; i < 1000; i++) map.emplace(i, std::string(100, 'x'));
            ANSWERS(pinpool_keys(pool.get(), map.at(7).data(), &keys), PINPOOL_OK);
            void *aligned = resource.allocate(8, 16384);
            CHECK(reinterpret_cast<std::uintptr_t>(aligned) % 16384 == 0);
            resource.deallocate(aligned, 8, 16384);
            bool thrown = false;
            try {
                (void)resource.allocate(std::size_t{8} << 20);
            } catch (const std::bad_alloc &) {
                thrown = true;
            }
            CHECK(thrown && v[9999] == 9999);
        }
        CHECK(pool.stats().live == 0);
        pinpool::pool moved(std::move(pool));
        CHECK(moved.get() != nullptr && pool.get() == nullptr); // NOLINT: left empty
    }
    bool thrown = false;
    try {
        o.capacity = 0;
        pinpool::pool none(o);
    } catch (const pinpool::error &e) {
        thrown = e.status() == PINPOOL_INVALID && std::string(e.what()).find("capacity") != std::string::npos;
    }
    CHECK(thrown);
    std::puts("cxx: owners and containers hold");
}
