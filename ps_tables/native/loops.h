/* The functions of loops.c. The compiler and cffi both read these declarations, so the two cannot differ.

   Rows are records of so many bytes or floats, `capacity` of them, in one array. A function that returns an int returns
   OUTSIDE, without having written anything, where a position is outside of it. */

/* The sources that the library was compiled from: the beginning of their SHA-256. */
uint64_t ps_sources(void);

/* Copies n records to `out`. A position below zero or beyond the end is the first or the last one, as in
   numpy's `clip`. */
void ps_gather(const char *records, int64_t capacity, int64_t bytes, const int64_t *positions, int64_t n, char *out);

/* Copies n rows of floats to `out`. */
int ps_rows_at(const float *rows, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, float *out);

/* Copies n values to records; of several for one position the last one stays. */
int ps_scatter(char *records, int64_t capacity, int64_t bytes, const int64_t *positions, int64_t n, const char *values);

/* Returns whether n numbers are finite; the second one copies them, too. */
int ps_are_finite(const float *numbers, int64_t n);
int ps_copy(const float *numbers, int64_t n, float *out);

/* Adds n rows of values to rows of `sums`, in the order of the values. */
int ps_add(float *sums, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, const float *values);

/* The same, from zeros: what `sums` has had does not count. seen: memory for `capacity` bytes */
int ps_sum(float *sums, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, const float *values,
           uint8_t *seen);

/* Steps n distinct rows with plain SGD, by the mean of their gradients: the sums by the count. */
int ps_sgd(float *weights, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n, const float *sums,
           float count, float lr);

/* Steps n distinct rows with row-wise Adagrad. squares: [capacity], of each row the sum so far */
int ps_adagrad(float *weights, float *squares, int64_t capacity, int64_t dim, const int64_t *positions, int64_t n,
               const float *sums, float count, float lr, float eps);

/* Finds the row of n ids in the slots of an index, -1 where there is none. At least one slot is empty. index.py says
   what a slot has.

   ids_of_rows: the id of each row, `rows` of them */
void ps_find(const uint64_t *slots, uint64_t mask, int64_t salt, const int64_t *ids_of_rows, int64_t rows,
             const int64_t *ids, int64_t n, int64_t *found);

/* Gives n distinct ids without a row one each; returns how many empty slots that took. At least n + 1 are free. */
int64_t ps_insert(uint64_t *slots, uint64_t mask, int64_t salt, const int64_t *ids, const int64_t *given, int64_t n);

/* Returns whether n ids are all of one shard. */
int ps_are_of_shard(const int64_t *ids, int64_t n, int64_t shards, int64_t shard);

/* Returns whether n ids are distinct.

   slots: mask + 1 of them, at least 2 * n, all -1, before and after
   taken: memory for n numbers */
int ps_are_distinct(const int64_t *ids, int64_t n, int64_t salt, int32_t *slots, uint64_t mask, int32_t *taken);

/* Writes the distinct ones of n ids, ordered by shard and then by where each occurs first; the position of every id
   among them, and how often each occurs. Returns how many they are.

   slots:   mask + 1 of them, at least 2 * n, all -1, before and after
   scratch: memory for 2 * n numbers; met: for n
   ends:    [shards], where the ids of each shard end */
int64_t ps_distinct(const int64_t *ids, int64_t n, int64_t salt, int64_t shards, int32_t *slots, uint64_t mask,
                    int32_t *scratch, int64_t *met, int64_t *distinct, int64_t *positions, int64_t *counts,
                    int64_t *ends);
