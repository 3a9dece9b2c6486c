// SPDX-License-Identifier: Apache-2.0
#ifdef AIODATADIST_VERBS
#include "verbs_device.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "fd.hpp"

namespace adt {
namespace {

constexpr const char *kLibrary = "libibverbs.so.1";
constexpr uint32_t kMaxSge = 16;
constexpr uint32_t kMaxRequests = 1024;

struct Opened {
    VerbsLibrary lib{};
    bool usable = false;
    std::string why;

    Opened() {
        void *const handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            const char *const said = dlerror();
            why = std::string("cannot open ") + kLibrary + " (" + (said != nullptr ? said : "no reason given") +
                  "): install rdma-core (Debian: libibverbs1 and ibverbs-providers)";
            return;
        }
        const bool all =
            load(handle, "ibv_get_device_list", lib.get_device_list) &&
            load(handle, "ibv_free_device_list", lib.free_device_list) &&
            load(handle, "ibv_get_device_name", lib.get_device_name) &&
            load(handle, "ibv_open_device", lib.open_device) && load(handle, "ibv_close_device", lib.close_device) &&
            load(handle, "ibv_query_device", lib.query_device) && load(handle, "ibv_query_port", lib.query_port) &&
            load(handle, "ibv_query_gid", lib.query_gid) && load(handle, "ibv_alloc_pd", lib.alloc_pd) &&
            load(handle, "ibv_dealloc_pd", lib.dealloc_pd) && load(handle, "ibv_reg_mr", lib.reg_mr) &&
            load(handle, "ibv_dereg_mr", lib.dereg_mr) &&
            load(handle, "ibv_create_comp_channel", lib.create_comp_channel) &&
            load(handle, "ibv_destroy_comp_channel", lib.destroy_comp_channel) &&
            load(handle, "ibv_create_cq", lib.create_cq) && load(handle, "ibv_destroy_cq", lib.destroy_cq) &&
            load(handle, "ibv_get_cq_event", lib.get_cq_event) &&
            load(handle, "ibv_ack_cq_events", lib.ack_cq_events) && load(handle, "ibv_create_qp", lib.create_qp) &&
            load(handle, "ibv_modify_qp", lib.modify_qp) && load(handle, "ibv_destroy_qp", lib.destroy_qp) &&
            load(handle, "ibv_fork_init", lib.fork_init) && load(handle, "ibv_wc_status_str", lib.wc_status_str);
        if (!all) return;
        // Before anything is registered: on kernels that do not copy pinned pages at fork, a parent would go on with
        // other pages than its device. There the child loses registered memory instead, and whatever shares its pages.
        // Newer libraries say whether that is needed, and do it even where it is not.
        int (*fork_status)() = nullptr;
        void *const found = dlsym(handle, "ibv_is_fork_initialized");
        if (found != nullptr) std::memcpy(&fork_status, &found, sizeof(found));
        constexpr int kForkUnneeded = 2;  // IBV_FORK_UNNEEDED
        const int code = fork_status != nullptr && fork_status() == kForkUnneeded ? 0 : lib.fork_init();
        if (code != 0) {
            why = "ibv_fork_init: " + errno_text(code) + ": a fork would take registered memory from the device";
            return;
        }
        usable = true;
    }

    template <typename Function>
    bool load(void *handle, const char *name, Function &out) {
        void *const found = dlsym(handle, name);
        if (found == nullptr) {
            why = std::string(kLibrary) + " has no " + name + ": install a newer rdma-core";
            return false;
        }
        std::memcpy(&out, &found, sizeof(found));
        return true;
    }
};

std::string read_line(const std::string &path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// The devices of this machine, as libibverbs lists them.
class DeviceList {
  public:
    explicit DeviceList(const VerbsLibrary &lib) : lib_(lib), list_(lib.get_device_list(&count_)) { error_ = errno; }
    ~DeviceList() {
        if (list_ != nullptr) lib_.free_device_list(list_);
    }
    DeviceList(const DeviceList &) = delete;
    DeviceList &operator=(const DeviceList &) = delete;

    int count() const { return list_ == nullptr ? 0 : count_; }
    int error() const { return list_ == nullptr ? error_ : 0; }
    ibv_device *operator[](int i) const { return list_[i]; }
    ibv_device *find(const std::string &name) const {
        for (int i = 0; i < count(); ++i) {
            if (name == lib_.get_device_name(list_[i])) return list_[i];
        }
        return nullptr;
    }

  private:
    const VerbsLibrary &lib_;
    int count_ = 0;
    int error_ = 0;
    ibv_device **list_;
};

bool is_zero(const ibv_gid &gid) {
    return gid.global.subnet_prefix == 0 && gid.global.interface_id == 0;
}

bool is_ipv4(const ibv_gid &gid) {
    static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return std::memcmp(gid.raw, prefix, sizeof(prefix)) == 0;
}

bool is_link_local(const ibv_gid &gid) {
    return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

std::string gid_words(const ibv_gid &gid) {
    char text[64];
    if (is_ipv4(gid)) {
        std::snprintf(text, sizeof(text), "%u.%u.%u.%u", gid.raw[12], gid.raw[13], gid.raw[14], gid.raw[15]);
        return text;
    }
    std::string words;
    for (int i = 0; i < 16; i += 2) {
        std::snprintf(text, sizeof(text), "%s%x", i == 0 ? "" : ":", gid.raw[i] << 8 | gid.raw[i + 1]);
        words += text;
    }
    return words;
}

// How good an address of a RoCE port is. Version 2 is routed, and IPv4 is what most fabrics are set up for.
int rank_of(const ibv_gid &gid, const std::string &type) {
    const bool second = type.find("v2") != std::string::npos;
    if (is_ipv4(gid)) return second ? 6 : 3;
    if (is_link_local(gid)) return second ? 4 : 1;
    return second ? 5 : 2;
}

struct Context {
    const VerbsLibrary &lib;
    ibv_context *const context;
    ~Context() {
        if (context != nullptr) lib.close_device(context);
    }
};

const char *state_words(ibv_port_state state) {
    switch (state) {
        case IBV_PORT_DOWN:
            return "down";
        case IBV_PORT_INIT:
            return "initializing: no subnet manager has set it up";
        case IBV_PORT_ARMED:
            return "armed, not active";
        case IBV_PORT_ACTIVE:
            return "active";
        default:
            return "not active";
    }
}

bool choose_gid(const VerbsLibrary &lib, ibv_context *context, const std::string &device, uint8_t port, int entries,
                int32_t wanted, VerbsPlace &out, std::string &why) {
    const std::string base = "/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) + "/gid_attrs/types/";
    int best = 0;
    for (int i = 0; i < entries; ++i) {
        if (wanted >= 0 && i != wanted) continue;
        ibv_gid gid{};
        if (lib.query_gid(context, port, i, &gid) != 0 || is_zero(gid)) continue;
        const std::string type = read_line(base + std::to_string(i));
        const int rank = rank_of(gid, type);
        if (rank <= best) continue;
        best = rank;
        out.gid_index = i;
        out.words = "GID " + std::to_string(i) + ", " + gid_words(gid) + (type.empty() ? "" : ", " + type);
    }
    if (best > 0) return true;
    why = wanted >= 0 ? "GID " + std::to_string(wanted) + " of its " + std::to_string(entries) + " is empty"
                      : "it has no address: give its network interface one";
    return false;
}

// Looks at one device.
bool examine(const VerbsLibrary &lib, ibv_device *device, int wanted_port, int32_t gid_index, VerbsPlace &out,
             std::string &why) {
    out.device = lib.get_device_name(device);
    if (device->transport_type != IBV_TRANSPORT_IB) {
        why = "it is no InfiniBand or RoCE device, and others (iWARP) connect in another way";
        return false;
    }
    const Context opened{lib, lib.open_device(device)};
    if (opened.context == nullptr) {
        why = "cannot open it: " + errno_text(errno) + " (in a container, pass /dev/infiniband)";
        return false;
    }
    ibv_device_attr attr{};
    if (const int code = lib.query_device(opened.context, &attr); code != 0) {
        why = "cannot query it: " + errno_text(code);
        return false;
    }
    const int first = wanted_port > 0 ? wanted_port : 1;
    const int last = wanted_port > 0 ? wanted_port : attr.phys_port_cnt;
    if (last > attr.phys_port_cnt) {
        why = "it has " + std::to_string(attr.phys_port_cnt) + " ports";
        return false;
    }
    for (int port = first; port <= last; ++port) {
        ibv_port_attr seen{};
        const std::string named = "port " + std::to_string(port) + ": ";
        if (!why.empty()) why += ", ";
        if (const int code = lib.query_port(opened.context, static_cast<uint8_t>(port), &seen); code != 0) {
            why += named + errno_text(code);
            continue;
        }
        if (seen.state != IBV_PORT_ACTIVE) {
            why += named + state_words(seen.state);
            continue;
        }
        out.port = static_cast<uint8_t>(port);
        out.roce = seen.link_layer == IBV_LINK_LAYER_ETHERNET;
        out.gid_index = gid_index >= 0 ? gid_index : 0;
        std::string wrong;
        if (out.roce &&
            !choose_gid(lib, opened.context, out.device, out.port, seen.gid_tbl_len, gid_index, out, wrong)) {
            why += named + wrong;
            continue;
        }
        if (!out.roce) out.words = "LID " + std::to_string(seen.lid);
        out.words =
            out.device + " port " + std::to_string(port) + (out.roce ? " (RoCE, " : " (InfiniBand, ") + out.words + ")";
        return true;
    }
    if (attr.phys_port_cnt == 0) why = "it has no port";
    return false;
}

}  // namespace

std::string errno_text(int code) {
    char buffer[256] = "";
    // The GNU variant, which may return a text of its own.
    return strerror_r(code, buffer, sizeof(buffer));
}

std::pair<std::string, int> split_place(const std::string &name) {
    const size_t colon = name.rfind(':');
    if (colon == std::string::npos) return {name, 0};
    const std::string digits = name.substr(colon + 1);
    if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos) {
        return {name, 0};
    }
    return {name.substr(0, colon), std::stoi(digits)};
}

const VerbsLibrary *VerbsLibrary::get(std::string &why) {
    static const Opened *const opened = new Opened;
    why = opened->why;
    return opened->usable ? &opened->lib : nullptr;
}

bool choose_verbs_place(const std::vector<std::string> &names, int32_t gid_index, VerbsPlace &out, std::string &why) {
    const VerbsLibrary *const lib = VerbsLibrary::get(why);
    if (lib == nullptr) return false;
    const DeviceList devices(*lib);
    if (devices.count() == 0) {
        why = "there is no RDMA device";
        if (devices.error() != 0 && devices.error() != ENOENT) why += ": " + errno_text(devices.error());
        if (devices.error() == ENOSYS) why += " (the kernel module ib_uverbs is not loaded)";
        return false;
    }
    std::string all;
    const auto note = [&](const std::string &name, const std::string &reason) {
        all += (all.empty() ? "" : "; ") + name + ": " + reason;
    };
    if (names.empty()) {
        for (int i = 0; i < devices.count(); ++i) {
            std::string reason;
            out = {};
            if (examine(*lib, devices[i], 0, gid_index, out, reason)) return true;
            note(out.device, reason);
        }
    }
    for (const std::string &name : names) {
        const auto [base, port] = split_place(name);
        ibv_device *const device = devices.find(base);
        std::string reason = "there is no such device";
        out = {};
        if (device != nullptr) {
            reason.clear();
            if (examine(*lib, device, port, gid_index, out, reason)) return true;
        }
        note(name, reason);
    }
    why = all;
    return false;
}

bool choose_rdma(const std::vector<std::string> &devices, int32_t gid_index, std::string &device, int32_t &chosen,
                 std::string &words) {
    VerbsPlace place;
    if (!choose_verbs_place(devices, gid_index, place, words)) return false;
    device = place.device + ":" + std::to_string(place.port);
    chosen = place.gid_index;
    words = place.words;
    return true;
}

VerbsDevice::VerbsDevice(const VerbsLibrary &library, const std::string &wanted) : lib(library), name(wanted) {
    const DeviceList devices(lib);
    ibv_device *const device = devices.find(name);
    if (device == nullptr) throw VerbsError{ADT_ERR_UNSUPPORTED, "there is no RDMA device " + name};
    const auto check = [this](bool good, const char *what) {
        if (good) return;
        const std::string why = errno_text(errno);
        close();
        throw VerbsError{ADT_ERR_IO, std::string(what) + " on " + name + ": " + why};
    };
    context = lib.open_device(device);
    check(context != nullptr, "ibv_open_device");
    note_descriptor(context->cmd_fd, true);
    note_descriptor(context->async_fd, true);
    errno = lib.query_device(context, &attr);
    check(errno == 0, "ibv_query_device");
    pd = lib.alloc_pd(context);
    check(pd != nullptr, "ibv_alloc_pd");
    channel = lib.create_comp_channel(context);
    check(channel != nullptr, "ibv_create_comp_channel");
    note_descriptor(channel->fd, true);
    check(fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK) == 0, "fcntl of the channel");
    scratch_mr = lib.reg_mr(pd, scratch, 1, IBV_ACCESS_LOCAL_WRITE);
    check(scratch_mr != nullptr, "ibv_reg_mr (RLIMIT_MEMLOCK?)");
}

VerbsDevice::~VerbsDevice() {
    close();
}

void VerbsDevice::close() {
    if (scratch_mr != nullptr) lib.dereg_mr(std::exchange(scratch_mr, nullptr));
    if (channel != nullptr) {
        note_descriptor(channel->fd, false);
        lib.destroy_comp_channel(std::exchange(channel, nullptr));
    }
    if (pd != nullptr) lib.dealloc_pd(std::exchange(pd, nullptr));
    if (context != nullptr) {
        note_descriptor(context->cmd_fd, false);
        note_descriptor(context->async_fd, false);
        lib.close_device(std::exchange(context, nullptr));
    }
}

uint64_t VerbsDevice::max_registration() const {
    const uint64_t test = verbs_limits().registration_bytes.load(std::memory_order_relaxed);
    uint64_t most = attr.max_mr_size == 0 ? UINT64_MAX : attr.max_mr_size;
    if (test != 0) most = std::min(most, test);
    // Whole pages, so that two registrations of one tensor meet at a page.
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return std::max(page, most / page * page);
}

uint32_t VerbsDevice::max_sge() const {
    const uint32_t test = verbs_limits().sge.load(std::memory_order_relaxed);
    auto most = static_cast<uint32_t>(std::max(1, attr.max_sge));
    if (attr.max_sge_rd > 0) most = std::min(most, static_cast<uint32_t>(attr.max_sge_rd));
    return std::min({most, kMaxSge, test != 0 ? test : kMaxSge});
}

uint32_t VerbsDevice::max_requests() const {
    const uint32_t test = verbs_limits().requests.load(std::memory_order_relaxed);
    const auto most = static_cast<uint32_t>(std::max(2, std::min(attr.max_qp_wr, attr.max_cqe - 1)));
    return std::min({most, kMaxRequests, test != 0 ? test : kMaxRequests});
}

}  // namespace adt
#endif
