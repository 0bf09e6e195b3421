// Breadth-first search by OpenMP threads in a random graph. Usage: graph NODES DEGREE
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const uint32_t nodes = std::atoi(argv[1]), degree = std::atoi(argv[2]);
    std::vector<uint32_t> edges(size_t(nodes) * degree);
#pragma omp parallel for
    for (size_t i = 0; i < edges.size(); i++) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ULL;
        x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ULL;
        edges[i] = (x ^ (x >> 29)) % nodes;
    }
    std::vector<std::atomic<int>> depth(nodes);
    for (auto &each : depth) each = -1;
    std::vector<uint32_t> front{0};
    depth[0] = 0;
    uint64_t sum = 0;
    for (int level = 1; !front.empty(); level++) {
        std::vector<uint32_t> next;
#pragma omp parallel
        {
            std::vector<uint32_t> mine;
#pragma omp for schedule(dynamic, 256)
            for (size_t f = 0; f < front.size(); f++)
                for (uint32_t e = 0; e < degree; e++) {
                    const uint32_t to = edges[size_t(front[f]) * degree + e];
                    int unseen = -1;
                    if (depth[to].compare_exchange_strong(unseen, level)) mine.push_back(to);
                }
#pragma omp critical
            next.insert(next.end(), mine.begin(), mine.end());
        }
        sum += next.size() * level;
        front.swap(next);
    }
    std::printf("%lu\n", sum);
}
