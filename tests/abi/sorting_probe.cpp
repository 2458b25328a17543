// Sorts by libstdc++'s std::sort with comparators that are no order, and looks for reads and writes outside.
//
// Usage: sorting_probe SEED N. Each of N rows has 17 to 76 numbers, which std::sort's two parts sort. The first part goes over to
// heap sort after 0 to 7 levels, which a hostile row could reach too. Of two numbers, at most one is before the other: by
// values with NaNs, by chance, or by values with wrong and missing pairs. The exit status is 1 if a row was left.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

const int AROUND = 32;  // numbers on each side of a row, which are no index of it

struct Relation {
    int n;
    std::vector<bool> is_before;  // [n * n]
    void set(int i, int j, bool first, bool second) {
        is_before[i * n + j] = first;
        is_before[j * n + i] = second;
    }
};

Relation related(std::mt19937 & random, int n) {
    Relation found{n, std::vector<bool>(n * n)};
    std::vector<int> values(n);
    std::vector<bool> is_nan(n);
    const unsigned share = random() % 40, a = random() % 100, b = random() % 100, kind = random() % 3;
    for (int i = 0; i < n; i++) {
        values[i] = random() % (2 + random() % n);
        is_nan[i] = random() % 40 < share;
    }
    for (int i = 0; i < n; i++) {
        for (int j = i + 1; j < n; j++) {
            bool first = values[i] < values[j], second = values[j] < values[i];
            if (kind == 0) {
                const bool compares = !is_nan[i] && !is_nan[j];
                first &= compares, second &= compares;
            } else if (kind == 1) {
                first = random() % 100 < a;
                second = !first && random() % 100 < b;
            } else if (random() % 100 < a) {
                first = second = false;
            } else if (random() % 100 < b / 4) {
                std::swap(first, second);
            }
            found.set(i, j, first, second);
        }
    }
    return found;
}

}  // namespace

int main(int n_words, char ** words) {
    if (n_words < 3) return 2;
    std::mt19937 random(std::atoi(words[1]));
    for (int row = std::atoi(words[2]); row > 0; row--) {
        const int n = 17 + random() % 60;
        const Relation relation = related(random, n);
        std::vector<int> memory(n + 2 * AROUND, -1);
        const auto first = memory.begin() + AROUND, end = first + n;
        for (int i = 0; i < n; i++) first[i] = i;
        std::shuffle(first, end, random);
        bool has_left = false;
        auto compare = [&](int i, int j) {
            has_left |= i < 0 || j < 0;
            return i >= 0 && j >= 0 && relation.is_before[i * n + j];
        };
        auto by = __gnu_cxx::__ops::__iter_comp_iter(compare);
        std::__introsort_loop(first, end, static_cast<int>(random() % 8), by);
        std::__final_insertion_sort(first, end, by);
        const auto is_ours = [](int value) { return value == -1; };
        has_left |= !std::all_of(memory.begin(), first, is_ours) || !std::all_of(end, memory.end(), is_ours);
        std::sort(first, end);
        for (int i = 0; i < n; i++) has_left |= first[i] != i;
        if (has_left) {
            std::printf("a row of %d numbers was left, %d rows before the end\n", n, row);
            return 1;
        }
    }
    return 0;
}
