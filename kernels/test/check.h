// Comparing results with references.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "array.h"
#include "tape.h"

/// Bounds on errors, as parts of the largest number of the reference. F32: a few hundred additions in f32. BF16: one rounding to
/// bf16 is at most 2^-9 of the number; results of products of rounded numbers add up a few of them.
constexpr double F32 = 2e-6, BF16 = 1.0 / 256, PRODUCT = 1.0 / 64;

/// Counts a failure, and prints it, if some number of `got` is further than `bound * max|want|` from `want`, or not a number.
void expect_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& want, double bound);
void expect_equal(const std::string& what, const std::vector<double>& got, const std::vector<double>& want);
template <class T>
void expect_close(const std::string& what, const Array<T>& got, const std::vector<double>& want, double bound) {
    expect_close(what, numbers(got), want, bound);
}
void expect(bool ok, const std::string& what);
int failures();

/// Inputs of a reference, each a list of numbers.
using Inputs = std::vector<std::vector<double>>;

/// Checks the gradient `g` of `f` at `x` against central differences along three random directions.
void expect_gradient(const std::string& what, const std::function<double(const Inputs&)>& f, const Inputs& x, const Inputs& g);

/// Gradient of `f(inputs)`, a template over the number type.
template <class F>
Inputs tape_gradient(const F& f, const Inputs& x) {
    Tape::the().nodes.clear();
    std::vector<std::vector<Var>> vars;
    for (const auto& list : x) {
        vars.emplace_back();
        for (double v : list) vars.back().push_back(Var::input(v));
    }
    const std::vector<double> all = gradients(f(vars));
    Inputs g;
    size_t at = 0;
    for (const auto& list : x) {
        g.emplace_back(all.begin() + at, all.begin() + at + list.size());
        at += list.size();
    }
    return g;
}

/// As `tape_gradient`; without rounding it is checked by differences.
template <class F>
Inputs gradient_of(const std::string& what, const F& f, const Inputs& x) {
    Rounding& rounding = Rounding::the();
    rounding = {false, false};
    Inputs g = tape_gradient(f, x);
    expect_gradient(what, [&](const Inputs& y) { return f(y); }, x, g);
    rounding.on = true;
    return rounding.used ? tape_gradient(f, x) : g;
}

/// Runs a test in all three orders of the work-items; `run` must give the same bits in each.
void in_all_orders(const std::string& what, const std::function<std::vector<std::vector<double>>()>& run);

/// Defines a test, which zk-test finds by its name.
struct Test {
    const char* name;
    void (*run)();
    /// Says something about the fiber runtime only.
    bool fibers_only;
};
void add_test(Test test);
#define ZK_TEST_OF(name, fibers_only) \
    static void test_##name(); \
    __attribute__((constructor)) static void add_##name() { add_test({#name, test_##name, fibers_only}); } \
    static void test_##name()
#define ZK_TEST(name) ZK_TEST_OF(name, false)
