// The fiber runtime: what a program that launches kernels calls, and what the runtime's own files share.
//
// A launch runs its workgroups one after the other on the calling thread; each work-item is a fiber that runs until it waits
// for others. It finds:
//   * a barrier or a wave's collective that not all reach, or that some reach at another place of the source;
//   * work-items that end while others wait for them;
//   * more than 64 KiB of LDS, and reads of LDS that nothing wrote (LDS begins as NaN);
//   * data races: two accesses to the same place of LDS or global memory, one of them a write, by work-items with no barrier
//     between them - of one workgroup, or of two (which nothing orders within a launch). Lanes of one wave count as ordered by
//     zk_wave_barrier too, not by collectives;
//   * accesses outside LDS arrays, and outside the buffers named with zk_cpu_allow, if any are.
// Kernels must be compiled with -fsanitize=thread for the last two: the runtime takes the place of that sanitizer's library.
// Memory is watched in units of 2 bytes.
#pragma once
#include "../zk.h"

extern "C" {
/// Order in which waves, and lanes within them, get to run.
enum zk_order { ZK_FORWARD = 0, ZK_REVERSE = 1, ZK_RANDOM = 2 };
void zk_cpu_set_order(int order);

/// Names a buffer that kernels may use; forgets all of them.
void zk_cpu_allow(const void* start, size_t bytes);
void zk_cpu_allow_none(void);

/// The kernel of that name, or null.
const zk_cpu_kernel* zk_cpu_find(const char* name);

/// Runs a kernel; `params` are pointers to its arguments. 0, or 1 and zk_cpu_error() says what is wrong.
int zk_cpu_launch(const char* name, int grid_x, int grid_y, int grid_z, int block, void** params);
const char* zk_cpu_error(void);

struct zk_counts {
    unsigned long long launches, barriers, shuffles, mfmas;
    unsigned lds_bytes;
};
/// Counts since the last call; lds_bytes is the most that one workgroup had.
zk_counts zk_cpu_counts(void);
}

namespace zk {

struct Clock {
    /// Barriers that the workgroup has passed in this launch, and the wave's own ones.
    unsigned barriers, wave_barriers;
};

/// Ends the launch with a message; does not return.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// Where an address lies.
enum class Space { Lds, LdsGap, Stack, Global };

// What the race detector asks the scheduler.
bool in_launch();
int current_item();
unsigned current_group();
Clock current_clock();
Space space_of(const void* p, size_t bytes);

// What the scheduler tells the race detector.
void race_new_launch();

}  // namespace zk
