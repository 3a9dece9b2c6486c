// SPDX-License-Identifier: Apache-2.0
// libibverbs, opened at run time, and RDMA devices. Functions that verbs.h defines inline, such as ibv_post_send, go
// through the context and need no symbol.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "aiodatadist/transport.h"
#include "counted.hpp"
#include "verbs_stats.hpp"

namespace adt {

struct VerbsLibrary {
    decltype(&::ibv_get_device_list) get_device_list;
    decltype(&::ibv_free_device_list) free_device_list;
    decltype(&::ibv_get_device_name) get_device_name;
    decltype(&::ibv_open_device) open_device;
    decltype(&::ibv_close_device) close_device;
    decltype(&::ibv_query_device) query_device;
    int (*query_port)(ibv_context *, uint8_t, ibv_port_attr *);
    decltype(&::ibv_query_gid) query_gid;
    decltype(&::ibv_alloc_pd) alloc_pd;
    decltype(&::ibv_dealloc_pd) dealloc_pd;
    ibv_mr *(*reg_mr)(ibv_pd *, void *, size_t, int);
    decltype(&::ibv_dereg_mr) dereg_mr;
    decltype(&::ibv_create_comp_channel) create_comp_channel;
    decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
    decltype(&::ibv_create_cq) create_cq;
    decltype(&::ibv_destroy_cq) destroy_cq;
    decltype(&::ibv_get_cq_event) get_cq_event;
    decltype(&::ibv_ack_cq_events) ack_cq_events;
    decltype(&::ibv_create_qp) create_qp;
    decltype(&::ibv_modify_qp) modify_qp;
    decltype(&::ibv_destroy_qp) destroy_qp;
    decltype(&::ibv_fork_init) fork_init;
    decltype(&::ibv_wc_status_str) wc_status_str;

    // Opened at the first call and never closed: drivers keep threads and handlers. Null, and why: it is not there.
    static const VerbsLibrary *get(std::string &why);
};

// An active port of a device and the address to use there.
struct VerbsPlace {
    std::string device;
    uint8_t port = 1;
    int32_t gid_index = 0;
    bool roce = false;
    std::string words;  // for people
};

// Finds the first usable of the devices that are named (name, or name:port); of all, when none is. `gid_index` -1:
// choose. False, and why none is usable, device by device.
bool choose_verbs_place(const std::vector<std::string> &names, int32_t gid_index, VerbsPlace &out, std::string &why);

// Raised in this file's own functions; says what failed and why.
struct VerbsError {
    adt_status_t status;
    std::string text;
};

// An open device: context, protection domain and completion channel. Its descriptors do not survive fork.
class VerbsDevice : Counted<Live::rdma_device> {
  public:
    // Throws VerbsError.
    VerbsDevice(const VerbsLibrary &lib, const std::string &name);
    ~VerbsDevice();
    VerbsDevice(const VerbsDevice &) = delete;
    VerbsDevice &operator=(const VerbsDevice &) = delete;

    const VerbsLibrary &lib;
    std::string name;
    ibv_context *context = nullptr;
    ibv_pd *pd = nullptr;
    ibv_comp_channel *channel = nullptr;
    ibv_device_attr attr{};
    // Where the read that ends a write lands; nobody looks at it. Pages of its own, of whatever size: where a forked
    // child loses registered memory, it must not lose what the allocator keeps beside it.
    alignas(65536) char scratch[65536] = {};
    ibv_mr *scratch_mr = nullptr;

    uint64_t max_registration() const;
    uint32_t max_sge() const;
    uint32_t max_requests() const;

  private:
    void close();
};

std::string errno_text(int code);
// A device's name and its port; 0: none was named.
std::pair<std::string, int> split_place(const std::string &name);

}  // namespace adt
