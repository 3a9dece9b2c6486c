// SPDX-License-Identifier: Apache-2.0
#include "region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace adt {

Region::Region(size_t bytes) : bytes_(bytes) {
    static std::atomic<uint64_t> next{1};
    id_ = next.fetch_add(1, std::memory_order_relaxed);
    fd_ = Fd(memfd_create("aiodatadist", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd_) throw std::system_error(errno, std::generic_category(), "memfd_create");
    if (ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) {
        throw std::system_error(errno, std::generic_category(), "ftruncate of a memfd");
    }
    if (fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw std::system_error(errno, std::generic_category(), "sealing a memfd");
    }
    void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a memfd");
    base_ = static_cast<char *>(base);
}

Region::~Region() {
    if (base_ != nullptr) munmap(base_, bytes_);
}

bool Region::populate(size_t at, size_t step) const {
    return madvise(base_ + at, step, MADV_POPULATE_WRITE) == 0;
}

Secret::Secret() {
    size_t got = 0;
    while (got < kBytes) {
        const ssize_t n = getrandom(value + got, kBytes - got, 0);
        if (n > 0) got += static_cast<size_t>(n);
    }
}

const Secret &Secret::of_process() {
    static const Secret *const instance = new Secret;
    return *instance;
}

int probe_process_vm(int pid, uint64_t address, const void *expected, size_t bytes) {
    unsigned char seen[Secret::kBytes];
    if (bytes > sizeof(seen)) return EINVAL;
    const iovec here{seen, bytes};
    const iovec there{reinterpret_cast<void *>(static_cast<uintptr_t>(address)), bytes};
    const ssize_t n = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (n < 0) return errno;
    if (static_cast<size_t>(n) != bytes) return EFAULT;
    return expected == nullptr || std::memcmp(seen, expected, bytes) == 0 ? 0 : EBADMSG;
}

int allow_ptracer(long pid) {
    return prctl(PR_SET_PTRACER, static_cast<unsigned long>(pid), 0, 0, 0) == 0 ? 0 : errno;
}

}  // namespace adt
