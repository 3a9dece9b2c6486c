// SPDX-License-Identifier: Apache-2.0
#include "hixl_library.hpp"

#include <dlfcn.h>

#include <cstring>
#include <mutex>

namespace adt {

const char *const kHixlSymbols[] = {
    "_ZN2ge12AscendStringC1EPKc",
    "_ZNK2ge12AscendStringltERKS0_",
    "_ZN4hixl4HixlC1Ev",
    "_ZN4hixl4HixlD1Ev",
    "_ZN4hixl4Hixl10InitializeERKN2ge12AscendStringERKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE",
    "_ZN4hixl4Hixl8FinalizeEv",
    "_ZN4hixl4Hixl11RegisterMemERKNS_7MemDescENS_7MemTypeERPv",
    "_ZN4hixl4Hixl13DeregisterMemEPv",
    "_ZN4hixl4Hixl12ConnectAsyncERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl15DisconnectAsyncERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl21GetAsyncConnectStatusERKN2ge12AscendStringERNS_18AsyncConnectStatusE",
    ("_ZN4hixl4Hixl13TransferAsyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_"
     "EERKNS_12TransferArgsERPv"),
    "_ZN4hixl4Hixl17GetTransferStatusERKPvRNS_14TransferStatusE",
    "_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE",
};
const size_t kHixlSymbolCount = sizeof(kHixlSymbols) / sizeof(kHixlSymbols[0]);

namespace {

std::string loader_error() {
    const char *const said = dlerror();
    return said == nullptr ? "unknown error of the dynamic loader" : said;
}

// Opens all in their order. Empty: done.
std::string open_all(const HixlPlaces &places, HixlLibrary &out, void *&hixl) {
    // Lazily: the shim is to find what it calls, and libraries of CANN may name symbols that nobody ever needs.
    if (dlopen(places.metadef.c_str(), RTLD_LAZY | RTLD_GLOBAL) == nullptr) return loader_error();
    hixl = dlopen(places.hixl.c_str(), RTLD_LAZY | RTLD_GLOBAL);
    if (hixl == nullptr) return loader_error();
    void *const acl = dlopen(places.acl.c_str(), RTLD_LAZY | RTLD_GLOBAL);
    if (acl == nullptr) return loader_error();
    // A missing one would end the process at its first call.
    for (const char *const symbol : kHixlSymbols) {
        if (dlsym(RTLD_DEFAULT, symbol) == nullptr && dlsym(hixl, symbol) == nullptr) {
            return places.hixl + " lacks " + symbol + ": it is of a version of CANN that this library does not fit";
        }
    }
    out.set_device = reinterpret_cast<int32_t (*)(int32_t)>(dlsym(acl, "aclrtSetDevice"));
    if (out.set_device == nullptr) return places.acl + " lacks aclrtSetDevice";
    void *const shim = dlopen(places.shim.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (shim == nullptr) return "the package is damaged: " + loader_error();
    const auto entry = reinterpret_cast<adt_hixl_entry_t>(dlsym(shim, ADT_HIXL_ENTRY));
    if (entry == nullptr) return "the package is damaged: " + loader_error();
    out.api = entry();
    if (out.api->version != ADT_HIXL_API_VERSION || out.api->struct_size != sizeof(adt_hixl_api_t)) {
        return "the package is damaged: " + places.shim + " is of another version";
    }
    return {};
}

// Whether a name leads to a library that is open already: by another path, or by its name alone.
bool leads_to(const std::string &name, void *opened) {
    void *const found = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (found != nullptr) dlclose(found);
    return found == opened;
}

}  // namespace

const HixlLibrary *HixlLibrary::get(const HixlPlaces &places, std::string &why) {
    static std::mutex mu;
    static HixlLibrary *opened = nullptr;
    static void *handle = nullptr;
    static std::string *where = nullptr;
    const std::lock_guard<std::mutex> lock(mu);
    if (opened != nullptr) {
        if (leads_to(places.hixl, handle)) return opened;
        why = "this process has opened " + *where + " already, and cannot open " + places.hixl + " as well";
        return nullptr;
    }
    auto *const made = new HixlLibrary{};
    why = open_all(places, *made, handle);
    if (!why.empty()) {
        delete made;
        return nullptr;
    }
    where = new std::string(places.hixl);
    opened = made;
    return opened;
}

std::string hixl_status_words(uint32_t status) {
    const char *name = nullptr;
    switch (status) {
        case ADT_HIXL_SUCCESS:
            name = "SUCCESS";
            break;
        case ADT_HIXL_PARAM_INVALID:
            name = "PARAM_INVALID";
            break;
        case ADT_HIXL_TIMEOUT:
            name = "TIMEOUT";
            break;
        case ADT_HIXL_NOT_CONNECTED:
            name = "NOT_CONNECTED";
            break;
        case ADT_HIXL_ALREADY_CONNECTED:
            name = "ALREADY_CONNECTED";
            break;
        case ADT_HIXL_NOTIFY_FAILED:
            name = "NOTIFY_FAILED";
            break;
        case ADT_HIXL_UNSUPPORTED:
            name = "UNSUPPORTED";
            break;
        case ADT_HIXL_RESOURCE_EXHAUSTED:
            name = "RESOURCE_EXHAUSTED";
            break;
        case ADT_HIXL_FAILED:
            name = "FAILED";
            break;
        default:
            return "status " + std::to_string(status);
    }
    return std::string(name) + " (" + std::to_string(status) + ")";
}

}  // namespace adt
