// SPDX-License-Identifier: Apache-2.0
// How a DataDist comes by its engine of HIXL.
#pragma once

#include <memory>
#include <string>

#include "aiodatadist/transport.h"
#include "hixl_agent.hpp"

namespace adt {

// Opens the libraries and an engine; may take seconds. Null, and why. Else words for people.
std::shared_ptr<HixlAgent> open_hixl(const HixlSettings &settings, std::string &words);

// Has the transport of an engine keep it until its end.
void adopt_hixl(adt_transport_h transport, std::shared_ptr<HixlAgent> agent);

}  // namespace adt
