/*
 * libfabric messages from pinpool's buffers: the pool's arenas are registered with fi_mr_reg, through the
 * C interface's registrar, once; then messages of 4 KiB to 1 MiB flow between two endpoints, each buffer
 * taken from the pool and given back. The number of registrations stays at the number of arenas.
 *
 *   cc examples/libfabric.c $(pkg-config --cflags --libs pinpool libfabric) -o libfabric
 *   ./libfabric [PROVIDER [ADDRESS]]           e.g. "verbs;ofi_rxm" 10.77.0.1, or "tcp;ofi_rxm" 127.0.0.1
 *
 * What a framework does the same way: keep `context` (here the fi_domain) and a table from the lkey to what
 * the framework wants beside each buffer (here fi_mr_desc's pointer).
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pinpool.h"

enum { MOST_ARENAS = 64, ROUNDS = 200 };

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void ok(const char *what, ssize_t status) {
    if (status < 0) fail(what, fi_strerror((int)-status));
}

static void pool_ok(const char *what, int status) {
    if (status != PINPOOL_OK) fail(what, pinpool_last_error());
}

/* --- the hook: the pool's arenas become libfabric's memory regions -------------------------------- */

struct regions {
    struct fid_domain *domain;
    struct fid_mr *mr[MOST_ARENAS];
    unsigned calls;
};

static int register_memory(void *context, void *addr, size_t len, size_t page_size, uint32_t access,
                           uint64_t *handle, uint32_t *lkey, uint32_t *rkey) {
    struct regions *r = context;
    (void)page_size;
    (void)access; /* send and receive are all that is done here */
    if (r->calls == MOST_ARENAS) return FI_ENOSPC;
    uint32_t index = r->calls;
    int status = fi_mr_reg(r->domain, addr, len, FI_SEND | FI_RECV, 0, index + 1, 0, &r->mr[index], NULL);
    if (status != 0) return -status;
    r->calls++;
    *handle = index;
    *lkey = index; /* the way from a buffer to its descriptor */
    *rkey = 0;
    return 0;
}

static int deregister_memory(void *context, uint64_t handle) {
    struct regions *r = context;
    return -fi_close(&r->mr[handle]->fid);
}

/* --- two endpoints ---------------------------------------------------------------------------------- */

struct side {
    struct fid_ep *ep;
    struct fid_cq *cq;
    struct fid_av *av;
    fi_addr_t peer;
};

static struct side open_side(struct fid_domain *domain, struct fi_info *info) {
    struct side s;
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_MSG, .size = 64};
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 2};
    ok("fi_endpoint", fi_endpoint(domain, info, &s.ep, NULL));
    ok("fi_cq_open", fi_cq_open(domain, &cq, &s.cq, NULL));
    ok("fi_av_open", fi_av_open(domain, &av, &s.av, NULL));
    ok("fi_ep_bind", fi_ep_bind(s.ep, &s.cq->fid, FI_SEND | FI_RECV));
    ok("fi_ep_bind", fi_ep_bind(s.ep, &s.av->fid, 0));
    ok("fi_enable", fi_enable(s.ep));
    return s;
}

static void meet(struct side *a, struct side *b) {
    char name[256];
    size_t len = sizeof name;
    ok("fi_getname", fi_getname(&b->ep->fid, name, &len));
    if (fi_av_insert(a->av, name, 1, &a->peer, 0, NULL) != 1) fail("fi_av_insert", "no address taken");
}

static void close_side(struct side *s) {
    ok("fi_close", fi_close(&s->ep->fid));
    ok("fi_close", fi_close(&s->cq->fid));
    ok("fi_close", fi_close(&s->av->fid));
}

/* Counts what a side's queue has completed. */
static int completed(struct side *s, size_t *received) {
    struct fi_cq_msg_entry entry;
    ssize_t n = fi_cq_read(s->cq, &entry, 1);
    if (n == -FI_EAGAIN) return 0;
    if (n == -FI_EAVAIL) {
        struct fi_cq_err_entry e = {0};
        fi_cq_readerr(s->cq, &e, 0);
        fail("a transfer", fi_strerror(e.err));
    }
    ok("fi_cq_read", n);
    if (entry.flags & FI_RECV) *received = entry.len;
    return 1;
}

static void message(struct side *from, struct side *to, struct regions *r, const pinpool_t *pool,
                    size_t len, unsigned seed) {
    pinpool_buf_t out, in;
    size_t received = 0;
    pool_ok("alloc", pinpool_alloc(pool, len, &out));
    pool_ok("alloc", pinpool_alloc(pool, len, &in));
    for (size_t i = 0; i < len; i++) ((unsigned char *)out.addr)[i] = (unsigned char)(i * 31 + seed + i / 253);
    memset(in.addr, 0, len);

    ssize_t status;
    while ((status = fi_recv(to->ep, in.addr, len, fi_mr_desc(r->mr[in.lkey]), to->peer, NULL)) == -FI_EAGAIN)
        completed(to, &received);
    ok("fi_recv", status);
    int sent = 0, arrived = 0;
    while ((status = fi_send(from->ep, out.addr, len, fi_mr_desc(r->mr[out.lkey]), from->peer, NULL)) ==
           -FI_EAGAIN) {
        sent += completed(from, &received);
        arrived += completed(to, &received);
    }
    ok("fi_send", status);
    while (sent < 1 || arrived < 1) {
        sent += completed(from, &received);
        arrived += completed(to, &received);
    }
    if (received != len || memcmp(out.addr, in.addr, len) != 0) fail("a message", "other bytes arrived");
    /* Both completions are here, so nothing touches the buffers any more. */
    pool_ok("free", pinpool_free(pool, out.addr));
    pool_ok("free", pinpool_free(pool, in.addr));
}

int main(int argc, char **argv) {
    /* rxm makes its completion queue for this many peers; for the default, 256, it is longer than a soft
       device's may be. */
    setenv("FI_UNIVERSE_SIZE", "4", 0);
    struct fi_info *hints = fi_allocinfo(), *info;
    if (hints == NULL) fail("fi_allocinfo", "out of memory");
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup(argc > 1 ? argv[1] : "verbs;ofi_rxm");
    ok("fi_getinfo", fi_getinfo(FI_VERSION(1, 15), argc > 2 ? argv[2] : NULL, NULL, argc > 2 ? FI_SOURCE : 0,
                                hints, &info));

    struct fid_fabric *fabric;
    struct regions regions = {0};
    ok("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
    ok("fi_domain", fi_domain(fabric, info, &regions.domain, NULL));

    pinpool_registrar_t registrar = {.context = &regions, .name = info->domain_attr->name,
                                     .register_memory = register_memory,
                                     .deregister_memory = deregister_memory};
    pinpool_options_t options;
    pinpool_options_init(&options);
    options.registrar = &registrar;
    options.capacity = 32 << 20;
    options.arena_size = 16 << 20;
    pinpool_t *pool;
    pool_ok("pinpool_open", pinpool_open(&options, &pool));

    struct side a = open_side(regions.domain, info), b = open_side(regions.domain, info);
    meet(&a, &b);
    meet(&b, &a);
    uint64_t bytes = 0;
    unsigned messages = 0;
    for (unsigned i = 0; i < ROUNDS; i++) {
        size_t len = (size_t)4096 << (i % 9);
        message(i % 2 ? &a : &b, i % 2 ? &b : &a, &regions, pool, len, i);
        bytes += len;
        messages++;
    }

    pinpool_stats_t stats = {.size = sizeof stats};
    pool_ok("pinpool_stats", pinpool_stats(pool, &stats));
    printf("%s on %s: %u messages, %" PRIu64 " bytes; %zu arenas, %u registrations\n",
           info->fabric_attr->prov_name, info->domain_attr->name, messages, bytes, stats.arenas, regions.calls);
    if (regions.calls != stats.arenas || stats.live != 0) fail("the count of registrations", "not that of arenas");

    close_side(&a);
    close_side(&b);
    pool_ok("pinpool_close", pinpool_close(pool));
    ok("fi_close", fi_close(&regions.domain->fid));
    ok("fi_close", fi_close(&fabric->fid));
    fi_freeinfo(info);
    fi_freeinfo(hints);
    return 0;
}
