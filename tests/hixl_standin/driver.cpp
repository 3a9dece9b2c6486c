// SPDX-License-Identifier: Apache-2.0
// Drives the STAND-IN by the published ABI alone, as another program would: a command a line on stdin, and for each a
// line on stdout that begins with the status. tests/test_hixl_standin.py gives the commands.
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <thread>

#include "published.hpp"

namespace {

using hixl::AscendString;

uint8_t *bytes(uintptr_t address) {
    return reinterpret_cast<uint8_t *>(address);
}

// What was registered as device memory is looked at by way of aclrtMemcpy.
std::string look(uintptr_t address, size_t size) {
    std::vector<uint8_t> copy(size);
    const bool device = standin_touches_device(address, size) != 0;
    if (aclrtMemcpy(copy.data(), size, bytes(address), size, device ? 2 : 0) != 0) return "?";
    for (const uint8_t byte : copy) {
        if (byte != copy[0]) return "mixed";
    }
    return std::to_string(copy[0]);
}

int fill(uintptr_t address, size_t size, int value) {
    if (standin_touches_device(address, size) != 0) return aclrtMemset(bytes(address), size, value, size);
    std::memset(bytes(address), value, size);
    return 0;
}

template <class T>
T next(std::istream &in) {
    T value{};
    in >> value;
    return value;
}

}  // namespace

int main() {
    auto engine = std::make_unique<hixl::Hixl>();
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        const auto command = next<std::string>(in);
        std::ostringstream out;
        if (command == "device") {
            out << aclrtSetDevice(next<int>(in));
        } else if (command == "init") {
            const auto name = next<std::string>(in);
            std::map<AscendString, AscendString> options;
            for (std::string key, value; in >> key >> value;) options[key.c_str()] = value.c_str();
            out << engine->Initialize(name.c_str(), options);
        } else if (command == "finalize") {
            engine->Finalize();
            out << 0;
        } else if (command == "malloc") {
            void *address = nullptr;
            const auto size = next<size_t>(in);
            const int status = aclrtMalloc(&address, size, next<int>(in));
            out << status << ' ' << reinterpret_cast<uintptr_t>(address);
        } else if (command == "host") {
            void *address = mmap(nullptr, next<size_t>(in), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            out << 0 << ' ' << reinterpret_cast<uintptr_t>(address);
        } else if (command == "pinned") {
            void *address = nullptr;
            const int status = aclrtMallocHost(&address, next<size_t>(in));
            out << status << ' ' << reinterpret_cast<uintptr_t>(address);
        } else if (command == "fill") {
            const auto address = next<uintptr_t>(in);
            const auto size = next<size_t>(in);
            out << fill(address, size, next<int>(in));
        } else if (command == "look") {
            const auto address = next<uintptr_t>(in);
            out << 0 << ' ' << look(address, next<size_t>(in));
        } else if (command == "touch") {
            out << 0 << ' ' << int{*bytes(next<uintptr_t>(in))};
        } else if (command == "register") {
            hixl::MemDesc mem{next<uintptr_t>(in), next<size_t>(in)};
            hixl::MemHandle handle = nullptr;
            const auto type = static_cast<hixl::MemType>(next<int>(in));
            const auto status = engine->RegisterMem(mem, type, handle);
            out << status << ' ' << reinterpret_cast<uintptr_t>(handle);
        } else if (command == "deregister") {
            out << engine->DeregisterMem(bytes(next<uintptr_t>(in)));
        } else if (command == "connect" || command == "disconnect") {
            const auto remote = next<std::string>(in);
            const auto ms = next<int32_t>(in);
            out << (command == "connect" ? engine->Connect(remote.c_str(), ms)
                                         : engine->Disconnect(remote.c_str(), ms));
        } else if (command == "connect_async" || command == "disconnect_async") {
            const auto remote = next<std::string>(in);
            const auto ms = next<int32_t>(in);
            out << (command == "connect_async" ? engine->ConnectAsync(remote.c_str(), ms)
                                               : engine->DisconnectAsync(remote.c_str(), ms));
        } else if (command == "connect_status") {
            hixl::AsyncConnectStatus state{};
            const auto status = engine->GetAsyncConnectStatus(next<std::string>(in).c_str(), state);
            out << status << ' ' << static_cast<int>(state);
        } else if (command == "connect_statuses") {
            std::map<AscendString, hixl::AsyncConnectStatus> states;
            out << engine->GetAsyncConnectStatus(states);
            for (const auto &[name, state] : states) out << ' ' << name.GetString() << '=' << static_cast<int>(state);
        } else if (command == "transfer" || command == "transfer_sync") {
            // remote op user_data (or ms) and triples local remote length
            const auto remote = next<std::string>(in);
            const auto op = static_cast<hixl::TransferOp>(next<int>(in));
            const auto extra = next<uintptr_t>(in);
            std::vector<hixl::TransferOpDesc> descs;
            for (hixl::TransferOpDesc desc{}; in >> desc.local_addr >> desc.remote_addr >> desc.len;) {
                descs.push_back(desc);
            }
            if (command == "transfer") {
                hixl::TransferArgs args;
                args.user_data = bytes(extra);
                hixl::TransferReq request = nullptr;
                const auto status = engine->TransferAsync(remote.c_str(), op, descs, args, request);
                out << status << ' ' << reinterpret_cast<uintptr_t>(request);
            } else {
                out << engine->TransferSync(remote.c_str(), op, descs, static_cast<int32_t>(extra));
            }
        } else if (command == "query") {
            hixl::TransferReq request = bytes(next<uintptr_t>(in));
            hixl::TransferStatus state{};
            const auto status = engine->GetTransferStatus(request, state);
            out << status << ' ' << static_cast<int>(state);
        } else if (command == "query_all") {
            hixl::GetTransferStatusArgs args;
            args.max_query_count = next<uint32_t>(in);
            args.skip_waiting = next<int>(in) != 0;
            std::vector<hixl::TransferResult> results;
            out << engine->GetTransferStatus(args, results);
            for (const auto &result : results) {
                out << ' ' << reinterpret_cast<uintptr_t>(result.req) << ':'
                    << reinterpret_cast<uintptr_t>(result.user_data) << ':' << static_cast<int>(result.status);
            }
        } else if (command == "notify") {
            const auto remote = next<std::string>(in);
            const auto name = next<std::string>(in);
            const std::string text(next<size_t>(in), 'x');
            out << engine->SendNotify(remote.c_str(), {name.c_str(), AscendString(text.data(), text.size())});
        } else if (command == "notifies") {
            std::vector<hixl::NotifyDesc> notifies;
            out << engine->GetNotifies(notifies);
            for (const auto &notify : notifies) {
                out << ' ' << notify.name.GetString() << ':' << notify.notify_msg.GetLength();
            }
        } else if (command == "capability") {
            int32_t value = -1;
            const auto status = hixl::Hixl::GetCapability(static_cast<hixl::FeatureType>(next<int>(in)), value);
            out << status << ' ' << value;
        } else if (command == "elsewhere") {
            // In a thread without a context.
            uint32_t status = 0;
            std::thread([&] {
                std::vector<hixl::NotifyDesc> notifies;
                status = engine->GetNotifies(notifies);
            }).join();
            out << status;
        } else if (command == "set") {
            const auto knob = next<std::string>(in);
            out << standin_set(knob.c_str(), next<int64_t>(in));
        } else if (command == "count") {
            out << 0 << ' ' << standin_count(next<std::string>(in).c_str());
        } else if (command == "violations") {
            char text[4096];
            const std::string lines(text, standin_violations(text, sizeof text));
            out << 0;
            for (const char c : lines) out << (c == '\n' ? ';' : c == ' ' ? '_' : c);
        } else {
            out << -1 << ' ' << command;
        }
        std::cout << out.str() << std::endl;
    }
    return 0;
}
