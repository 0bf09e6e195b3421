// The same with C++'s map. Usage: maps ENTRIES LOOKUPS
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <unordered_map>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const uint64_t entries = std::atoll(argv[1]), lookups = std::atoll(argv[2]);
    std::unordered_map<uint64_t, std::unique_ptr<std::array<uint64_t, 8>>> map;
    for (uint64_t i = 0; i < entries; i++) {
        auto value = std::make_unique<std::array<uint64_t, 8>>();
        value->fill(i);
        map.emplace(i, std::move(value));
    }
    uint64_t state = 1, sum = 0;
    for (uint64_t i = 0; i < lookups; i++) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        auto &value = *map.at((state >> 33) % entries);
        value[1] += i;
        sum = sum * 31 + (value[1] ^ value[7]);
    }
    std::printf("%lx\n", sum);
}
