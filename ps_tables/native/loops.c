/* The loops of tables over rows and ids. Each gives the bits of the numpy code in its place, which is the reference.

   So floats are rounded once for each operation, and sums are made in the order that numpy's have: compile without
   -ffast-math and with -ffp-contract=off. No Python is in here: one library serves every Python, and cffi releases the
   interpreter's lock around each call. Nothing allocates memory, and nothing outside of the arguments' is read.

   Rows lie far apart in memory, so the next ones are fetched ahead. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "loops.h"

#if FLT_EVAL_METHOD != 0
#error "this compiler computes floats with more bits than numpy does"
#endif

enum { INSIDE = 1, OUTSIDE = 0, ROWS_AHEAD = 8, SLOTS_AHEAD = 16, LINE = 64, LANES = 8 };

uint64_t ps_sources(void)
{
    return PS_SOURCES;
}

/* -- rows -------------------------------------------------------------------------------------------------------- */

static void fetch(const void *record, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE)
        __builtin_prefetch((const char *)record + at);
}

static int64_t clipped(int64_t position, int64_t capacity)
{
    return position < 0 ? 0 : position < capacity ? position : capacity - 1;
}

static int are_inside(const int64_t *positions, int64_t n, int64_t capacity)
{
    int outside = 0;
    for (int64_t i = 0; i < n; i++)
        outside |= (uint64_t)positions[i] >= (uint64_t)capacity;
    return !outside;
}

void ps_gather(const char *records, int64_t capacity, int64_t bytes, const int64_t *positions, int64_t n, char *out)
{
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(records + clipped(positions[i + ROWS_AHEAD], capacity) * bytes, bytes);
        memcpy(out + i * bytes, records + clipped(positions[i], capacity) * bytes, bytes);
    }
}

int ps_rows_at(const float *rows, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, float *out)
{
    if (!are_inside(positions, n, capacity))
        return OUTSIDE;
    ps_gather((const char *)rows, capacity, dim * sizeof(float), positions, n, (char *)out);
    return INSIDE;
}

int ps_scatter(char *records, int64_t capacity, int64_t bytes, const int64_t *positions, int64_t n, const char *values)
{
    if (!are_inside(positions, n, capacity))
        return OUTSIDE;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(records + positions[i + ROWS_AHEAD] * bytes, bytes);
        memcpy(records + positions[i] * bytes, values + i * bytes, bytes);
    }
    return INSIDE;
}

static uint32_t bits_of(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

int ps_are_finite(const float *numbers, int64_t n)
{
    int odd = 0;
    for (int64_t j = 0; j < n; j++)
        odd |= (bits_of(numbers[j]) & 0x7F800000u) == 0x7F800000u;
    return !odd;
}

int ps_copy(const float *numbers, int64_t n, float *out)
{
    /* Pieces that stay in a cache between the copy and the check of what was copied: others may write to `numbers`. */
    enum { PIECE = 4096 };
    int all = 1;
    for (int64_t at = 0; at < n; at += PIECE) {
        const int64_t count = n - at < PIECE ? n - at : PIECE;
        memcpy(out + at, numbers + at, count * sizeof(float));
        all &= ps_are_finite(out + at, count);
    }
    return all;
}

/* -- sums -------------------------------------------------------------------------------------------------------- */

int ps_add(float *sums, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, const float *values)
{
    if (!are_inside(positions, n, capacity))
        return OUTSIDE;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(sums + positions[i + ROWS_AHEAD] * dim, dim * sizeof(float));
        float *restrict sum = sums + positions[i] * dim;
        const float *restrict value = values + i * dim;
        for (int64_t j = 0; j < dim; j++)
            sum[j] += value[j];
    }
    return INSIDE;
}

int ps_sum(float *sums, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, const float *values,
           uint8_t *seen)
{
    if (!are_inside(positions, n, capacity))
        return OUTSIDE;
    if (capacity)
        memset(seen, 0, capacity);
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(sums + positions[i + ROWS_AHEAD] * dim, dim * sizeof(float));
        float *restrict sum = sums + positions[i] * dim;
        const float *restrict value = values + i * dim;
        if (seen[positions[i]]) {
            for (int64_t j = 0; j < dim; j++)
                sum[j] += value[j];
        } else {
            seen[positions[i]] = 1;
            for (int64_t j = 0; j < dim; j++)
                sum[j] = 0.0f + value[j]; /* -0.0 becomes 0.0, as in a sum from zeros */
        }
    }
    for (int64_t position = 0; position < capacity; position++)
        if (!seen[position])
            memset(sums + position * dim, 0, dim * sizeof(float));
    return INSIDE;
}

/* -- optimizers -------------------------------------------------------------------------------------------------- */

int ps_sgd(float *weights, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, const float *sums,
           float count, float lr)
{
    if (!are_inside(positions, n, capacity))
        return OUTSIDE;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n)
            fetch(weights + positions[i + ROWS_AHEAD] * dim, dim * sizeof(float));
        float *restrict row = weights + positions[i] * dim;
        const float *restrict sum = sums + i * dim;
        for (int64_t j = 0; j < dim; j++)
            row[j] -= sum[j] / count * lr;
    }
    return INSIDE;
}

/* The sum of the squares of a row's mean: eight sums, of every eighth square, which are then added in pairs. */
static float sum_of_squares(const float *sum, int64_t dim, float count)
{
    float lane[LANES] = {0};
    int64_t j = 0;
    for (; j + LANES <= dim; j += LANES)
        for (int64_t l = 0; l < LANES; l++) {
            const float mean = sum[j + l] / count;
            lane[l] += mean * mean;
        }
    for (int64_t l = 0; j + l < dim; l++) {
        const float mean = sum[j + l] / count;
        lane[l] += mean * mean;
    }
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

int ps_adagrad(float *weights, float *squares, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n,
               const float *sums, float count, float lr, float eps)
{
    if (!are_inside(positions, n, capacity))
        return OUTSIDE;
    for (int64_t i = 0; i < n; i++) {
        if (i + ROWS_AHEAD < n) {
            fetch(weights + positions[i + ROWS_AHEAD] * dim, dim * sizeof(float));
            fetch(squares + positions[i + ROWS_AHEAD], sizeof(float));
        }
        float *restrict row = weights + positions[i] * dim;
        const float *restrict sum = sums + i * dim;
        const float total = squares[positions[i]] + sum_of_squares(sum, dim, count) / (float)dim;
        const float scale = lr / (sqrtf(total) + eps);
        squares[positions[i]] = total;
        for (int64_t j = 0; j < dim; j++)
            row[j] -= sum[j] / count * scale;
    }
    return INSIDE;
}

/* -- ids --------------------------------------------------------------------------------------------------------- */

static uint64_t mixed(int64_t id) /* as ps_protocol.row_ids.mix */
{
    uint64_t bits = (uint64_t)id;
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93u;
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93u;
    return bits ^ bits >> 32;
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
        found[i] = (int64_t)mixed(ids[i] ^ salt); /* the hashes, until each row is found */
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

static uint64_t shard_of(int64_t id, int64_t shards)
{
    return (mixed(id) >> 32) * (uint64_t)shards >> 32;
}

int ps_are_of_shard(const int64_t *ids, int64_t n, int64_t shards, int64_t shard)
{
    int others = 0;
    for (int64_t i = 0; i < n; i++)
        others |= shard_of(ids[i], shards) != (uint64_t)shard;
    return !others;
}

int ps_are_distinct(const int64_t *ids, int64_t n, int64_t salt, int32_t *slots, uint64_t mask, int32_t *taken)
{
    int64_t m = 0;
    int are_distinct = 1;
    for (; m < n && are_distinct; m++) {
        uint64_t slot = mixed(ids[m] ^ salt) & mask;
        while (slots[slot] >= 0 && ids[slots[slot]] != ids[m])
            slot = (slot + 1) & mask;
        are_distinct = slots[slot] < 0;
        slots[slot] = (int32_t)m;
        taken[m] = (int32_t)slot;
    }
    for (int64_t i = 0; i < m; i++)
        slots[taken[i]] = -1;
    return are_distinct;
}

int64_t ps_distinct(const int64_t *ids, int64_t n, int64_t salt, int64_t shards, int32_t *slots, uint64_t mask,
                    int32_t *scratch, int64_t *met, int64_t *distinct, int64_t *positions, int64_t *counts,
                    int64_t *ends)
{
    /* By the number of an id, in the order in which they are met: its slot, and its position. */
    int32_t *slot_of = scratch, *position = scratch + n, m = 0;
    memset(ends, 0, shards * sizeof *ends);
    for (int64_t i = 0; i < n; i++) {
        if (i + SLOTS_AHEAD < n)
            __builtin_prefetch(slots + (mixed(ids[i + SLOTS_AHEAD] ^ salt) & mask), 1);
        uint64_t slot = mixed(ids[i] ^ salt) & mask;
        while (slots[slot] >= 0 && met[slots[slot]] != ids[i])
            slot = (slot + 1) & mask;
        if (slots[slot] < 0) {
            slots[slot] = m;
            slot_of[m] = (int32_t)slot;
            met[m] = ids[i];
            position[m] = (int32_t)shard_of(ids[i], shards); /* its shard, for now */
            if (position[m] + 1 < shards)
                ends[position[m] + 1]++;
            m++;
        }
        positions[i] = slots[slot];
    }
    for (int64_t shard = 1; shard < shards; shard++)
        ends[shard] += ends[shard - 1]; /* where its ids begin; its end, when all have their positions */
    for (int32_t k = 0; k < m; k++) {
        slots[slot_of[k]] = -1;
        position[k] = (int32_t)ends[position[k]]++;
        distinct[position[k]] = met[k];
        counts[k] = 0;
    }
    for (int64_t i = 0; i < n; i++)
        counts[positions[i] = position[positions[i]]]++;
    return m;
}
