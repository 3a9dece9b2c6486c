// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: what the library uses of libascendcl.so. "Device" memory is an address range
// without any permission, so that whoever takes it for host memory faults or gets EFAULT. Its bytes lie in a memfd that
// is mapped a second time, and only this file and libcann_hixl.so's stand-in know where.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "published.hpp"

namespace {

constexpr int kInvalidParam = 100000;
constexpr int kInvalidDevice = 107001;
constexpr int kNoContext = 107002;
constexpr int kNoMemory = 207001;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
constexpr int kNormalOnly = 2;  // ACL_MEM_MALLOC_NORMAL_ONLY

struct Context {
    int32_t device;
};

struct Block {
    size_t size;  // as asked for
    uintptr_t alias;
    size_t mapped;
};

struct State {
    std::mutex mu;
    std::map<uintptr_t, Block> device;
    std::map<uintptr_t, size_t> host;  // of aclrtMallocHost
    std::map<int32_t, Context *> contexts;
};

// Never destroyed: threads of other libraries may still ask at the end of the process.
State &state() {
    static auto *it = new State;
    return *it;
}

thread_local Context *current = nullptr;
thread_local const char *recent = "";

int fail(int code, const char *why) {
    recent = why;
    return code;
}

int32_t devices() {
    const char *text = std::getenv("HIXL_STANDIN_DEVICES");
    return text != nullptr ? std::atoi(text) : 2;
}

// The block that `address` lies in; under the lock.
const Block *find(uintptr_t address, uintptr_t *base) {
    auto &blocks = state().device;
    auto it = blocks.upper_bound(address);
    if (it == blocks.begin()) return nullptr;
    --it;
    *base = it->first;
    return address < it->first + it->second.mapped ? &it->second : nullptr;
}

uintptr_t number(const void *address) {
    return reinterpret_cast<uintptr_t>(address);
}
void *pointer(uintptr_t address) {
    return reinterpret_cast<void *>(address);
}

}  // namespace

extern "C" {

int aclInit(const char *) {
    return 0;
}
int aclFinalize() {
    return 0;
}

int aclrtGetDeviceCount(uint32_t *count) {
    *count = static_cast<uint32_t>(devices());
    return 0;
}

int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= devices()) return fail(kInvalidDevice, "stand-in: no such device");
    std::lock_guard lock(state().mu);
    auto &context = state().contexts[device];
    if (context == nullptr) context = new Context{device};
    current = context;
    return 0;
}

int aclrtResetDevice(int32_t device) {
    if (device < 0 || device >= devices()) return fail(kInvalidDevice, "stand-in: no such device");
    if (current != nullptr && current->device == device) current = nullptr;
    return 0;
}

int aclrtGetDevice(int32_t *device) {
    if (current == nullptr) return fail(kNoContext, "stand-in: this thread has no context");
    *device = current->device;
    return 0;
}

int aclrtCreateContext(void **context, int32_t device) {
    if (device < 0 || device >= devices()) return fail(kInvalidDevice, "stand-in: no such device");
    current = new Context{device};
    *context = current;
    return 0;
}

int aclrtDestroyContext(void *context) {
    if (current == context) current = nullptr;
    delete static_cast<Context *>(context);
    return 0;
}

int aclrtSetCurrentContext(void *context) {
    if (context == nullptr) return fail(kInvalidParam, "stand-in: no context was given");
    current = static_cast<Context *>(context);
    return 0;
}

int aclrtGetCurrentContext(void **context) {
    if (current == nullptr) return fail(kNoContext, "stand-in: this thread has no context");
    *context = current;
    return 0;
}

const char *aclrtGetSocName() {
    const char *text = std::getenv("HIXL_STANDIN_SOC");
    return text != nullptr ? text : "Ascend910_9392";
}

int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    *major = *minor = *patch = 0;
    return 0;
}

const char *aclGetRecentErrMsg() {
    return recent;
}

int aclrtMalloc(void **address, size_t size, int policy) {
    if (address == nullptr || size == 0) return fail(kInvalidParam, "stand-in: size 0");
    if (current == nullptr) return fail(kNoContext, "stand-in: aclrtMalloc without aclrtSetDevice");
    const size_t alignment = policy % 3 == kNormalOnly ? kPage : kHugePage;
    const size_t mapped = (size + alignment - 1) / alignment * alignment;
    const int fd = memfd_create("hixl-standin-device", MFD_CLOEXEC);
    if (fd < 0) return fail(kNoMemory, "stand-in: memfd_create failed");
    void *alias = MAP_FAILED, *reserved = MAP_FAILED;
    if (ftruncate(fd, static_cast<off_t>(mapped)) == 0) {
        alias = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        reserved = mmap(nullptr, mapped + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    close(fd);
    if (alias == MAP_FAILED || reserved == MAP_FAILED) {
        if (alias != MAP_FAILED) munmap(alias, mapped);
        return fail(kNoMemory, "stand-in: mmap failed");
    }
    const uintptr_t start = number(reserved), base = (start + alignment - 1) / alignment * alignment;
    if (base > start) munmap(reserved, base - start);
    if (start + alignment > base) munmap(pointer(base + mapped), start + alignment - base);
    std::lock_guard lock(state().mu);
    state().device[base] = {size, number(alias), mapped};
    *address = pointer(base);
    return 0;
}

int aclrtFree(void *address) {
    std::lock_guard lock(state().mu);
    const auto it = state().device.find(number(address));
    if (it == state().device.end()) return fail(kInvalidParam, "stand-in: not of aclrtMalloc");
    munmap(address, it->second.mapped);
    munmap(pointer(it->second.alias), it->second.mapped);
    state().device.erase(it);
    return 0;
}

int aclrtMallocHost(void **address, size_t size) {
    if (address == nullptr || size == 0) return fail(kInvalidParam, "stand-in: size 0");
    const size_t mapped = (size + kPage - 1) / kPage * kPage;
    void *memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return fail(kNoMemory, "stand-in: mmap failed");
    std::lock_guard lock(state().mu);
    state().host[number(memory)] = mapped;
    *address = memory;
    return 0;
}

int aclrtFreeHost(void *address) {
    std::lock_guard lock(state().mu);
    const auto it = state().host.find(number(address));
    if (it == state().host.end()) return fail(kInvalidParam, "stand-in: not of aclrtMallocHost");
    munmap(address, it->second);
    state().host.erase(it);
    return 0;
}

// kinds: 0 host to host, 1 host to device, 2 device to host, 3 device to device. Each side must be what its kind says.
int aclrtMemcpy(void *to, size_t capacity, const void *from, size_t count, int kind) {
    if (to == nullptr || from == nullptr || count > capacity || kind < 0 || kind > 3) {
        return fail(kInvalidParam, "stand-in: bad arguments of aclrtMemcpy");
    }
    if (count == 0) return 0;
    uintptr_t target = number(to), source = number(from);
    if ((kind & 1) != 0)
        target = standin_device_alias(target, count);
    else if (standin_touches_device(target, count) != 0)
        target = 0;
    if ((kind & 2) != 0)
        source = standin_device_alias(source, count);
    else if (standin_touches_device(source, count) != 0)
        source = 0;
    if (target == 0 || source == 0) return fail(kInvalidParam, "stand-in: the kind of copy does not fit the memory");
    std::memcpy(pointer(target), pointer(source), count);
    return 0;
}

int aclrtMemset(void *address, size_t capacity, int32_t value, size_t count) {
    const uintptr_t target = standin_device_alias(number(address), count);
    if (count > capacity || target == 0) return fail(kInvalidParam, "stand-in: not all of it is one device allocation");
    std::memset(pointer(target), value, count);
    return 0;
}

uintptr_t standin_device_alias(uintptr_t address, size_t size) {
    std::lock_guard lock(state().mu);
    uintptr_t base = 0;
    const Block *block = find(address, &base);
    if (block == nullptr || address - base > block->size || size > block->size - (address - base)) return 0;
    return block->alias + (address - base);
}

int standin_touches_device(uintptr_t address, size_t size) {
    std::lock_guard lock(state().mu);
    uintptr_t base = 0;
    if (find(address, &base) != nullptr) return 1;
    const auto next = state().device.upper_bound(address);
    return next != state().device.end() && next->first - address < size ? 1 : 0;
}

int standin_is_pinned_host(uintptr_t address, size_t size) {
    std::lock_guard lock(state().mu);
    auto it = state().host.upper_bound(address);
    if (it == state().host.begin()) return 0;
    --it;
    return address - it->first <= it->second && size <= it->second - (address - it->first) ? 1 : 0;
}

uint64_t standin_device_bytes() {
    std::lock_guard lock(state().mu);
    uint64_t bytes = 0;
    for (const auto &[base, block] : state().device) bytes += block.size;
    return bytes;
}

}  // extern "C"
