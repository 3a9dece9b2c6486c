/* SPDX-License-Identifier: Apache-2.0
 *
 * The one C contract between the aiodatadist engine and a transport.
 *
 * The engine expands a transfer into batches of chunks and decides order, deadlines and cancelling. A
 * transport moves the bytes of a batch and says when it no longer touches their memory. The contract fits
 * transports with a queue pair (post a batch, poll a completion queue, arm an event fd), transports that
 * copy in threads of their own (they call `notify`), and transports that can only be polled.
 *
 * Rules for every transport
 *   Units        Sizes and offsets are bytes; times are nanoseconds of the host's clock.
 *   Quiet        A batch's completion is the promise that its local memory is never touched again and, for
 *                a write that completed with ADT_OK, that its bytes are visible to the owner (fence
 *                instructions included).
 *   Ownership    A posted batch, its chunks and the memory they name stay valid until the completion is
 *                polled. Handles belong to the transport from the call that returned them until the call
 *                that takes them back. File descriptors passed in belong to the transport from then on,
 *                whatever the call returns, unless stated otherwise.
 *   Threads      `post` and `execute` may be called with the engine's lock held, so they take leaf locks only,
 *                never block on a socket and never call the host. Every other function is called without
 *                that lock. All functions may be called from any thread.
 *   Exceptions   None crosses this interface: a C++ transport stops them in each entry point.
 *   Unsupported  A table has no null pointer: what a transport cannot do points at adt_unsupported_*.
 */
#ifndef AIODATADIST_TRANSPORT_H
#define AIODATADIST_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ADT_ABI_VERSION 1u

/* Status codes. 0 is done, positive is in progress, negative failed. errors.py maps each to a class. */
typedef int32_t adt_status_t;
enum {
    ADT_OK = 0,
    ADT_PENDING = 1,
    ADT_ERR_INVALID = -1,    /* an argument breaks the contract */
    ADT_ERR_NOT_FOUND = -2,  /* unknown or closed cache */
    ADT_ERR_BOUNDS = -3,     /* an index or a byte range lies outside its cache */
    ADT_ERR_PERMISSION = -4, /* the owner does not allow this access, or the kernel refuses it */
    ADT_ERR_GEOMETRY = -5,   /* the two sides disagree on sizes */
    ADT_ERR_CANCELLED = -6,
    ADT_ERR_TIMEOUT = -7,   /* the operation's deadline */
    ADT_ERR_PEER_LOST = -8, /* the peer died, fell silent or closed the link */
    ADT_ERR_ABORTED = -9,   /* ended by force before it drained */
    ADT_ERR_CLOSED = -10,   /* a local object is closed, or the process is a forked child */
    ADT_ERR_UNSUPPORTED = -11,
    ADT_ERR_NO_MEMORY = -12,
    ADT_ERR_IO = -13,
    ADT_ERR_PROTOCOL = -14, /* the peer broke the wire format */
    ADT_ERR_FENCED = -15,   /* the owner fenced off this and earlier operations */
    ADT_ERR_BUSY = -16,
    ADT_ERR_AGAIN = -17, /* the queue is full: poll, then post the rest */
    ADT_ERR_INTERNAL = -18,
    ADT_ERR_NOT_MAPPED = -19, /* an address is not mapped */
    ADT_ERR_LAYER = -20,      /* a layer that the operation waited for has failed */
    ADT_ERR_WORK = -100       /* minus an ibv_wc_status: a work request of verbs completed with that status */
};

/* Says that a layer of a model has been computed, so that transfers which wait for it may read its memory: what a C,
   C++ or device-runtime callback (cudaLaunchHostFunc, aclrtLaunchCallback) is given together with its context. Callable
   once, from any thread, without Python's lock; it posts the layer itself and takes microseconds. A further call does
   nothing. */
typedef void (*adt_layer_signal_t)(void *context);

typedef enum adt_opcode {
    ADT_READ = 1, /* remote memory to local memory (pull) */
    ADT_WRITE = 2 /* local memory to remote memory (push) */
} adt_opcode_t;

enum { ADT_REMOTE_READ = 1u, ADT_REMOTE_WRITE = 2u }; /* access that peers have to registered memory */

typedef struct adt_transport *adt_transport_h; /* one open transport of one engine */
typedef struct adt_endpoint *adt_endpoint_h;   /* one transport's side of one link */
typedef struct adt_mem *adt_mem_h;             /* one registered cache */
typedef struct adt_remote *adt_remote_h;       /* one imported cache of a peer */
typedef struct adt_hixl *adt_hixl_h;           /* the open HIXL engine of a node */

/* Where memory lies. Device memory is an NPU's: neither the host nor the kernel on its behalf may touch its addresses.
   Only transports with ADT_TRANSPORT_DEVICE reach it; the others refuse it with ADT_ERR_UNSUPPORTED. */
enum { ADT_PLACEMENT_HOST = 0u, ADT_PLACEMENT_DEVICE = 1u };

/* Geometry of a cache: num_tensors tensors, each num_blocks blocks of block_bytes, block_stride apart. */
typedef struct adt_geometry {
    uint32_t num_tensors;
    uint32_t reserved;
    uint64_t num_blocks;
    uint64_t block_bytes;
    uint64_t block_stride;
} adt_geometry_t;

/* Which device a node uses for RDMA, and how. */
typedef struct adt_rdma {
    const char *device;    /* name, or name:port */
    int32_t gid_index;     /* -1: chosen, RoCE v2 over IPv4 first */
    uint8_t traffic_class; /* of RoCE packets: DSCP times 4 */
    uint8_t service_level;
    uint8_t timeout;     /* 4.096 us times 2 to this without an acknowledgement, then once more */
    uint8_t retry_count; /* times, then the request has failed */
} adt_rdma_t;

/* Memory of a cache to register. `region` says where library memory lies; region_id 0 is any other memory. */
typedef struct adt_memory {
    uint64_t cache_id;
    adt_geometry_t geometry;
    void *const *tensors; /* [num_tensors] base addresses, owned by the caller until dereg_mem */
    uint32_t access;      /* ADT_REMOTE_* */
    uint32_t placement;   /* ADT_PLACEMENT_* */
    uint64_t region_id;   /* memfd region that holds every tensor, or 0 */
    const void *region_base;
    uint64_t region_bytes;
    const adt_rdma_t *rdma; /* of the node, or null; valid for the call */
    adt_hixl_h hixl;        /* of the node, or null */
} adt_memory_t;

/* What a peer needs to reach a cache: opaque bytes, and a descriptor to pass beside them (-1: none). */
typedef struct adt_key {
    const void *data;
    size_t size;
    int fd;
} adt_key_t;

/* How an imported cache is reached: the limits that the engine keeps when it builds batches. */
typedef struct adt_path {
    const char *name; /* "shm-mapped", "shm-process_vm", "tcp", "verbs", "hixl", "local", static storage */
    uint64_t max_batch_bytes;
    uint32_t max_batch_chunks;
    uint32_t can_execute; /* 1: `execute` works and takes microseconds for a small batch */
} adt_path_t;

/* One piece: `length` bytes at `local`, and at `remote_offset` from the start of the peer's tensor. */
typedef struct adt_chunk {
    void *local;
    uint64_t remote_offset;
    uint32_t remote_tensor;
    uint32_t length;
} adt_chunk_t;

typedef struct adt_batch {
    adt_opcode_t opcode;
    uint32_t count;
    const adt_chunk_t *chunks;
    uint64_t bytes; /* sum of the lengths */
    adt_endpoint_h endpoint;
    adt_mem_h local_mem;
    adt_remote_h remote;
    uint64_t op_id;
    uint32_t epoch;      /* the last fence of the owner that the operation had seen when it started */
    uint32_t loop_waits; /* 1: short, and the loop's thread may receive the answer (loop_fd) */
    int32_t model_cpu;   /* the processor of a model that computes meanwhile, to be left to it; -1: none */
} adt_batch_t;

#define ADT_SHORT_DEPTH 16 /* batches of short operations that an endpoint has posted at most: see loop_fd */

typedef struct adt_completion {
    adt_batch_t *batch;
    adt_status_t status;
    uint32_t detached; /* 1: the local memory is quiet but the batch is still on the wire; a second
                          completion with 0 follows and retires it */
} adt_completion_t;

/* A peer's request for local memory, on transports where the owner serves it. */
typedef struct adt_request {
    adt_opcode_t opcode; /* as the initiator sees it: ADT_READ reads this side's memory */
    uint32_t count;
    adt_chunk_t *chunks; /* remote_* name this side's cache; begin_serve fills `local` */
    uint64_t bytes;
    uint64_t cache_id;
    uint64_t op_id;
    uint32_t epoch;
    uint32_t reserved;
} adt_request_t;

/* What the two ends of an endpoint tell each other over the link's engine connection. */
typedef struct adt_message {
    uint8_t kind; /* the transport's own; all that a link has hear it, and ignore what is another's */
    uint8_t reserved;
    uint16_t small;
    int32_t number;
    uint64_t a;
    uint64_t b;
    uint64_t c;
} adt_message_t;

/* What the engine offers to a transport. Callable from any thread that holds none of the engine's locks. */
typedef struct adt_host {
    void *ctx;
    /* Completions wait to be polled. The host may poll from inside this call. */
    void (*notify)(void *ctx, adt_transport_h transport);
    uint64_t (*now_ns)(void *ctx);
    /* Checks cache, permission, bounds and fences, and pins the memory until end_serve(token). */
    adt_status_t (*begin_serve)(void *ctx, void *link, adt_request_t *request, void **token);
    void (*end_serve)(void *ctx, void *token);
    /* The endpoint's wires broke; the host disconnects it. */
    void (*endpoint_lost)(void *ctx, void *link, adt_status_t status, const char *reason);
    /* Of transports with ADT_TRANSPORT_SETTLES, once: the endpoint moves bytes, or never will, and why. */
    void (*endpoint_settled)(void *ctx, void *link, adt_transport_h transport, adt_status_t status, const char *reason);
    /* After `disconnect` returned ADT_PENDING: the peer cannot touch this side's memory by this endpoint any more. */
    void (*endpoint_gone)(void *ctx, void *link);
    /* After `dereg_mem` returned ADT_PENDING: the registration is gone. */
    void (*mem_gone)(void *ctx, void *token);
    /* Sends to the endpoint at the other end of the link, in order; dropped when the link is over. */
    void (*tell)(void *ctx, void *link, const adt_message_t *message);
} adt_host_t;

typedef struct adt_open_params {
    uint32_t struct_size;
    uint32_t threads;       /* 0: step mode, `poll` does the work */
    const adt_host_t *host; /* outlives the transport */
    void *network;          /* the simulated network of an engine in step mode, or null; outlives the transport */
    uint64_t place;         /* where this engine is there */
} adt_open_params_t;

typedef struct adt_connect_params {
    uint32_t struct_size;
    uint32_t num_fds;
    const int *fds;          /* authenticated data connections, taken over; of three or more the last two are
                                for short requests, first those of the side that dialed, then the other's */
    void *link;              /* the host's name for this link, given back in begin_serve */
    int32_t peer_pid;        /* same-host peers only, else 0 */
    int peer_pidfd;          /* borrowed for the call, or -1 */
    uint32_t process_vm;     /* 1: process_vm_readv/writev on peer_pid was probed and works */
    uint32_t dialed;         /* 1: this side opened the connections */
    uint64_t populate_bytes; /* how much of this peer's memory to map ahead of its first use */
    int wire;                /* the link's engine connection, borrowed for the call */
    const adt_rdma_t *rdma;  /* of the node, or null; valid for the call */
    adt_hixl_h hixl;         /* of the node, or null */
} adt_connect_params_t;

typedef struct adt_probe {
    int usable;
    char reason[256]; /* why not, or what was found */
} adt_probe_t;

enum {
    ADT_TRANSPORT_SHARED_QUEUE = 1u, /* all endpoints share one queue: the engine bounds and rotates across them */
    ADT_TRANSPORT_PEER_TOUCHES = 2u, /* peers touch this side's memory themselves: quiet needs their word */
    ADT_TRANSPORT_PINS = 4u,         /* registering pins memory: only for nodes that use this transport */
    ADT_TRANSPORT_SETTLES = 8u,      /* an endpoint is of use when host->endpoint_settled said so */
    ADT_TRANSPORT_DEVICE = 16u       /* reaches device memory */
};

typedef struct adt_transport_ops {
    uint32_t abi_version; /* ADT_ABI_VERSION */
    uint32_t struct_size;
    const char *name;
    uint32_t flags;       /* ADT_TRANSPORT_* */
    uint32_t queue_depth; /* batches posted at most, per endpoint or (SHARED_QUEUE) in all; a transport that has a
                             loop_fd is given up to ADT_SHORT_DEPTH short ones on top */

    void (*probe)(adt_probe_t *out);
    adt_status_t (*open)(const adt_open_params_t *params, adt_transport_h *out);
    void (*close)(adt_transport_h transport); /* joins its threads; every endpoint is disconnected before */

    /* ADT_ERR_UNSUPPORTED from a transport that reaches devices: host memory that others are to serve. */
    adt_status_t (*reg_mem)(adt_transport_h transport, const adt_memory_t *memory, adt_mem_h *out);
    /* ADT_OK: gone. ADT_PENDING: host->mem_gone(token) follows. Nothing finds the registration any more either way. */
    adt_status_t (*dereg_mem)(adt_transport_h transport, adt_mem_h mem, void *token);
    /* Writes at most `capacity` bytes; `*size` is what the key needs. ADT_ERR_UNSUPPORTED: it is served no more. */
    adt_status_t (*export_key)(adt_transport_h transport, adt_mem_h mem, void *buffer, size_t capacity, size_t *size);
    /* `key->fd` is borrowed for the call. */
    adt_status_t (*import_key)(adt_transport_h transport, adt_endpoint_h endpoint, uint64_t cache_id,
                               const adt_geometry_t *geometry, const adt_key_t *key, adt_remote_h *out,
                               adt_path_t *path);
    void (*release_key)(adt_transport_h transport, adt_remote_h remote);
    /* Reaches registered memory of this process as if it were a peer's, for reading: copies between local caches.
       No endpoint is involved. `mem` is borrowed for the call, its memory until release_key; batches that use it have
       no endpoint. */
    adt_status_t (*import_local)(adt_transport_h transport, adt_mem_h mem, const adt_geometry_t *geometry,
                                 adt_remote_h *out, adt_path_t *path);

    adt_status_t (*connect)(adt_transport_h transport, const adt_connect_params_t *params, adt_endpoint_h *out);
    /* Every batch still posted completes (aborted where needed) before or soon after; serving has ended when
       this returns ADT_OK, or, after ADT_PENDING, when host->endpoint_gone is called. The endpoint is freed by the
       transport once its last batch was polled. */
    adt_status_t (*disconnect)(adt_transport_h transport, adt_endpoint_h endpoint);
    /* The other end has called host->tell. */
    void (*hear)(adt_transport_h transport, adt_endpoint_h endpoint, const adt_message_t *message);

    /* Posts batches in order; `*posted` says how many were taken. ADT_ERR_AGAIN: the queue is full. */
    adt_status_t (*post)(adt_transport_h transport, adt_batch_t *const *batches, size_t count, size_t *posted);
    /* Moves one small batch in the calling thread. ADT_OK or an error; never pending. */
    adt_status_t (*execute)(adt_transport_h transport, const adt_batch_t *batch);
    size_t (*poll)(adt_transport_h transport, adt_completion_t *out, size_t capacity);
    /* A descriptor that turns readable when a completion comes after `arm`; -1 where `notify` is used instead. */
    int (*event_fd)(adt_transport_h transport);
    /* ADT_OK: armed. ADT_ERR_AGAIN: completions are waiting, poll first. */
    adt_status_t (*arm)(adt_transport_h transport);

    /* A descriptor on which the host's loop may wait for the answers of short requests (-1: none; owned by the
       transport, duplicate it to keep it), and the call that takes them: ADT_OK, or ADT_ERR_CLOSED when the
       descriptor is of no more use. `take_over` has the transport's own threads receive what is still due there,
       because the loop may be busy. */
    int (*loop_fd)(adt_transport_h transport, adt_endpoint_h endpoint);
    adt_status_t (*loop_progress)(adt_transport_h transport, adt_endpoint_h endpoint);
    void (*take_over)(adt_transport_h transport, adt_endpoint_h endpoint);

    /* Detaches the posted batches of one operation from local memory at once: each completes, detached where
       its wire is still busy. ADT_ERR_UNSUPPORTED: wait for the completions. */
    adt_status_t (*cancel)(adt_transport_h transport, adt_endpoint_h endpoint, uint64_t op_id);
    /* Detaches what is being served to this peer from local memory (cache_id 0: all caches) at once. What is older than
       `epoch` is refused from now on. ADT_ERR_AGAIN: the peer may still touch it, call again. */
    adt_status_t (*revoke)(adt_transport_h transport, adt_endpoint_h endpoint, uint64_t cache_id, uint32_t epoch);

    /* The newest error text of this transport. */
    void (*last_error)(adt_transport_h transport, char *buffer, size_t capacity);
} adt_transport_ops_t;

/* Shared stubs for what a transport cannot do. */
adt_status_t adt_unsupported_import_local(adt_transport_h, adt_mem_h, const adt_geometry_t *, adt_remote_h *,
                                          adt_path_t *);
adt_status_t adt_unsupported_execute(adt_transport_h, const adt_batch_t *);
adt_status_t adt_unsupported_cancel(adt_transport_h, adt_endpoint_h, uint64_t);
adt_status_t adt_unsupported_revoke(adt_transport_h, adt_endpoint_h, uint64_t, uint32_t);
void adt_no_hear(adt_transport_h, adt_endpoint_h, const adt_message_t *);
int adt_no_event_fd(adt_transport_h);
adt_status_t adt_always_armed(adt_transport_h);
int adt_no_loop_fd(adt_transport_h, adt_endpoint_h);
adt_status_t adt_no_loop_progress(adt_transport_h, adt_endpoint_h);
void adt_no_take_over(adt_transport_h, adt_endpoint_h);

#ifdef __cplusplus
}
#endif
#endif
