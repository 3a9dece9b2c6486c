// SPDX-License-Identifier: Apache-2.0
// The libraries of CANN, opened at run time, and the shim that calls HIXL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "hixl_api.h"

namespace adt {

// Paths, or bare names for the dynamic loader.
struct HixlPlaces {
    std::string metadef;
    std::string hixl;
    std::string acl;
    std::string shim;
};

struct HixlLibrary {
    const adt_hixl_api_t *api;
    int32_t (*set_device)(int32_t device);  // aclrtSetDevice, for the calling thread

    // Opened at the first call and never closed: CANN keeps threads and handlers. Null, and why: something is missing,
    // or another library was opened before. May take long.
    static const HixlLibrary *get(const HixlPlaces &places, std::string &why);
};

// Symbols of HIXL and its strings that the shim calls.
extern const char *const kHixlSymbols[];
extern const size_t kHixlSymbolCount;

// The name of a status code of HIXL, with its number.
std::string hixl_status_words(uint32_t status);

}  // namespace adt
