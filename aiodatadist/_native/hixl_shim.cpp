// SPDX-License-Identifier: Apache-2.0
// The only code that knows HIXL's C++ class. It is a shared object of its own, which names the symbols of libcann_hixl
// and libmetadef without linking them: the library opens those first, and then this, which finds them by name. So
// nothing of CANN is needed to build, install or import aiodatadist.
//
// The declarations are our own, written from the published facts about the class: names, signatures, sizes and offsets.
// The latter are asserted. No std::string crosses: its layout and its name depend on how a compiler is set, those of
// what is used here do not.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "hixl_api.h"

// What other libraries define must be found outside this object, whatever the visibility of its own.
#pragma GCC visibility push(default)

namespace ge {

class AscendString {
  public:
    AscendString() = default;
    explicit AscendString(const char *text);
    bool operator<(const AscendString &other) const;

  private:
    std::shared_ptr<void> text_;  // of a std::string, which only its own library makes and ends
};

}  // namespace ge

namespace hixl {

using Status = uint32_t;
using MemHandle = void *;
using TransferReq = void *;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
enum class TransferStatus { WAITING, COMPLETED, TIMEOUT, FAILED };
enum class AsyncConnectStatus {
    NOT_CONNECT,
    CONNECT_PENDING,
    CONNECTING,
    CONNECTED,
    CONNECT_FAILED,
    DISCONNECT_PENDING,
    DISCONNECTING,
};

struct MemDesc {
    uintptr_t addr = 0;
    size_t len = 0;
    uint8_t reserved[128] = {};
};

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};

struct TransferArgs {
    const void *user_data = nullptr;
    uint8_t reserved[120] = {};
};

struct GetTransferStatusArgs {
    uint32_t max_query_count = UINT32_MAX;
    bool skip_waiting = false;
    uint8_t reserved[123] = {};
};

struct TransferResult {
    TransferReq req = nullptr;
    const void *user_data = nullptr;
    TransferStatus status = TransferStatus::WAITING;
    uint8_t reserved[108] = {};
};

class Hixl {
  public:
    Hixl();
    ~Hixl();
    Hixl(const Hixl &) = delete;
    Hixl &operator=(const Hixl &) = delete;

    Status Initialize(const ge::AscendString &local_engine,
                      const std::map<ge::AscendString, ge::AscendString> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle);
    Status DeregisterMem(MemHandle mem_handle);
    Status ConnectAsync(const ge::AscendString &remote_engine, int32_t timeout_in_millis);
    Status DisconnectAsync(const ge::AscendString &remote_engine, int32_t timeout_in_millis);
    Status GetAsyncConnectStatus(const ge::AscendString &remote_engine, AsyncConnectStatus &status);
    Status TransferAsync(const ge::AscendString &remote_engine, TransferOp operation,
                         const std::vector<TransferOpDesc> &op_descs, const TransferArgs &args, TransferReq &req);
    Status GetTransferStatus(const TransferReq &req, TransferStatus &status);
    Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results);

  private:
    void *impl_;  // a std::unique_ptr, which only HIXL's own constructor and destructor touch
};

}  // namespace hixl

#pragma GCC visibility pop

namespace {

static_assert(sizeof(void *) == 8, "HIXL's layouts are known for 64-bit machines only");
static_assert(sizeof(ge::AscendString) == 16 && sizeof(hixl::Hixl) == 8);
static_assert(sizeof(hixl::MemType) == sizeof(int) && sizeof(hixl::TransferOp) == sizeof(int));
static_assert(int{hixl::MEM_DEVICE} == int{ADT_HIXL_MEM_DEVICE} && int{hixl::MEM_HOST} == int{ADT_HIXL_MEM_HOST});
static_assert(int{hixl::READ} == int{ADT_HIXL_READ} && int{hixl::WRITE} == int{ADT_HIXL_WRITE});
static_assert(sizeof(hixl::TransferStatus) == sizeof(int) && static_cast<int>(hixl::TransferStatus::FAILED) == 3);
static_assert(static_cast<int>(hixl::AsyncConnectStatus::DISCONNECTING) == ADT_HIXL_DISCONNECTING);
static_assert(sizeof(hixl::MemDesc) == 144 && offsetof(hixl::MemDesc, addr) == 0 && offsetof(hixl::MemDesc, len) == 8 &&
              offsetof(hixl::MemDesc, reserved) == 16);
static_assert(sizeof(hixl::TransferOpDesc) == 24 && offsetof(hixl::TransferOpDesc, local_addr) == 0 &&
              offsetof(hixl::TransferOpDesc, remote_addr) == 8 && offsetof(hixl::TransferOpDesc, len) == 16);
static_assert(sizeof(hixl::TransferArgs) == 128 && offsetof(hixl::TransferArgs, user_data) == 0 &&
              offsetof(hixl::TransferArgs, reserved) == 8);
static_assert(sizeof(hixl::GetTransferStatusArgs) == 128 && alignof(hixl::GetTransferStatusArgs) == 4 &&
              offsetof(hixl::GetTransferStatusArgs, max_query_count) == 0 &&
              offsetof(hixl::GetTransferStatusArgs, skip_waiting) == 4 &&
              offsetof(hixl::GetTransferStatusArgs, reserved) == 5);
static_assert(sizeof(hixl::TransferResult) == 128 && offsetof(hixl::TransferResult, req) == 0 &&
              offsetof(hixl::TransferResult, user_data) == 8 && offsetof(hixl::TransferResult, status) == 16 &&
              offsetof(hixl::TransferResult, reserved) == 20);
// Pieces go over as they are.
static_assert(sizeof(adt_hixl_piece_t) == sizeof(hixl::TransferOpDesc) &&
              offsetof(adt_hixl_piece_t, local) == offsetof(hixl::TransferOpDesc, local_addr) &&
              offsetof(adt_hixl_piece_t, remote) == offsetof(hixl::TransferOpDesc, remote_addr) &&
              offsetof(adt_hixl_piece_t, length) == offsetof(hixl::TransferOpDesc, len));

hixl::Hixl &engine_of(void *engine) {
    return *static_cast<hixl::Hixl *>(engine);
}

template <typename Call>
uint32_t guarded(Call &&call) {
    try {
        return call();
    } catch (...) {
        return ADT_HIXL_FAILED;
    }
}

void *create() {
    try {
        return new hixl::Hixl;
    } catch (...) {
        return nullptr;
    }
}

void destroy(void *engine) {
    delete &engine_of(engine);
}

uint32_t initialize(void *engine, const char *local_engine, const char *const *names, const char *const *values,
                    size_t count) {
    return guarded([&] {
        std::map<ge::AscendString, ge::AscendString> options;
        for (size_t i = 0; i < count; ++i) options.emplace(ge::AscendString(names[i]), ge::AscendString(values[i]));
        return engine_of(engine).Initialize(ge::AscendString(local_engine), options);
    });
}

void finalize(void *engine) {
    guarded([&] {
        engine_of(engine).Finalize();
        return uint32_t{ADT_HIXL_SUCCESS};
    });
}

uint32_t register_mem(void *engine, uintptr_t address, size_t bytes, int32_t type, void **handle) {
    return guarded([&] {
        hixl::MemDesc memory;
        memory.addr = address;
        memory.len = bytes;
        return engine_of(engine).RegisterMem(memory, static_cast<hixl::MemType>(type), *handle);
    });
}

uint32_t deregister_mem(void *engine, void *handle) {
    return guarded([&] { return engine_of(engine).DeregisterMem(handle); });
}

uint32_t connect(void *engine, const char *remote, int32_t timeout_ms) {
    return guarded([&] { return engine_of(engine).ConnectAsync(ge::AscendString(remote), timeout_ms); });
}

uint32_t disconnect(void *engine, const char *remote, int32_t timeout_ms) {
    return guarded([&] { return engine_of(engine).DisconnectAsync(ge::AscendString(remote), timeout_ms); });
}

uint32_t connection(void *engine, const char *remote, int32_t *state) {
    return guarded([&] {
        auto read = hixl::AsyncConnectStatus::NOT_CONNECT;
        const hixl::Status status = engine_of(engine).GetAsyncConnectStatus(ge::AscendString(remote), read);
        *state = static_cast<int32_t>(read);
        return status;
    });
}

uint32_t transfer(void *engine, const char *remote, int32_t opcode, const adt_hixl_piece_t *pieces, size_t count,
                  const void *user_data, void **request) {
    return guarded([&] {
        std::vector<hixl::TransferOpDesc> descs;
        descs.reserve(count);
        for (size_t i = 0; i < count; ++i) descs.push_back({pieces[i].local, pieces[i].remote, pieces[i].length});
        hixl::TransferArgs args;
        args.user_data = user_data;
        return engine_of(engine).TransferAsync(ge::AscendString(remote), static_cast<hixl::TransferOp>(opcode), descs,
                                               args, *request);
    });
}

uint32_t query(void *engine, void *request, int32_t *status) {
    return guarded([&] {
        auto read = hixl::TransferStatus::WAITING;
        const hixl::TransferReq named = request;
        const hixl::Status result = engine_of(engine).GetTransferStatus(named, read);
        *status = static_cast<int32_t>(read);
        return result;
    });
}

uint32_t query_all(void *engine, adt_hixl_result_t result, void *context) {
    return guarded([&] {
        hixl::GetTransferStatusArgs args;
        args.skip_waiting = true;
        std::vector<hixl::TransferResult> results;
        const hixl::Status status = engine_of(engine).GetTransferStatus(args, results);
        for (const hixl::TransferResult &one : results) {
            if (one.status == hixl::TransferStatus::WAITING) continue;
            result(context, one.req, one.user_data, static_cast<int32_t>(one.status));
        }
        return status;
    });
}

const adt_hixl_api_t kApi = {
    ADT_HIXL_API_VERSION,
    sizeof(adt_hixl_api_t),
    create,
    destroy,
    initialize,
    finalize,
    register_mem,
    deregister_mem,
    connect,
    disconnect,
    connection,
    transfer,
    query,
    query_all,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const adt_hixl_api_t *adt_hixl_shim(void);

const adt_hixl_api_t *adt_hixl_shim(void) {
    return &kApi;
}
