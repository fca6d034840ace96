// The scheduler: fibers, barriers, LDS, launches.
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "collectives.h"

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

// zk_switch(place for this stack's pointer, stack to go on with)
asm(R"(.text
.globl zk_switch
.type zk_switch,@function
zk_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size zk_switch, .-zk_switch
)");
extern "C" void zk_switch(void** save, void* load);

namespace zk {
namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr unsigned LDS_BYTES = 64 * 1024;
/// Between LDS arrays, to see accesses past their ends. Does not count as used.
constexpr unsigned LDS_GAP = 64;
constexpr int MAX_ARRAYS = 32;
constexpr int MAX_BLOCK = 1024;

enum class State { Ready, InCollective, AtBarrier, Done };

struct Fiber {
    void* stack;
    State state;
};

struct LdsArray {
    const char* name;
    unsigned at, bytes;
};

/// The workgroup that runs.
struct Group {
    const zk_cpu_kernel* kernel = nullptr;
    void** params = nullptr;
    unsigned number = 0;
    int place[3] = {};
    int size = 0;
    std::vector<Fiber> fibers;
    std::vector<Wave> waves;
    int current = 0;
    void* scheduler = nullptr;

    alignas(64) char lds[LDS_BYTES + MAX_ARRAYS * LDS_GAP];
    LdsArray arrays[MAX_ARRAYS];
    int num_arrays = 0;
    unsigned lds_end = 0, lds_used = 0;

    int at_barrier = 0, live = 0;
    const char* barrier_site = nullptr;
    unsigned barriers = 0;
};

Group group;
char* stacks = nullptr;
bool running = false, failed = false;
std::string error;
int order = ZK_FORWARD;
zk_counts counts = {};
std::mt19937 shuffler(1);

std::map<std::string, const zk_cpu_kernel*>& kernels() {
    static std::map<std::string, const zk_cpu_kernel*> all;
    return all;
}

Fiber& fiber() { return group.fibers[group.current]; }
Wave& wave() { return group.waves[group.current / 64]; }
int lane() { return group.current % 64; }

void wait() { zk_switch(&fiber().stack, group.scheduler); }

/// A fiber's first and last function.
void run_item() {
    group.kernel->call(group.params);
    fiber().state = State::Done;
    group.live--;
    if (wave().arrived) fail("work-item %d ended while its wave waits at %s", group.current, wave().site);
    if (group.at_barrier) fail("work-item %d ended while others wait at barrier %s", group.current, group.barrier_site);
    wait();
}

void start_group(int x, int y, int z) {
    group.num_arrays = 0;
    group.lds_end = group.lds_used = 0;
    group.at_barrier = 0;
    group.live = group.size;
    group.place[0] = x;
    group.place[1] = y;
    group.place[2] = z;
    group.number++;
    for (size_t w = 0; w < group.waves.size(); w++) {
        group.waves[w] = Wave{};
        group.waves[w].lanes = std::min(64, group.size - (int)w * 64);
    }
    for (int i = 0; i < group.size; i++) {
        Fiber& f = group.fibers[i];
        f.state = State::Ready;
        // As if zk_switch had been called from run_item's caller: six registers and a return address, stack aligned as for a call.
        void** top = (void**)(stacks + (size_t)(i + 1) * STACK_BYTES) - 3;
        *--top = (void*)run_item;
        for (int r = 0; r < 6; r++) *--top = nullptr;
        f.stack = top;
    }
}

/// Runs one wave until all its lanes wait at a barrier or have ended. Whether anything ran.
bool run_wave(int w) {
    bool any = false, again = true;
    const int lanes = group.waves[w].lanes;
    while (again && !failed) {
        again = false;
        for (int j = 0; j < lanes && !failed; j++) {
            const int i = w * 64 + (order == ZK_REVERSE ? lanes - 1 - j : j);
            if (group.fibers[i].state != State::Ready) continue;
            group.current = i;
            zk_switch(&group.scheduler, group.fibers[i].stack);
            again = any = true;
        }
    }
    return any;
}

/// What the work-items that cannot go on wait for.
void report_deadlock() {
    for (int i = 0; i < group.size; i++) {
        if (group.fibers[i].state == State::InCollective) {
            const Wave& w = group.waves[i / 64];
            error = "deadlock: of a wave's " + std::to_string(w.lanes) + " lanes, " + std::to_string(w.arrived) + " came to " + w.site;
            failed = true;
            return;
        }
    }
    error = "deadlock: of " + std::to_string(group.live) + " work-items, " + std::to_string(group.at_barrier) + " came to barrier " +
            (group.barrier_site ? group.barrier_site : "(none)");
    failed = true;
}

void run_group(int x, int y, int z) {
    start_group(x, y, z);
    std::vector<int> sequence(group.waves.size());
    for (size_t i = 0; i < sequence.size(); i++)
        sequence[i] = (int)(order == ZK_REVERSE ? sequence.size() - 1 - i : i);
    while (group.live > 0 && !failed) {
        if (order == ZK_RANDOM) std::shuffle(sequence.begin(), sequence.end(), shuffler);
        bool any = false;
        for (int w : sequence) any |= run_wave(w);
        if (!any && !failed) report_deadlock();
    }
    counts.lds_bytes = std::max(counts.lds_bytes, group.lds_used);
}

}  // namespace

void fail(const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    error = text;
    failed = true;
    // The launch is over: the fiber is left where it is.
    for (;;) wait();
}

bool in_launch() { return running; }
int current_item() { return group.current; }
unsigned current_group() { return group.number; }
Clock current_clock() { return {group.barriers, wave().barriers}; }

Space space_of(const void* p, size_t bytes) {
    const char* at = (const char*)p;
    if (at >= group.lds && at < group.lds + sizeof group.lds) {
        const unsigned from = (unsigned)(at - group.lds);
        for (int i = 0; i < group.num_arrays; i++) {
            const LdsArray& a = group.arrays[i];
            if (from >= a.at && from + bytes <= a.at + a.bytes) return Space::Lds;
        }
        return Space::LdsGap;
    }
    return at >= stacks && at < stacks + MAX_BLOCK * STACK_BYTES ? Space::Stack : Space::Global;
}

}  // namespace zk

using namespace zk;

extern "C" {

void zk_register(const zk_cpu_kernel* k) { kernels()[k->name] = k; }

const zk_cpu_kernel* zk_cpu_find(const char* name) {
    auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second;
}

void zk_cpu_set_order(int o) { order = o; }
const char* zk_cpu_error(void) { return error.c_str(); }

zk_counts zk_cpu_counts(void) {
    zk_counts c = counts;
    counts = {};
    return c;
}

int zk_rt_item(void) { return group.current; }
int zk_rt_group(int axis) { return group.place[axis]; }

void* zk_rt_lds(const char* name, unsigned bytes) {
    for (int i = 0; i < group.num_arrays; i++)
        if (group.arrays[i].name == name) return group.lds + group.arrays[i].at;
    if (group.num_arrays == MAX_ARRAYS) fail("more than %d arrays in LDS", MAX_ARRAYS);
    const unsigned at = (group.lds_end + 15) & ~15u;
    group.lds_used = ((group.lds_used + 15) & ~15u) + bytes;
    if (group.lds_used > LDS_BYTES) fail("more than %u bytes of LDS", LDS_BYTES);
    group.arrays[group.num_arrays++] = {name, at, bytes};
    group.lds_end = at + bytes + LDS_GAP;
    memset(group.lds + at, 0xff, bytes);
    return group.lds + at;
}

void zk_rt_barrier(const char* site) {
    if (group.at_barrier && group.barrier_site != site)
        fail("divergent barrier: work-item %d at %s, others at %s", group.current, site, group.barrier_site);
    group.barrier_site = site;
    fiber().state = State::AtBarrier;
    if (++group.at_barrier == group.live) {
        if (group.live != group.size) fail("barrier %s without the work-items that have ended", site);
        group.at_barrier = 0;
        group.barriers++;
        counts.barriers++;
        for (Fiber& f : group.fibers)
            if (f.state == State::AtBarrier) f.state = State::Ready;
    }
    wait();
}

/// Takes part in a collective of the wave: waits until all lanes have come, and the last one does the work.
static void join(Op op, int arg, const char* site) {
    Wave& w = wave();
    if (w.arrived && (w.op != op || w.site != site || w.arg != arg))
        fail("divergent wave: lane %d at %s, others at %s%s", lane(), site, w.site, w.site == site ? " with another mask" : "");
    w.op = op;
    w.arg = arg;
    w.site = site;
    fiber().state = State::InCollective;
    if (++w.arrived < w.lanes) {
        wait();
        return;
    }
    if (op == Op::Mfma && w.lanes != 64) fail("a matrix product by a partial wave at %s", site);
    finish_collective(w);
    counts.shuffles += op == Op::Shuffle;
    counts.mfmas += op == Op::Mfma;
    w.arrived = 0;
    const int first = group.current / 64 * 64;
    for (int i = 0; i < w.lanes; i++) group.fibers[first + i].state = State::Ready;
}

void zk_rt_wave_barrier(const char* site) { join(Op::Barrier, 0, site); }

int zk_rt_shfl_xor(int v, int mask, const char* site) {
    wave().value[lane()] = v;
    join(Op::Shuffle, mask, site);
    return wave().result[lane()];
}

void zk_rt_mfma_16x16x16_bf16(const s16x4* a, const s16x4* b, f32x4* c, const char* site) {
    Wave& w = wave();
    w.a[lane()] = a;
    w.b[lane()] = b;
    w.c[lane()] = c;
    join(Op::Mfma, 0, site);
}

void zk_rt_atomic_add(float* p, float v) { *p += v; }

int zk_cpu_launch(const char* name, int grid_x, int grid_y, int grid_z, int block, void** params) {
    const zk_cpu_kernel* k = zk_cpu_find(name);
    failed = false;
    if (!k || k->block != block) {
        error = std::string(name) + (k ? ": has another number of work-items" : ": no such kernel");
        return 1;
    }
    if (!stacks) {
        void* all = mmap(nullptr, MAX_BLOCK * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) {
            error = "no memory for the work-items' stacks";
            return 1;
        }
        stacks = (char*)all;
    }
    group.kernel = k;
    group.params = params;
    group.size = block;
    group.fibers.resize(block);
    group.waves.resize((block + 63) / 64);
    race_new_launch();
    counts.launches++;
    running = true;
    for (int z = 0; z < grid_z && !failed; z++)
        for (int y = 0; y < grid_y && !failed; y++)
            for (int x = 0; x < grid_x && !failed; x++) run_group(x, y, z);
    running = false;
    if (failed) error = std::string(name) + ": " + error;
    return failed;
}
}
