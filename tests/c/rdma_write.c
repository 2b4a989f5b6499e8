/*
 * A buffer of the pool is written to by RDMA, from another buffer of the pool, through two connected queue
 * pairs on one verbs device; once with a PD of the caller's lent to the pool, once with the pool's own.
 *
 * - every byte arrives, and no byte beside the buffer changes
 * - the rkey of a pool without remote rights is not given, and its lkey does not let a peer write
 * - after pinpool_close the caller's PD can be freed: nothing of the pool is left on it
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "pinpool.h"

#include "check.h"

enum { PORT = 1, GID = 1, LEN = 100000 };

struct pair {
    struct ibv_cq *cq;
    struct ibv_qp *qp[2];
};

static struct pair connect_pair(struct ibv_context *context, struct ibv_pd *pd) {
    struct pair p;
    union ibv_gid gid;
    CHECK(ibv_query_gid(context, PORT, GID, &gid) == 0);
    p.cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    CHECK(p.cq != NULL);
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr init = {.send_cq = p.cq, .recv_cq = p.cq, .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1,
                                                .max_recv_sge = 1}};
        p.qp[i] = ibv_create_qp(pd, &init);
        CHECK(p.qp[i] != NULL);
    }
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr a;
        memset(&a, 0, sizeof a);
        a.qp_state = IBV_QPS_INIT;
        a.port_num = PORT;
        a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
        CHECK(ibv_modify_qp(p.qp[i], &a,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
        a.qp_state = IBV_QPS_RTR;
        a.path_mtu = IBV_MTU_1024;
        a.dest_qp_num = p.qp[1 - i]->qp_num;
        a.max_dest_rd_atomic = 1;
        a.min_rnr_timer = 12;
        a.ah_attr.is_global = 1;
        a.ah_attr.grh.dgid = gid;
        a.ah_attr.grh.sgid_index = GID;
        a.ah_attr.grh.hop_limit = 1;
        a.ah_attr.port_num = PORT;
        CHECK(ibv_modify_qp(p.qp[i], &a,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
        a.qp_state = IBV_QPS_RTS;
        a.timeout = 14;
        a.retry_cnt = 7;
        a.rnr_retry = 7;
        a.max_rd_atomic = 1;
        CHECK(ibv_modify_qp(p.qp[i], &a,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
    }
    return p;
}

static void disconnect(struct pair *p) {
    for (int i = 0; i < 2; i++) CHECK(ibv_destroy_qp(p->qp[i]) == 0);
    CHECK(ibv_destroy_cq(p->cq) == 0);
}

static enum ibv_wc_status write_to(struct pair *p, const pinpool_buf_t *from, uint64_t to, uint32_t rkey) {
    struct ibv_sge sge = {.addr = (uintptr_t)from->addr, .length = (uint32_t)from->len, .lkey = from->lkey};
    struct ibv_send_wr wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;
    wr.wr.rdma.remote_addr = to;
    wr.wr.rdma.rkey = rkey;
    CHECK(ibv_post_send(p->qp[0], &wr, &bad) == 0);
    struct ibv_wc wc;
    time_t end = time(NULL) + 30;
    int n;
    while ((n = ibv_poll_cq(p->cq, 1, &wc)) == 0) CHECK(time(NULL) < end);
    CHECK(n == 1 && wc.wr_id == 7);
    return wc.status;
}

static void round_trip(struct ibv_context *context, struct ibv_pd *pd, pinpool_t *pool) {
    struct pair p = connect_pair(context, pd);
    pinpool_buf_t from, to;
    ANSWERS(pinpool_alloc(pool, LEN, &from), PINPOOL_OK);
    ANSWERS(pinpool_alloc(pool, 3 * LEN, &to), PINPOOL_OK);
    CHECK(to.has_rkey);
    for (int i = 0; i < LEN; i++) ((unsigned char *)from.addr)[i] = (unsigned char)(i * 7 + i / 251);
    memset(to.addr, 0xee, to.len);
    CHECK(write_to(&p, &from, (uintptr_t)to.addr + LEN, to.rkey) == IBV_WC_SUCCESS);
    const unsigned char *got = to.addr;
    for (int i = 0; i < LEN; i++) CHECK(got[i] == 0xee && got[2 * LEN + i] == 0xee);
    CHECK(memcmp(got + LEN, from.addr, LEN) == 0);
    ANSWERS(pinpool_free(pool, from.addr), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, to.addr), PINPOOL_OK);
    disconnect(&p);
}

static void refused(struct ibv_context *context, struct ibv_pd *pd, pinpool_t *pool) {
    struct pair p = connect_pair(context, pd);
    pinpool_buf_t from, to;
    ANSWERS(pinpool_alloc(pool, 4096, &from), PINPOOL_OK);
    ANSWERS(pinpool_alloc(pool, 4096, &to), PINPOOL_OK);
    CHECK(!to.has_rkey && to.rkey == 0);
    memset(from.addr, 1, 4096);
    memset(to.addr, 2, 4096);
    CHECK(write_to(&p, &from, (uintptr_t)to.addr, to.lkey) == IBV_WC_REM_ACCESS_ERR);
    for (int i = 0; i < 4096; i++) CHECK(((char *)to.addr)[i] == 2);
    disconnect(&p);
    ANSWERS(pinpool_free(pool, from.addr), PINPOOL_OK);
    ANSWERS(pinpool_free(pool, to.addr), PINPOOL_OK);
}

int main(void) {
    int n = 0;
    struct ibv_device **list = ibv_get_device_list(&n);
    if (list == NULL || n == 0) {
        fprintf(stderr, "this test needs an RDMA device; run it through ./rxe-setup.sh\n");
        return 1;
    }
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context != NULL);
    pinpool_options_t o;
    pinpool_options_init(&o);
    o.capacity = 16 << 20;
    pinpool_t *pool;

    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd != NULL);
    o.pd = pd;
    o.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    CHECK(pinpool_pd(pool) == pd);
    round_trip(context, pd, pool);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
    o.access = IBV_ACCESS_LOCAL_WRITE;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    refused(context, pd, pool);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);
    CHECK(ibv_dealloc_pd(pd) == 0);

    o.pd = NULL;
    o.device = ibv_get_device_name(list[0]);
    o.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    ANSWERS(pinpool_open(&o, &pool), PINPOOL_OK);
    struct ibv_pd *own = pinpool_pd(pool);
    CHECK(own != NULL);
    round_trip(own->context, own, pool);
    pinpool_stats_t s = {.size = sizeof s};
    ANSWERS(pinpool_stats(pool, &s), PINPOOL_OK);
    CHECK(s.register_calls == 1 && s.arenas == 1 && s.pinned >= 16 << 20);
    ANSWERS(pinpool_close(pool), PINPOOL_OK);

    CHECK(ibv_close_device(context) == 0);
    ibv_free_device_list(list);
    printf("rdma_write: %d bytes arrived, twice; a key without the right was refused\n", LEN);
    return 0;
}
