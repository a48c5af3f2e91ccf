// A kernel that does nothing but take time, for tests of order.
#include "ptx.cuh"

extern "C" __global__ void delay(u64 nanoseconds) {
    const u64 start = nanoseconds_now();
    while (nanoseconds_now() - start < nanoseconds) __nanosleep(1000);
}
