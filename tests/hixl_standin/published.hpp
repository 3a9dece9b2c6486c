// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: the names, signatures and layouts that HIXL, metadef and the ACL runtime
// publish, declared anew. Nothing here was taken from their sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define STANDIN_PUBLIC __attribute__((visibility("default")))

namespace ge {

class STANDIN_PUBLIC AscendString {
  public:
    AscendString() = default;
    ~AscendString() = default;
    AscendString(const char *name);  // NOLINT(google-explicit-constructor)
    AscendString(const char *name, size_t length);
    const char *GetString() const;
    size_t GetLength() const;
    bool operator<(const AscendString &other) const;
    bool operator>(const AscendString &other) const;
    bool operator<=(const AscendString &other) const;
    bool operator>=(const AscendString &other) const;
    bool operator==(const AscendString &other) const;
    bool operator!=(const AscendString &other) const;

  private:
    std::shared_ptr<std::string> name_;
};

}  // namespace ge

namespace hixl {

using ge::AscendString;
using Status = uint32_t;
using MemHandle = void *;
using TransferReq = void *;

constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status NOTIFY_FAILED = 103904;
constexpr Status UNSUPPORTED = 103905;
constexpr Status RESOURCE_EXHAUSTED = 203900;
constexpr Status FAILED = 503900;

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
    DISCONNECTING
};
enum class FeatureType : int32_t { AUTO_CONNECT, CLIENT_SERVER_COMM };

struct MemDesc {
    uintptr_t addr;
    size_t len;
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

struct NotifyDesc {
    AscendString name;
    AscendString notify_msg;
};

class STANDIN_PUBLIC Hixl {
  public:
    Hixl();
    ~Hixl();
    Status Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle);
    Status DeregisterMem(MemHandle mem_handle);
    Status Connect(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status Disconnect(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status ConnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status DisconnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status GetAsyncConnectStatus(const AscendString &remote_engine, AsyncConnectStatus &status);
    Status GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &statuses);
    Status TransferSync(const AscendString &remote_engine, TransferOp operation,
                        const std::vector<TransferOpDesc> &op_descs, int32_t timeout_in_millis = 1000);
    Status TransferAsync(const AscendString &remote_engine, TransferOp operation,
                         const std::vector<TransferOpDesc> &op_descs, const TransferArgs &optional_args,
                         TransferReq &req);
    Status GetTransferStatus(const TransferReq &req, TransferStatus &status);
    Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results);
    Status SendNotify(const AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_in_millis = 1000);
    Status GetNotifies(std::vector<NotifyDesc> &notifies);
    static Status GetCapability(FeatureType feature, int32_t &value);

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

static_assert(sizeof(AscendString) == 16);
static_assert(sizeof(Hixl) == 8);
static_assert(sizeof(NotifyDesc) == 32);
static_assert(offsetof(NotifyDesc, name) == 0 && offsetof(NotifyDesc, notify_msg) == 16);
static_assert(sizeof(MemDesc) == 144);
static_assert(offsetof(MemDesc, addr) == 0 && offsetof(MemDesc, len) == 8 && offsetof(MemDesc, reserved) == 16);
static_assert(sizeof(TransferOpDesc) == 24);
static_assert(offsetof(TransferOpDesc, local_addr) == 0 && offsetof(TransferOpDesc, remote_addr) == 8);
static_assert(offsetof(TransferOpDesc, len) == 16);
static_assert(sizeof(TransferArgs) == 128);
static_assert(offsetof(TransferArgs, user_data) == 0 && offsetof(TransferArgs, reserved) == 8);
static_assert(sizeof(GetTransferStatusArgs) == 128 && alignof(GetTransferStatusArgs) == 4);
static_assert(offsetof(GetTransferStatusArgs, max_query_count) == 0);
static_assert(offsetof(GetTransferStatusArgs, skip_waiting) == 4 && offsetof(GetTransferStatusArgs, reserved) == 5);
static_assert(sizeof(TransferResult) == 128);
static_assert(offsetof(TransferResult, req) == 0 && offsetof(TransferResult, user_data) == 8);
static_assert(offsetof(TransferResult, status) == 16 && offsetof(TransferResult, reserved) == 20);
static_assert(sizeof(MemType) == 4 && sizeof(TransferOp) == 4 && sizeof(TransferStatus) == 4);
static_assert(sizeof(AsyncConnectStatus) == 4 && sizeof(FeatureType) == 4);

}  // namespace hixl

// Of the ACL runtime, what the library and its tests use.
extern "C" {
STANDIN_PUBLIC int aclInit(const char *config);
STANDIN_PUBLIC int aclFinalize();
STANDIN_PUBLIC int aclrtGetDeviceCount(uint32_t *count);
STANDIN_PUBLIC int aclrtSetDevice(int32_t device);
STANDIN_PUBLIC int aclrtResetDevice(int32_t device);
STANDIN_PUBLIC int aclrtGetDevice(int32_t *device);
STANDIN_PUBLIC int aclrtCreateContext(void **context, int32_t device);
STANDIN_PUBLIC int aclrtDestroyContext(void *context);
STANDIN_PUBLIC int aclrtSetCurrentContext(void *context);
STANDIN_PUBLIC int aclrtGetCurrentContext(void **context);
STANDIN_PUBLIC const char *aclrtGetSocName();
STANDIN_PUBLIC int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch);
STANDIN_PUBLIC const char *aclGetRecentErrMsg();
STANDIN_PUBLIC int aclrtMalloc(void **address, size_t size, int policy);
STANDIN_PUBLIC int aclrtFree(void *address);
STANDIN_PUBLIC int aclrtMallocHost(void **address, size_t size);
STANDIN_PUBLIC int aclrtFreeHost(void *address);
STANDIN_PUBLIC int aclrtMemcpy(void *to, size_t capacity, const void *from, size_t count, int kind);
STANDIN_PUBLIC int aclrtMemset(void *address, size_t capacity, int32_t value, size_t count);

// The stand-in's own. Where the host reaches device memory in truth, or 0 where these bytes are not all of one
// allocation.
STANDIN_PUBLIC uintptr_t standin_device_alias(uintptr_t address, size_t size);
STANDIN_PUBLIC int standin_touches_device(uintptr_t address, size_t size);  // 1: some of it is device memory
STANDIN_PUBLIC int standin_is_pinned_host(uintptr_t address, size_t size);  // 1: all of it is of aclrtMallocHost
STANDIN_PUBLIC uint64_t standin_device_bytes();                             // allocated now
// Of libcann_hixl.so: change a knob (README.md) for this process, read a counter, and read which rules the caller
// broke.
STANDIN_PUBLIC int standin_set(const char *knob, int64_t value);
STANDIN_PUBLIC void standin_reset();  // all knobs as the environment says
STANDIN_PUBLIC uint64_t standin_count(const char *counter);
STANDIN_PUBLIC size_t standin_violations(char *buffer, size_t capacity);  // lines; cleared
}
