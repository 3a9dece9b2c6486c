// SPDX-License-Identifier: Apache-2.0
// The transports built into the library, in the order in which `doctor` lists them.
#pragma once

#include "aiodatadist/transport.h"

namespace adt {

extern const adt_transport_ops_t kShmOps;
extern const adt_transport_ops_t kTcpOps;
extern const adt_transport_ops_t kVerbsOps;
extern const adt_transport_ops_t kHixlOps;
extern const adt_transport_ops_t kSimOps;

inline const adt_transport_ops_t *const kTransports[] = {&kShmOps, &kTcpOps, &kVerbsOps, &kHixlOps, &kSimOps};
constexpr unsigned kTransportCount = sizeof(kTransports) / sizeof(kTransports[0]);

}  // namespace adt
