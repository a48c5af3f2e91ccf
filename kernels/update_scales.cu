// Amaxes to ring entries and scales, for a whole table in one block: first a vote whether the bank
// is taken at all, then the slots.
#include "table.cuh"

struct __align__(16) UpdateEntry {
    u64 slots;
    u32* bank;
    SlotRecord* records;
    float* rings;
    u32* status;  // host memory: a StatusHeader, then a word per slot
    u32 history, most_recent, margin, power_of_two;
};
static_assert(sizeof(UpdateEntry) == 64, "src/cuda/tables.rs");

#define UPDATE_THREADS 1024

// Bits of SlotRecord::flags.
static const u32 INPUT = 1, GRADIENT = 2, SLOT_E5M2 = 4, DELAYED = 8, SEED = 16;

G8_FN bool fatal(u32 word, u32 flags) {
    return (word & TOUCHED) != 0 && (word & ~TOUCHED) >= INF_BITS && (flags & (INPUT | GRADIENT)) == 0;
}

G8_FN void update_slot(u32 word, SlotRecord& record, float* ring, const UpdateEntry& e) {
    if ((word & TOUCHED) == 0) return;
    const u32 bits = word & ~TOUCHED;
    if (bits >= INF_BITS) {
        record.non_finite++;
        return;
    }
    const float amax = float_of(bits);
    const bool delayed = record.flags & DELAYED;
    u32 any = 0;
    for (u32 k = 0; k < e.history; k++) any |= bits_of(ring[k]);
    const bool fill = (record.flags & SEED) || any == 0;
    float most = amax;
    if (fill) {
        for (u32 k = 0; k < e.history; k++) ring[k] = amax;
        record.position = 0;
        record.flags &= ~SEED;
    } else {
        const u32 position = record.position % e.history;
        ring[position] = amax;
        record.position = (position + 1) % e.history;
    }
    if (delayed && !e.most_recent) {
        // As the reference folds: from 0, so that a ring of zeros of either sign gives +0.
        most = 0.0f;
        for (u32 k = 0; k < e.history; k++) most = fmaxf(most, ring[k]);
    }
    const double largest = record.flags & SLOT_E5M2 ? (double)E5M2::max() : (double)E4M3::max();
    const float next = scale_of(largest, most, e.margin, e.power_of_two != 0), inverse = 1.0f / next;
    const bool late = delayed && !fill;
    record.cast = late ? record.published : next;
    record.cast_inv = late ? record.published_inv : inverse;
    record.published = next;
    record.published_inv = inverse;
    record.version++;
}

extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) update_scales(const UpdateEntry* entry) {
    const UpdateEntry e = *entry;
    StatusHeader* header = (StatusHeader*)e.status;
    u32* marks = e.status + 4;
    const u32* order = e.bank + e.slots;
    const bool disordered = order[2] != ~order[0] || order[3] != ~order[1];
    bool bad = false;
    for (u64 s = threadIdx.x; s < e.slots; s += UPDATE_THREADS) bad |= fatal(e.bank[s], e.records[s].flags);
    // The barrier also keeps the bank as it is until every thread has read it.
    const bool refused = __syncthreads_or(bad) && !disordered;
    for (u64 s = threadIdx.x; s < e.slots; s += UPDATE_THREADS) {
        const u32 word = e.bank[s];
        if (refused) {
            marks[s] = fatal(word, e.records[s].flags) ? 1 : 0;
        } else if (!disordered) {
            SlotRecord record = e.records[s];
            update_slot(word, record, e.rings + s * e.history, e);
            e.records[s] = record;
        }
        e.bank[s] = 0;
    }
    if (threadIdx.x < 4) e.bank[e.slots + threadIdx.x] = 0;
    // The host reads the counters as the sign that the words before them are there.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (refused) header->refused++;
        if (disordered) header->disordered++;
        __threadfence_system();
        header->syncs++;
    }
}
