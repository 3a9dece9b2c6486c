// SPDX-License-Identifier: Apache-2.0
// Drives a libFuzzer target where there is no libFuzzer: replays the corpus, then mutates it from fixed seeds.
//
//   fuzz_main [--runs N] [--seed S] CORPUS...
//
// Blind, that is without coverage, so the target's own grammar has to bring it deep. What fails is written to
// crash.bin.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

class Mutator {
  public:
    Mutator(uint64_t seed, const std::vector<Bytes> &corpus) : random_(seed), corpus_(corpus) {}

    Bytes next() {
        Bytes made = corpus_.empty() ? Bytes{} : corpus_[below(corpus_.size())];
        for (size_t changes = 1 + below(12); changes > 0; --changes) change(made);
        if (made.size() > 4096) made.resize(4096);
        return made;
    }

  private:
    size_t below(size_t limit) { return static_cast<size_t>(random_() % limit); }
    uint8_t byte() {
        constexpr uint8_t edges[] = {0, 1, 2, 127, 128, 254, 255};
        return below(3) == 0 ? edges[below(sizeof(edges))] : static_cast<uint8_t>(random_());
    }

    void change(Bytes &made) {
        const size_t at = below(made.size() + 1);
        const auto place = made.begin() + static_cast<std::ptrdiff_t>(at);
        switch (below(7)) {
            case 0:
                made.insert(place, byte());
                break;
            case 1:
                if (at < made.size()) made[at] = byte();
                break;
            case 2:
                if (at < made.size()) made[at] = static_cast<uint8_t>(made[at] ^ (1u << below(8)));
                break;
            case 3:
                made.erase(place, place + static_cast<std::ptrdiff_t>(std::min(below(16), made.size() - at)));
                break;
            case 4: {
                const Bytes other = corpus_.empty() ? Bytes{} : corpus_[below(corpus_.size())];
                if (other.empty()) break;
                const size_t from = below(other.size());
                const size_t size = 1 + below(other.size() - from);
                made.insert(place, other.begin() + static_cast<std::ptrdiff_t>(from),
                            other.begin() + static_cast<std::ptrdiff_t>(from + size));
                break;
            }
            default:
                // A record of the target's grammar: an operation and a few bytes.
                for (size_t n = 1 + below(14); n > 0; --n) {
                    made.insert(made.begin() + static_cast<std::ptrdiff_t>(at), byte());
                }
        }
    }

    std::mt19937_64 random_;
    const std::vector<Bytes> &corpus_;
};

Bytes current;

void keep_current() {
    std::ofstream out("crash.bin", std::ios::binary);
    out.write(reinterpret_cast<const char *>(current.data()), static_cast<std::streamsize>(current.size()));
}

// Sanitizers call this when they have reported.
extern "C" void __asan_on_error() {
    keep_current();
}

}  // namespace

int main(int argc, char **argv) {
    uint64_t runs = 10'000;
    uint64_t seed = 1;
    std::vector<Bytes> corpus;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--runs" && i + 1 < argc) {
            runs = std::strtoull(argv[++i], nullptr, 10);
        } else if (argument == "--seed" && i + 1 < argc) {
            seed = std::strtoull(argv[++i], nullptr, 10);
        } else {
            std::vector<std::filesystem::path> files;
            if (std::filesystem::is_directory(argument)) {
                for (const auto &entry : std::filesystem::directory_iterator(argument)) files.push_back(entry.path());
                std::sort(files.begin(), files.end());
            } else {
                files.push_back(argument);
            }
            for (const auto &path : files) {
                std::ifstream in(path, std::ios::binary);
                if (!in) {
                    std::fprintf(stderr, "fuzz_main: cannot read %s\n", path.c_str());
                    return 2;
                }
                corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
            }
        }
    }
    std::atexit(keep_current);  // unless all passes
    for (const Bytes &input : corpus) {
        current = input;
        LLVMFuzzerTestOneInput(current.data(), current.size());
    }
    Mutator mutator(seed, corpus);
    for (uint64_t i = 0; i < runs; ++i) {
        current = mutator.next();
        LLVMFuzzerTestOneInput(current.data(), current.size());
    }
    std::printf("fuzz_main: %zu of the corpus and %llu made from seed %llu passed\n", corpus.size(),
                static_cast<unsigned long long>(runs), static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    std::_Exit(0);
}
