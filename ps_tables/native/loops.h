/* What loops.c has. The compiler and cffi both read these declarations: so they cannot differ.

   Rows are records of so many bytes or floats, `capacity` of them, in one array. Loops that write return 0 without
   having written anything where a place is outside of it, otherwise 1. */

/* Copies n records to `out`. A place below zero or beyond the end is the first or the last one, as numpy's `clip`. */
void ps_gather(const char *records, int64_t capacity, int64_t bytes, const int64_t *places, int64_t n, char *out);

/* Copies n values to records; of several for one place the last one stays. */
int ps_scatter(char *records, int64_t capacity, int64_t bytes, const int64_t *places, int64_t n, const char *values);

/* Adds n rows of values to rows of `sums`, in the order of the values. */
int ps_add(float *sums, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *values);

/* Steps n distinct rows by the mean of their gradients, with plain SGD. The second one rounds once for the product and
   the difference (fused), where torch does: ps_has_fused says whether the processor does that in one instruction. */
int ps_sgd(float *weights, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *sums,
           float count, float lr);
int ps_sgd_fused(float *weights, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *sums,
                 float count, float lr);
int ps_has_fused(void);

/* Adds n means to distinct rows, each times a number of its own. */
int ps_add_scaled(float *weights, int64_t capacity, int64_t dim, const int64_t *places, int64_t n, const float *means,
                  const float *scales);

/* Finds the row of n ids in the slots of an index, -1 where there is none; and gives n distinct ids without a row one
   each: returns how many slots are not empty now that were. One slot at least is. index.py says what a slot has.

   ids_of_rows: the id of each row, `rows` of them */
void ps_find(const uint64_t *slots, uint64_t mask, int64_t salt, const int64_t *ids_of_rows, int64_t rows,
             const int64_t *ids, int64_t n, int64_t *found);
int64_t ps_insert(uint64_t *slots, uint64_t mask, int64_t salt, const int64_t *ids, const int64_t *given, int64_t n);

/* Writes the distinct ones of n ids, ordered by shard and then by the place where each occurs last; the place of every
   id among them, and how often each occurs. Returns how many they are. At least half of the slots stay free.

   slots: mask + 1 of them, all -1; ends: zeros, one for each shard; scratch, met: memory for 3 * n and n numbers */
int64_t ps_distinct(const int64_t *ids, int64_t n, int64_t salt, int64_t shards, int32_t *slots, uint64_t mask,
                    int64_t *ends, int32_t *scratch, int64_t *met, int64_t *distinct, int64_t *places, int64_t *counts);
