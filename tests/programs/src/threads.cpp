// Threads that share and divide memory: a parallel sort, a queue between producers and consumers, allocation on one thread and release on
// another, thread-local buffers. Usage: threads MIB THREADS SEED
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
static thread_local std::vector<uint64_t> mine;

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const uint64_t mib = std::strtoull(argv[1], nullptr, 0), count = std::strtoull(argv[2], nullptr, 0), seed = std::strtoull(argv[3], nullptr, 0);
    const uint64_t words = mib * (1 << 20) / 2 / 8 / count * count;
    std::vector<uint64_t> data(words);
    std::vector<std::thread> threads;
    const uint64_t part = words / count;
    for (uint64_t t = 0; t < count; t++)
        threads.emplace_back([&, t] { for (uint64_t i = t * part; i < (t + 1) * part; i++) data[i] = mix(i ^ seed); std::sort(data.begin() + t * part, data.begin() + (t + 1) * part); });
    for (auto &t : threads) t.join();
    threads.clear();
    for (uint64_t width = part; width < words; width *= 2)
        for (uint64_t at = 0; at + width < words; at += 2 * width)
            std::inplace_merge(data.begin() + at, data.begin() + at + width, data.begin() + std::min(words, at + 2 * width));
    if (!std::is_sorted(data.begin(), data.end())) { std::fprintf(stderr, "not sorted\n"); return 3; }
    uint64_t sum = 0;
    for (uint64_t i = 0; i < words; i += 97) sum = mix(sum ^ data[i]);
    data.clear(); data.shrink_to_fit();

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::unique_ptr<std::vector<uint64_t>>> queue;
    const uint64_t block = 16384, blocks = mib * (1 << 20) / 2 / (block * 8);
    uint64_t made = 0, taken = 0, total = 0;
    for (uint64_t t = 0; t < count; t++)
        threads.emplace_back([&] {
            for (;;) {
                uint64_t n;
                { std::lock_guard g(lock); if (made == blocks) return; n = made++; }
                auto v = std::make_unique<std::vector<uint64_t>>(block);
                for (uint64_t i = 0; i < block; i++) (*v)[i] = mix(n * block + i);
                mine.assign(v->begin(), v->begin() + 4096);
                { std::lock_guard g(lock); queue.push_back(std::move(v)); }
                changed.notify_all();
            }
        });
    // Nothing is taken before most of it is made: the queue must outgrow every budget.
    for (uint64_t t = 0; t < count; t++)
        threads.emplace_back([&] {
            for (;;) {
                std::unique_ptr<std::vector<uint64_t>> v;
                {
                    std::unique_lock g(lock);
                    changed.wait(g, [&] { return taken == blocks || (made == blocks && !queue.empty()); });
                    if (taken == blocks) return;
                    v = std::move(queue.front()); queue.pop_front(); taken++;
                }
                changed.notify_all();
                uint64_t s = std::accumulate(v->begin(), v->end(), uint64_t(0));
                std::lock_guard g(lock);
                total += s;
            }
        });
    for (auto &t : threads) t.join();
    uint64_t expected = 0;
    for (uint64_t i = 0; i < blocks * block; i++) expected += mix(i);
    if (total != expected) { std::fprintf(stderr, "the queue lost something\n"); return 3; }
    std::printf("ok %lx %lx\n", sum, total);
}
