// SPDX-License-Identifier: Apache-2.0
// Memory that is registered with a device, and the keys by which peers reach it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "geometry.hpp"
#include "verbs_device.hpp"

namespace adt {

// One memory region of the device.
class Registration : Counted<Live::registration> {
  public:
    // Throws VerbsError. Pins the pages: seconds for tens of GB.
    Registration(VerbsDevice &device, char *base, uint64_t bytes, uint32_t access);
    ~Registration();
    // False: the device has not let go of the memory, and `why` says why; to be tried again.
    bool end(std::string &why);
    Registration(const Registration &) = delete;
    Registration &operator=(const Registration &) = delete;

    char *base() const { return base_; }
    uint64_t bytes() const { return bytes_; }
    const ibv_mr &mr() const { return *mr_; }

  private:
    VerbsDevice &device_;
    char *base_;
    uint64_t bytes_;
    ibv_mr *mr_;
};

// An open device and what is registered there: caches that share memory share its registrations.
class RegisteredDevice {
  public:
    RegisteredDevice(const VerbsLibrary &lib, const std::string &name) : device(lib, name) {}

    // Throws VerbsError.
    std::shared_ptr<Registration> take(char *base, uint64_t bytes, uint32_t access);
    // The memory may be gone soon, and other memory at its address: nobody may find the registration any more.
    void give(const std::shared_ptr<Registration> &registration, uint32_t access);

    VerbsDevice device;  // outlives what is registered

  private:
    struct Entry {
        std::shared_ptr<Registration> registration;
        uint32_t users;
    };
    std::mutex mu_;  // a leaf
    std::map<std::tuple<char *, uint64_t, uint32_t>, Entry> entries_;
};

// A registered cache.
struct VerbsMemory {
    std::shared_ptr<RegisteredDevice> device;
    std::vector<char *> tensors;
    uint64_t extent = 0;
    uint32_t access = 0;                                // ADT_REMOTE_*
    std::vector<std::shared_ptr<Registration>> pieces;  // in the order of their addresses

    // The piece that holds this byte.
    const Registration *find(const char *at) const;
    // Nobody finds the registrations any more. False: the device has not let go of one that nobody else uses.
    bool let_go(std::string &why);
};

// Throws VerbsError.
std::unique_ptr<VerbsMemory> register_memory(const std::shared_ptr<RegisteredDevice> &device,
                                             const adt_memory_t &memory);

class VerbsEndpoint;

// A peer's cache.
struct VerbsRemote {
    struct Piece {
        uint64_t base;
        uint64_t bytes;
        uint32_t rkey;
        uint32_t reserved;
    };
    uint64_t cache = 0;
    std::weak_ptr<VerbsEndpoint> endpoint;  // for which it was imported
    uint32_t access = 0;
    uint64_t extent = 0;
    std::vector<uint64_t> tensors;  // addresses over there
    std::vector<Piece> pieces;      // in their order

    const Piece *find(uint64_t address) const;
};

std::string verbs_key(const VerbsMemory &memory);
// Throws VerbsError: the key is no key, or does not fit the geometry.
std::unique_ptr<VerbsRemote> read_verbs_key(const adt_key_t &key, uint64_t cache, const adt_geometry_t &geometry);

}  // namespace adt
