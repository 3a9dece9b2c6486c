/* SPDX-License-Identifier: Apache-2.0
 *
 * HIXL as plain C: what the shim (hixl_shim.cpp, a shared object of its own) offers to the transport hixl. Status codes
 * are HIXL's own, 0 is success. No exception crosses this interface, and no string but as characters.
 *
 * Every function is called in the thread that made the engine and set its device.
 */
#ifndef AIODATADIST_HIXL_API_H
#define AIODATADIST_HIXL_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ADT_HIXL_API_VERSION 1u
#define ADT_HIXL_ENTRY "adt_hixl_shim"

/* Codes of HIXL that the transport tells apart. */
enum {
    ADT_HIXL_SUCCESS = 0,
    ADT_HIXL_PARAM_INVALID = 103900,
    ADT_HIXL_TIMEOUT = 103901,
    ADT_HIXL_NOT_CONNECTED = 103902,
    ADT_HIXL_ALREADY_CONNECTED = 103903,
    ADT_HIXL_NOTIFY_FAILED = 103904,
    ADT_HIXL_UNSUPPORTED = 103905,
    ADT_HIXL_RESOURCE_EXHAUSTED = 203900,
    ADT_HIXL_FAILED = 503900
};
enum { ADT_HIXL_MEM_DEVICE = 0, ADT_HIXL_MEM_HOST = 1 };
enum { ADT_HIXL_READ = 0, ADT_HIXL_WRITE = 1 };
enum { ADT_HIXL_WAITING = 0, ADT_HIXL_COMPLETED = 1, ADT_HIXL_TIMED_OUT = 2, ADT_HIXL_BROKEN = 3 };
enum {
    ADT_HIXL_NOT_CONNECT = 0,
    ADT_HIXL_CONNECT_PENDING = 1,
    ADT_HIXL_CONNECTING = 2,
    ADT_HIXL_CONNECTED = 3,
    ADT_HIXL_CONNECT_FAILED = 4,
    ADT_HIXL_DISCONNECT_PENDING = 5,
    ADT_HIXL_DISCONNECTING = 6
};

/* One piece of a transfer; HIXL's TransferOpDesc. */
typedef struct adt_hixl_piece {
    uintptr_t local;
    uintptr_t remote;
    size_t length;
} adt_hixl_piece_t;

typedef void (*adt_hixl_result_t)(void *context, void *request, const void *user_data, int32_t status);

typedef struct adt_hixl_api {
    uint32_t version; /* ADT_HIXL_API_VERSION */
    uint32_t struct_size;

    void *(*create)(void); /* null: no memory */
    void (*destroy)(void *engine);
    uint32_t (*initialize)(void *engine, const char *local_engine, const char *const *names, const char *const *values,
                           size_t count);
    void (*finalize)(void *engine);
    uint32_t (*register_mem)(void *engine, uintptr_t address, size_t bytes, int32_t type, void **handle);
    uint32_t (*deregister_mem)(void *engine, void *handle);
    uint32_t (*connect)(void *engine, const char *remote_engine, int32_t timeout_ms);    /* asynchronous */
    uint32_t (*disconnect)(void *engine, const char *remote_engine, int32_t timeout_ms); /* likewise */
    uint32_t (*connection)(void *engine, const char *remote_engine, int32_t *state);
    uint32_t (*transfer)(void *engine, const char *remote_engine, int32_t opcode, const adt_hixl_piece_t *pieces,
                         size_t count, const void *user_data, void **request);
    uint32_t (*query)(void *engine, void *request, int32_t *status);
    /* Calls `result` for each request that is not waiting any more. ADT_HIXL_UNSUPPORTED: some engines cannot. */
    uint32_t (*query_all)(void *engine, adt_hixl_result_t result, void *context);
} adt_hixl_api_t;

/* The one symbol of the shim. */
typedef const adt_hixl_api_t *(*adt_hixl_entry_t)(void);

#ifdef __cplusplus
}
#endif
#endif
