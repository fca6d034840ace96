#include "check.h"

#include <algorithm>
#include <cstdio>

#include "../cpu/runtime.h"

static int failed = 0;

int failures() { return failed; }

double nearest_bf16(double x) { return rounded(x); }

void expect(bool ok, const std::string& what) {
    if (ok) return;
    failed++;
    printf("FAILED %s\n", what.c_str());
}

void expect_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& want, double bound) {
    if (got.size() != want.size()) {
        expect(false, what + ": " + std::to_string(got.size()) + " numbers instead of " + std::to_string(want.size()));
        return;
    }
    double largest = 1e-9, error = 0.0;
    size_t worst = 0;
    for (double w : want) largest = std::max(largest, std::fabs(w));
    for (size_t i = 0; i < got.size(); i++) {
        const double e = std::fabs(got[i] - want[i]);
        if (!(e <= error)) {
            error = e;
            worst = i;
            if (std::isnan(e)) break;
        }
    }
    if (error <= bound * largest) return;
    char text[256];
    snprintf(text, sizeof text, ": [%zu] is %.9g, not %.9g: off by %.3g of the largest, allowed %.3g", worst, got[worst], want[worst],
             error / largest, bound);
    expect(false, what + text);
}

void expect_equal(const std::string& what, const std::vector<double>& got, const std::vector<double>& want) {
    for (size_t i = 0; i < std::max(got.size(), want.size()); i++) {
        if (i < got.size() && i < want.size() && (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i])))) continue;
        expect(false, what + ": differs at " + std::to_string(i) + ": " + (i < got.size() ? std::to_string(got[i]) : "nothing") + ", not " +
                          (i < want.size() ? std::to_string(want[i]) : "nothing"));
        return;
    }
}

void expect_gradient(const std::string& what, const std::function<double(const Inputs&)>& f, const Inputs& x, const Inputs& g) {
    Random random(7);
    for (int trial = 0; trial < 3; trial++) {
        Inputs plus = x, minus = x;
        double along = 0.0, size = 0.0;
        const double step = 1e-6;
        for (size_t i = 0; i < x.size(); i++) {
            for (size_t j = 0; j < x[i].size(); j++) {
                const double d = random.normal();
                plus[i][j] += step * d;
                minus[i][j] -= step * d;
                along += g[i][j] * d;
                size += g[i][j] * g[i][j];
            }
        }
        const double difference = (f(plus) - f(minus)) / (2 * step);
        if (std::fabs(difference - along) <= 1e-6 * std::sqrt(size) + 1e-7 * std::fabs(f(x))) continue;
        expect(false, what + ": reference gradient along a direction is " + std::to_string(along) + ", by differences " +
                          std::to_string(difference));
    }
}

void in_all_orders(const std::string& what, const std::function<std::vector<std::vector<double>>()>& run) {
    std::vector<std::vector<double>> first;
    for (int order : {ZK_FORWARD, ZK_REVERSE, ZK_RANDOM}) {
        zk_cpu_set_order(order);
        const auto results = run();
        if (order == ZK_FORWARD) first = results;
        for (size_t i = 0; i < results.size(); i++)
            expect_equal(what + ", result " + std::to_string(i) + " in another order", results[i], first[i]);
    }
    zk_cpu_set_order(ZK_FORWARD);
}
