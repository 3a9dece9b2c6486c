// SPDX-License-Identifier: Apache-2.0
// What there is of verbs in every build, and what stands in its place in one without it.
#include <cstdio>
#include <cstring>

#include "transports.hpp"
#include "verbs_stats.hpp"

namespace adt {

VerbsStats &verbs_stats() {
    static VerbsStats *const instance = new VerbsStats;
    return *instance;
}

VerbsLimits &verbs_limits() {
    static VerbsLimits *const instance = new VerbsLimits;
    return *instance;
}

#ifndef AIODATADIST_VERBS
namespace {

constexpr const char *kAbsent =
    "built without verbs: build again where the headers of rdma-core are (Debian: libibverbs-dev)";

void probe(adt_probe_t *out) {
    out->usable = 0;
    std::snprintf(out->reason, sizeof(out->reason), "%s", kAbsent);
}

adt_status_t open_nothing(const adt_open_params_t *, adt_transport_h *out) {
    static char nothing;
    *out = reinterpret_cast<adt_transport_h>(&nothing);
    return ADT_OK;
}
void close_nothing(adt_transport_h) {}

adt_status_t reg_mem(adt_transport_h, const adt_memory_t *, adt_mem_h *) {
    return ADT_ERR_UNSUPPORTED;
}
adt_status_t dereg_mem(adt_transport_h, adt_mem_h, void *) {
    return ADT_OK;
}
adt_status_t export_key(adt_transport_h, adt_mem_h, void *, size_t, size_t *) {
    return ADT_ERR_UNSUPPORTED;
}
adt_status_t import_key(adt_transport_h, adt_endpoint_h, uint64_t, const adt_geometry_t *, const adt_key_t *,
                        adt_remote_h *, adt_path_t *) {
    return ADT_ERR_UNSUPPORTED;
}
void release_key(adt_transport_h, adt_remote_h) {}
adt_status_t connect_nothing(adt_transport_h, const adt_connect_params_t *, adt_endpoint_h *) {
    return ADT_ERR_UNSUPPORTED;
}
adt_status_t disconnect_nothing(adt_transport_h, adt_endpoint_h) {
    return ADT_OK;
}
adt_status_t post(adt_transport_h, adt_batch_t *const *, size_t, size_t *posted) {
    *posted = 0;
    return ADT_ERR_UNSUPPORTED;
}
size_t poll_nothing(adt_transport_h, adt_completion_t *, size_t) {
    return 0;
}
void last_error(adt_transport_h, char *buffer, size_t capacity) {
    std::snprintf(buffer, capacity, "%s", kAbsent);
}

}  // namespace

bool choose_rdma(const std::vector<std::string> &, int32_t, std::string &, int32_t &, std::string &words) {
    words = kAbsent;
    return false;
}

const adt_transport_ops_t kVerbsOps = {
    ADT_ABI_VERSION,
    sizeof(adt_transport_ops_t),
    "verbs",
    ADT_TRANSPORT_PINS | ADT_TRANSPORT_SETTLES,
    1,
    probe,
    open_nothing,
    close_nothing,
    reg_mem,
    dereg_mem,
    export_key,
    import_key,
    release_key,
    adt_unsupported_import_local,
    connect_nothing,
    disconnect_nothing,
    adt_no_hear,
    post,
    adt_unsupported_execute,
    poll_nothing,
    adt_no_event_fd,
    adt_always_armed,
    adt_no_loop_fd,
    adt_no_loop_progress,
    adt_no_take_over,
    adt_unsupported_cancel,
    adt_unsupported_revoke,
    last_error,
};
#endif

}  // namespace adt
