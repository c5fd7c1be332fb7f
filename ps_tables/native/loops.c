/* The loops of tables over rows and ids, in C. Each does what numpy or torch does in its place, with the same bits.

   So no product may be fused with a sum but where it says so, and sums are made in the order of their terms: compile
   without -ffast-math and with -ffp-contract=off. Rows lie far apart in memory: what is next is fetched ahead. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "loops.h"

#if FLT_EVAL_METHOD != 0
#error "floats are computed with more bits here than torch has"
#endif

enum { ROWS_AHEAD = 8, SLOTS_AHEAD = 16, LINE = 64 };

static uint64_t mixed(int64_t id)
{
    uint64_t bits = (uint64_t)id;
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93u;
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93u;
    return bits ^ bits >> 32;
}

static void fetch(const char *record, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE)
        __builtin_prefetch(record + at);
}

static int64_t clipped(int64_t place, int64_t capacity)
{
    return place < 0 ? 0 : place < capacity ? place : capacity - 1;
}

static int are_inside(const int64_t *places, int64_t n, int64_t capacity)
{
    int outside = 0;
    for (int64_t i = 0; i < n; i++)
        outside |= (uint64_t)places[i] >= (uint64_t)capacity;
    return !outside;
}

void ps_gather(const char *records, int64_t capacity, int64_t bytes, const int64_t *places, int64_t n, char *out)
{
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(records + clipped(places[i + ROWS_AHEAD], capacity) * bytes, bytes);
        memcpy(out + i * bytes, records + clipped(places[i], capacity) * bytes, bytes);
    }
}

int ps_scatter(char *records, int64_t capacity, int64_t bytes, const int64_t *places, int64_t n, const char *values)
{
    if (!are_inside(places, n, capacity))
        return 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(records + places[i + ROWS_AHEAD] * bytes, bytes);
        memcpy(records + places[i] * bytes, values + i * bytes, bytes);
    }
    return 1;
}

int ps_add(float *sums, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *values)
{
    if (!are_inside(places, n, capacity))
        return 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch((const char *)(sums + places[i + ROWS_AHEAD] * dim), dim * sizeof(float));
        float *restrict sum = sums + places[i] * dim;
        const float *restrict value = values + i * dim;
        for (int64_t j = 0; j < dim; j++)
            sum[j] += value[j];
    }
    return 1;
}

/* The body of both: `stepped` is what becomes of a weight w and a mean g. */
#define SGD(stepped)                                                                                                   \
    if (!are_inside(places, n, capacity))                                                                              \
        return 0;                                                                                                      \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        if (i + ROWS_AHEAD < n)                                                                                        \
            fetch((const char *)(weights + places[i + ROWS_AHEAD] * dim), dim * sizeof(float));                        \
        float *restrict row = weights + places[i] * dim;                                                               \
        const float *restrict sum = sums + i * dim;                                                                    \
        for (int64_t j = 0; j < dim; j++) {                                                                            \
            const float w = row[j], g = sum[j] / count;                                                                \
            row[j] = stepped;                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    return 1;

int ps_sgd(float *weights, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *sums,
           float count, float lr)
{
    SGD(w - g * lr)
}

int ps_sgd_fused(float *weights, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *sums,
                 float count, float lr)
{
    SGD(fmaf(-g, lr, w))
}

int ps_has_fused(void)
{
#ifdef FP_FAST_FMAF
    return 1;
#else
    return 0;
#endif
}

int ps_add_scaled(float *weights, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *means,
                  const float *scales)
{
    if (!are_inside(places, n, capacity))
        return 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch((const char *)(weights + places[i + ROWS_AHEAD] * dim), dim * sizeof(float));
        float *restrict row = weights + places[i] * dim;
        const float *restrict mean = means + i * dim;
        const float scale = scales[i];
        for (int64_t j = 0; j < dim; j++)
            row[j] += mean[j] * scale;
    }
    return 1;
}

/* The parts of a slot, as index.py has them. */
#define ROW 0xFFFFFFFFu
#define MARKED (UINT64_C(1) << 33)

static uint64_t mark(uint64_t hash)
{
    return (hash | MARKED) & ~(uint64_t)ROW;
}

void ps_find(const uint64_t *slots, uint64_t mask, int64_t salt, const int64_t *ids_of_rows, int64_t rows,
             const int64_t *ids, int64_t n, int64_t *found)
{
    for (int64_t i = 0; i < n; i++)
        found[i] = (int64_t)mixed(ids[i] ^ salt); /* for now */
    for (int64_t i = 0; i < n; i++) {
        if (i + SLOTS_AHEAD < n)
            __builtin_prefetch(slots + ((uint64_t)found[i + SLOTS_AHEAD] & mask));
        if (i + ROWS_AHEAD < n) {
            const uint64_t row = slots[(uint64_t)found[i + ROWS_AHEAD] & mask] & ROW;
            if (row != 0 && row <= (uint64_t)rows)
                __builtin_prefetch(ids_of_rows + row - 1);
        }
        const uint64_t hash = (uint64_t)found[i], wanted = mark(hash);
        int64_t row = -1;
        for (uint64_t slot = hash & mask; row < 0 && slots[slot] != 0; slot = (slot + 1) & mask) {
            const int64_t there = (int64_t)(slots[slot] & ROW) - 1;
            if ((slots[slot] ^ wanted) <= ROW && there >= 0 && there < rows && ids_of_rows[there] == ids[i])
                row = there;
        }
        found[i] = row;
    }
}

int64_t ps_insert(uint64_t *slots, uint64_t mask, int64_t salt, const int64_t *ids, const int64_t *given, int64_t n)
{
    int64_t used = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + SLOTS_AHEAD < n)
            __builtin_prefetch(slots + (mixed(ids[i + SLOTS_AHEAD] ^ salt) & mask), 1);
        const uint64_t hash = mixed(ids[i] ^ salt);
        uint64_t slot = hash & mask;
        while (slots[slot] & ROW)
            slot = (slot + 1) & mask;
        used += slots[slot] == 0;
        slots[slot] = mark(hash) | (uint64_t)(given[i] + 1);
    }
    return used;
}

int64_t ps_distinct(const int64_t *ids, int64_t n, int64_t salt, int64_t shards, int32_t *slots, uint64_t mask,
                    int64_t *ends, int32_t *scratch, int64_t *met, int64_t *distinct, int64_t *places, int64_t *counts)
{
    /* By the order in which ids are met: where the id occurs last, how often, and the place that it gets. */
    int32_t *last = scratch, *often = scratch + n, *place = scratch + 2 * n, m = 0;
    for (int32_t i = 0; i < n; i++) {
        uint64_t slot = mixed(ids[i] ^ salt) & mask;
        while (slots[slot] >= 0 && met[slots[slot]] != ids[i])
            slot = (slot + 1) & mask;
        if (slots[slot] < 0) {
            slots[slot] = m;
            met[m] = ids[i];
            often[m++] = 0;
        }
        const int32_t number = slots[slot];
        often[number]++;
        last[number] = i;
        places[i] = number;
    }
    for (int32_t k = 0; k < m; k++) {
        place[k] = shards > 1 ? (int32_t)((mixed(met[k]) >> 32) * (uint64_t)shards >> 32) : 0; /* its shard, for now */
        if (place[k] + 1 < shards)
            ends[place[k] + 1]++;
    }
    for (int64_t s = 1; s < shards; s++)
        ends[s] += ends[s - 1];
    for (int32_t i = 0; i < n; i++) {
        const int64_t number = places[i];
        if (last[number] == i) {
            place[number] = (int32_t)ends[place[number]]++;
            distinct[place[number]] = met[number];
            counts[place[number]] = often[number];
        }
    }
    for (int32_t i = 0; i < n; i++)
        places[i] = place[places[i]];
    return m;
}
