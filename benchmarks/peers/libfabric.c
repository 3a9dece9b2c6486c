// Reads and writes of blocks by libfabric's remote memory access, for peer_libfabric.py, which loads this by ctypes.
//
// Functions return 0 or nanoseconds, or a negative error of libfabric.

#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

enum { WINDOW = 128, MOST_IOVECS = 16, LOOKS = 256 };

struct node {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *addresses;
    struct fid_cq *completions;
    struct fid_ep *endpoint;
    struct fid_mr *region;
    uint8_t *memory;
    fi_addr_t peer;
    uint64_t peer_key;
    uint64_t peer_base;
    size_t iovecs;                        // blocks of one operation
    size_t window;                        // operations under way at most
    struct fi_context2 contexts[WINDOW];  // of operations; some providers keep state there
    struct fi_context2 *spare[WINDOW];
    size_t spares;
};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static int get_info(struct node *node, const char *provider, const char *host) {
    struct fi_info *hints = fi_allocinfo();
    if (hints == NULL) return -FI_ENOMEM;
    hints->caps = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = strdup(provider);
    int failed = fi_getinfo(FI_VERSION(1, 9), host, NULL, host != NULL ? FI_SOURCE : 0, hints, &node->info);
    fi_freeinfo(hints);
    return failed;
}

static int open_all(struct node *node, size_t nbytes) {
    struct fi_info *info = node->info;
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 2};
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_CONTEXT, .size = 2 * WINDOW, .wait_obj = FI_WAIT_NONE};
    const uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    int failed = fi_fabric(info->fabric_attr, &node->fabric, NULL);
    if (!failed) failed = fi_domain(node->fabric, info, &node->domain, NULL);
    if (!failed) failed = fi_av_open(node->domain, &av, &node->addresses, NULL);
    if (!failed) failed = fi_cq_open(node->domain, &cq, &node->completions, NULL);
    if (!failed) failed = fi_endpoint(node->domain, info, &node->endpoint, NULL);
    if (!failed) failed = fi_ep_bind(node->endpoint, &node->addresses->fid, 0);
    if (!failed) failed = fi_ep_bind(node->endpoint, &node->completions->fid, FI_TRANSMIT | FI_RECV);
    if (!failed) failed = fi_enable(node->endpoint);
    if (!failed) failed = fi_mr_reg(node->domain, node->memory, nbytes, access, 0, 1, 0, &node->region, NULL);
    return failed;
}

// Opens `provider` and registers the memory. NULL: *failed says why.
struct node *node_open(const char *provider, const char *host, void *memory, size_t nbytes, int *failed) {
    struct node *node = calloc(1, sizeof *node);
    if (node == NULL) {
        *failed = -FI_ENOMEM;
        return NULL;
    }
    node->memory = memory;
    *failed = get_info(node, provider, host);
    if (!*failed) *failed = open_all(node, nbytes);
    // On failure the process ends: nothing is taken down.
    if (*failed) return NULL;
    node->iovecs = least(least(node->info->tx_attr->iov_limit, node->info->tx_attr->rma_iov_limit), MOST_IOVECS);
    node->window = least(node->info->tx_attr->size, WINDOW);
    for (; node->spares < node->window; node->spares++) node->spare[node->spares] = &node->contexts[node->spares];
    return node;
}

// What the other process must know: the address, the key of the memory, and where it begins for reads and writes.
int node_name(struct node *node, void *name, size_t *length, uint64_t *key, uint64_t *base) {
    *key = fi_mr_key(node->region);
    *base = node->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)node->memory : 0;
    return fi_getname(&node->endpoint->fid, name, length);
}

const char *node_provider(struct node *node) {
    return node->info->fabric_attr->prov_name;
}

size_t node_iovecs(struct node *node) {
    return node->iovecs;
}

int node_meet(struct node *node, const void *name, uint64_t key, uint64_t base) {
    node->peer_key = key;
    node->peer_base = base;
    return fi_av_insert(node->addresses, name, 1, &node->peer, 0, NULL) == 1 ? 0 : -FI_EADDRNOTAVAIL;
}

// Takes what has completed, and lets the provider work.
static int look(struct node *node) {
    struct fi_cq_entry done[WINDOW];
    ssize_t count = fi_cq_read(node->completions, done, WINDOW);
    if (count == -FI_EAGAIN) return 0;
    if (count == -FI_EAVAIL) {
        struct fi_cq_err_entry error = {0};
        fi_cq_readerr(node->completions, &error, 0);
        return error.err ? -error.err : -FI_EIO;
    }
    if (count < 0) return (int)count;
    for (ssize_t i = 0; i < count; i++) {
        if (done[i].op_context != NULL) node->spare[node->spares++] = done[i].op_context;
    }
    return 0;
}

static int post(struct node *node, const int64_t *here, const int64_t *there, size_t count, size_t block, int write) {
    struct iovec local[MOST_IOVECS];
    struct fi_rma_iov remote[MOST_IOVECS];
    void *descriptors[MOST_IOVECS];
    for (size_t i = 0; i < count; i++) {
        local[i] = (struct iovec){node->memory + (size_t)here[i] * block, block};
        remote[i] = (struct fi_rma_iov){node->peer_base + (uint64_t)there[i] * block, block, node->peer_key};
        descriptors[i] = fi_mr_desc(node->region);
    }
    struct fi_msg_rma message = {.msg_iov = local,
                                 .desc = descriptors,
                                 .iov_count = count,
                                 .addr = node->peer,
                                 .rma_iov = remote,
                                 .rma_iov_count = count};
    for (;;) {
        if (node->spares > 0) {
            message.context = node->spare[node->spares - 1];
            // A write has ended when its bytes are in the memory of the other process.
            ssize_t failed = write ? fi_writemsg(node->endpoint, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE)
                                   : fi_readmsg(node->endpoint, &message, FI_COMPLETION);
            if (failed != -FI_EAGAIN) {
                if (!failed) node->spares--;
                return (int)failed;
            }
        }
        int failed = look(node);
        if (failed) return failed;
    }
}

// Moves blocks, as many at a time as the provider takes; returns nanoseconds.
int64_t node_move(struct node *node, const int64_t *here, const int64_t *there, size_t count, size_t block, int write) {
    int64_t began = now();
    int failed = 0;
    for (size_t at = 0; at < count && !failed; at += node->iovecs) {
        failed = post(node, here + at, there + at, least(node->iovecs, count - at), block, write);
    }
    while (!failed && node->spares < node->window) failed = look(node);
    return failed ? failed : now() - began;
}

// Moves blocks one by one; `took` gets the nanoseconds of each.
int node_each(struct node *node, const int64_t *here, const int64_t *there, size_t count, size_t block, int write,
              int64_t *took) {
    for (size_t i = 0; i < count; i++) {
        took[i] = node_move(node, here + i, there + i, 1, block, write);
        if (took[i] < 0) return (int)took[i];
    }
    return 0;
}

// Lets the provider work until there is something to read from `line`.
int node_serve(struct node *node, int line) {
    struct pollfd asked = {.fd = line, .events = POLLIN};
    while (poll(&asked, 1, 0) == 0) {
        for (int i = 0; i < LOOKS; i++) {
            int failed = look(node);
            if (failed) return failed;
        }
    }
    return 0;
}

const char *error_text(int failed) {
    return fi_strerror(-failed);
}

uint32_t library_version(void) {
    return fi_version();
}
