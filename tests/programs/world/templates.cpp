// What a compiler needs memory for: many instances of templates.
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#ifdef REGEX
#include <regex>
#endif
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

template <int N> struct Kind { int value = N; std::string name; };
template <int N> int use(int x) {
    std::map<int, Kind<N + PART>> ordered;
    std::unordered_map<std::string, std::vector<Kind<N + PART>>> hashed;
    std::variant<int, Kind<N + PART>, std::string> either = Kind<N + PART>{};
    for (int i = 0; i < x; i++) { ordered[i * N % 97].name += 'a'; hashed[std::to_string(i)].push_back({i, "b"}); }
    std::vector<Kind<N + PART>> all;
    for (auto &[key, each] : ordered) all.push_back(each);
    std::sort(all.begin(), all.end(), [](auto &a, auto &b) { return std::tie(a.name, a.value) < std::tie(b.name, b.value); });
    return int(hashed.size()) + int(all.size()) + int(either.index());
}
template <int... N> int uses(int x, std::integer_sequence<int, N...>) { return (use<N>(x) + ...); }
int PLACE(int x) {
    int sum = uses(x, std::make_integer_sequence<int, COUNT>{});
#ifdef REGEX
    sum += std::regex_match(std::to_string(x), std::regex("[0-9]+"));
#endif
    return sum;
}
