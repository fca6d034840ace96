// The data-race detector. The compiler's thread sanitizer puts a call before each access to memory; the functions it calls are
// here. For each 2 bytes the last write and two reads are kept, with who did them and how many barriers had been passed.
#include <unordered_map>
#include <vector>

#include "runtime.h"

namespace zk {
namespace {

struct Access {
    /// Number of the workgroup over all launches; 0 = none yet.
    unsigned group;
    unsigned barriers, wave_barriers;
    int item;
};

struct Cell {
    Access write, read, other_read;
};

constexpr size_t UNIT = 2, PAGE_UNITS = 2048;
struct Page {
    Cell cells[PAGE_UNITS] = {};
};

struct Buffer {
    const char *start, *end;
};

std::unordered_map<size_t, Page>& pages() {
    static std::unordered_map<size_t, Page> all;
    return all;
}
size_t last_number = ~(size_t)0;
Page* last_page = nullptr;
std::vector<Buffer> buffers;
/// Workgroups before this one belong to earlier launches, which are over.
unsigned first_group = 0;

Cell& cell(size_t unit) {
    const size_t number = unit / PAGE_UNITS;
    if (number != last_number) {
        last_page = &pages()[number];
        last_number = number;
    }
    return last_page->cells[unit % PAGE_UNITS];
}

/// Whether an earlier access is not ordered before one of now.
bool concurrent(const Access& before, const Access& now, Space space) {
    if (before.group < first_group || before.group == 0) return false;
    if (before.group != now.group) return space == Space::Global;  // LDS is another group's
    if (before.item == now.item || before.barriers != now.barriers) return false;
    return before.item / 64 != now.item / 64 || before.wave_barriers == now.wave_barriers;
}

void check_place(const void* p, size_t bytes, Space space, bool writes) {
    const char* verb = writes ? "writes" : "reads";
    if (space == Space::LdsGap) fail("work-item %d %s %zu bytes outside the LDS arrays", current_item(), verb, bytes);
    if (space != Space::Global || buffers.empty()) return;
    for (const Buffer& b : buffers)
        if ((const char*)p >= b.start && (const char*)p + bytes <= b.end) return;
    fail("work-item %d of group %u %s %zu bytes outside all buffers", current_item(), current_group() - first_group, verb, bytes);
}

void report(const Access& before, const char* verb_before, bool writes, Space space) {
    fail("data race in %s: work-item %d %s where work-item %d%s %s, with no barrier between", space == Space::Lds ? "LDS" : "global memory",
        current_item(), writes ? "writes" : "reads", before.item, before.group == current_group() ? "" : " of another workgroup", verb_before);
}

/// Keeps a read that could race with a later write: of two readers at one time, preferably of different waves.
void note_read(Cell& c, const Access& now, Space space) {
    if (!concurrent(c.read, now, space)) {
        c.read = now;
        return;
    }
    const bool other_is_far = concurrent(c.other_read, now, space) && c.other_read.item / 64 != c.read.item / 64;
    if (!other_is_far) c.other_read = now;
}

void access(const void* p, size_t bytes, bool writes) {
    if (!in_launch()) return;
    const Space space = space_of(p, bytes);
    if (space == Space::Stack) return;
    check_place(p, bytes, space, writes);
    const Clock clock = current_clock();
    const Access now = {current_group(), clock.barriers, clock.wave_barriers, current_item()};
    const size_t from = (size_t)p / UNIT, to = ((size_t)p + bytes - 1) / UNIT;
    for (size_t unit = from; unit <= to; unit++) {
        Cell& c = cell(unit);
        if (concurrent(c.write, now, space)) report(c.write, "wrote", writes, space);
        if (!writes) {
            note_read(c, now, space);
            continue;
        }
        if (concurrent(c.read, now, space)) report(c.read, "read", true, space);
        if (concurrent(c.other_read, now, space)) report(c.other_read, "read", true, space);
        c.write = now;
    }
}

}  // namespace

void race_new_launch() { first_group = current_group() + 1; }

}  // namespace zk

extern "C" {

void zk_cpu_allow(const void* start, size_t bytes) { zk::buffers.push_back({(const char*)start, (const char*)start + bytes}); }
void zk_cpu_allow_none(void) { zk::buffers.clear(); }

#define ZK_HOOKS(bytes) \
    void __tsan_read##bytes(void* p) { zk::access(p, bytes, false); } \
    void __tsan_write##bytes(void* p) { zk::access(p, bytes, true); } \
    void __tsan_unaligned_read##bytes(void* p) { zk::access(p, bytes, false); } \
    void __tsan_unaligned_write##bytes(void* p) { zk::access(p, bytes, true); }
ZK_HOOKS(1)
ZK_HOOKS(2)
ZK_HOOKS(4)
ZK_HOOKS(8)
ZK_HOOKS(16)

void __tsan_init(void) {}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    zk::access(from, bytes, false);
    zk::access(to, bytes, true);
    return memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
    zk::access(to, bytes, true);
    return memset(to, value, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    zk::access(from, bytes, false);
    zk::access(to, bytes, true);
    return memmove(to, from, bytes);
}
}
