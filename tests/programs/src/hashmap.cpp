// A hash map of a stated size: insert, look up, erase, insert again, walk. Usage: hashmap MIB SEED
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
int main(int argc, char **argv) {
    if (argc != 3) return 2;
    using Value = std::array<uint64_t, 60>;
    const uint64_t mib = std::strtoull(argv[1], nullptr, 0), seed = std::strtoull(argv[2], nullptr, 0);
    const uint64_t entries = mib * (1 << 20) / (sizeof(Value) + 40);
    std::unordered_map<uint64_t, Value> map;
    auto value = [&](uint64_t i) { Value v; for (uint64_t k = 0; k < v.size(); k++) v[k] = mix(i * 13 + k); return v; };
    for (uint64_t i = 0; i < entries; i++) map.emplace(mix(i ^ seed), value(i));
    uint64_t sum = 0;
    for (uint64_t i = 0; i < entries / 20; i++) {
        const uint64_t k = mix(i ^ seed << 7) % entries;
        auto found = map.find(mix(k ^ seed));
        if (found == map.end() || found->second != value(k)) { std::fprintf(stderr, "entry %lu is wrong\n", k); return 3; }
        sum = mix(sum ^ found->second[k % Value().size()]);
    }
    for (uint64_t i = 0; i < entries; i += 3) map.erase(mix(i ^ seed));
    for (uint64_t i = 0; i < entries; i += 6) map.emplace(mix(i ^ seed), value(i + 7));
    uint64_t walked = 0;
    for (auto &[key, v] : map) walked += mix(key ^ v[3]);
    std::printf("ok %lu %lx %lx\n", map.size(), sum, walked);
}
