// The fiber runtime must find each fault of detector.zk.cpp, in every order of the work-items, and say what it is.
#include <cmath>

#include "../cpu/runtime.h"
#include "check.h"

namespace {

/// Runs the kernel with a fault. The runtime's message, or "wrong numbers", or nothing.
std::string find(int fault) {
    Array<float> x(256), out(256);
    for (int i = 0; i < 256; i++) x[i] = (float)(i % 7) + 1;
    zk_cpu_allow_none();
    zk_cpu_allow(x.v.data(), x.size() * 4);
    zk_cpu_allow(out.v.data(), out.size() * 4);
    const float *in = x.v.data(), *to = out.v.data();
    void* params[] = {&in, &to, &fault};
    if (zk_cpu_launch("detector", 2, 1, 1, 128, params)) return zk_cpu_error();
    for (int i = 0; i < 256; i++) {
        float sum = 0.0f;
        for (int j = 0; j < 64; j++) sum += x[i / 64 * 64 + j];
        if (out[i] != 2 * sum) return "wrong numbers";
    }
    return "";
}

}  // namespace

ZK_TEST_OF(detector, true) {
    const char* messages[] = {
        "", "data race in LDS", "data race in LDS", "data race in LDS|divergent barrier|deadlock", "divergent barrier",
        "deadlock|divergent wave", "divergent wave", "ended while|without the work-items|deadlock",
        "data race in global memory", "of another workgroup", "data race in LDS", "outside the LDS arrays", "outside all buffers",
        "deadlock|divergent wave|partial wave|ended while", "wrong numbers", "wrong numbers",
    };
    for (int order : {ZK_FORWARD, ZK_REVERSE, ZK_RANDOM}) {
        zk_cpu_set_order(order);
        for (int fault = 0; fault < (int)std::size(messages); fault++) {
            const std::string found = find(fault), any = messages[fault];
            bool ok = any.empty() && found.empty();
            for (size_t from = 0; !any.empty() && from <= any.size();) {
                const size_t to = std::min(any.find('|', from), any.size());
                ok |= found.find(any.substr(from, to - from)) != std::string::npos;
                from = to + 1;
            }
            expect(ok, "detector: fault " + std::to_string(fault) + " in order " + std::to_string(order) + " gives '" + found + "'");
        }
    }
    zk_cpu_set_order(ZK_FORWARD);
    int fault = 0;
    void* params[] = {&fault, &fault, &fault};
    expect(zk_cpu_launch("detector", 1, 1, 1, 64, params) == 1, "detector: a launch with the wrong block is refused");
    expect(zk_cpu_launch("no such", 1, 1, 1, 64, params) == 1, "detector: an unknown kernel is refused");
}
