/* Rounding and optimizer steps over a tensor, whatever its formats, formula and rule.

The work goes block by block, in three stages with a loop each: operands become float32 in arrays
that stay in the nearest cache, the formula is computed, results are rounded and stored. So each
format, formula and rule has one loop, not each combination of them, and float16 is converted by the
processor's own instructions. Threads are those of the OpenMP library that PyTorch has loaded, if it
has loaded one. */

#include <stdatomic.h>

#include "blocks.h"

/* ---- threads ---- */

#if defined(__ELF__)
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
#else
static void (*const GOMP_parallel)(void (*)(void *), void *, unsigned, unsigned) = 0;
#endif

typedef void (*range_work)(const void *job, int64_t start, int64_t stop);
typedef struct {
  range_work work;
  const void *job;
  int64_t count;
  int parts;
  atomic_int next;
} Shared;

static void take_parts(void *given) {
  Shared *shared = given;
  const int64_t groups = (shared->count + GROUP - 1) / GROUP;
  for (;;) {
    int64_t part = atomic_fetch_add(&shared->next, 1);
    if (part >= shared->parts) return;
    int64_t start = groups * part / shared->parts * GROUP;
    int64_t stop = groups * (part + 1) / shared->parts * GROUP;
    shared->work(shared->job, start, stop < shared->count ? stop : shared->count);
  }
}

static void in_threads(range_work work, const void *job, int64_t count, int threads) {
  Shared shared = {work, job, count, threads, 0};
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(take_parts, &shared, (unsigned)threads, 0);
  else
    take_parts(&shared);
}

/* ---- rounding ---- */

typedef struct {
  const float *from;
  void *to;
  float *wide; /* the rounded numbers in float32 again, or NULL */
  const uint32_t *key; /* NULL: to nearest */
  uint32_t start;
  int format, saturate;
} Rounding;

static inline void round_block(const Rounding *job, int64_t i, int n) {
  float scratch[BLOCK];
  uint32_t words[BLOCK];
  if (job->key) draw(words, n, job->key, job->start + (uint32_t)i);
  store(job->to, job->format, job->saturate, i, n, job->from + i, scratch,
        job->key ? words : NULL);
  if (job->wide) load(job->to, job->format, i, n, job->wide + i);
}

/* Whole blocks first: compilers unroll what has a known length. */
static inline void round_blocks(const Rounding *job, int64_t start, int64_t stop) {
  int64_t i = start;
  for (; i + BLOCK <= stop; i += BLOCK) round_block(job, i, BLOCK);
  if (i < stop) round_block(job, i, (int)(stop - i));
}

/* ---- the optimizer step ---- */

enum { ADAMW, SGD, NESTEROV, RMSPROP };
enum { NEAREST, STOCHASTIC, KAHAN, SPLIT };

/* How a tensor's step is computed and stored; prebuilt.py fills it in this order. */
typedef struct {
  int32_t formula, param, grad, first, second, rule, first_stochastic, root, saturate;
} Storage;

typedef struct {
  void *param, *first, *second;
  const void *grad;
  void *remainder; /* int16 for Kahan's, int8 for masters of 24 bits */
  float *first_scales, *second_scales; /* of moments in codes */
  const float *maps; /* of first and second moments; after them the starts of `encode`, as bytes */
  uint32_t start;
  const float *hyper; /* what the formula needs; first the factor of the gradient */
  const uint32_t *keys; /* two words each for parameter, first and second moment */
} Update;

/* The float32 numbers of a moment: those of the tensor itself where it is float32. */
static inline float *moment(void *stored, const float *scales, const float *map, int format,
                            int64_t at, int n, float *scratch) {
  if (format == FORMAT_F32) return (float *)stored + at;
  if (format == FORMAT_C8)
    decode((const uint8_t *)stored + at, scales[at / GROUP], map, n, scratch);
  else if (format == FORMAT_NONE)
    memset(scratch, 0, sizeof(float) * (size_t)n);
  else
    load(stored, format, at, n, scratch);
  return scratch;
}

/* The formulas are those of mprun/optim/optimizers.py, term by term. With `root` the second moment is
its square root, before and after. */

static inline void adamw(const float *h, int root, int n, const float *w, const float *g,
                         float *restrict moment1, float *restrict moment2,
                         float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4], h5 = h[5], h6 = h[6],
              h7 = h[7], h8 = h[8];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor, m = moment1[i] * h1 + x * h2, before = moment2[i];
    float v = (root ? before * before : before) * h3 + (x * x) * h4, deviation = sqrtf(v);
    uint32_t finite = (pattern(w[i]) & MAGNITUDE) < INFINITE;
    float decay = number(choose(finite, pattern(w[i] * h5), 0u));
    moment1[i] = m;
    moment2[i] = root ? deviation : v;
    change[i] = decay + h6 * (m / (deviation * h7 + h8));
  }
}

static inline void sgd(const float *h, int has_moment, int n, const float *w, const float *g,
                       float *restrict moment1, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4];
  if (has_moment) {
    for (int i = 0; i < n; i++) {
      float x = g[i] * factor + w[i] * h1, m = moment1[i] * h2 + x * h4;
      moment1[i] = m;
      change[i] = h3 * m;
    }
  } else { /* the sum with 0 makes a positive zero of a negative one */
    for (int i = 0; i < n; i++) change[i] = h3 * (0.0f + (g[i] * factor + w[i] * h1) * h4);
  }
}

static inline void nesterov(const float *h, int n, const float *w, const float *g,
                            float *restrict moment1, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor + w[i] * h1, m = moment1[i] * h2 + x;
    moment1[i] = m;
    change[i] = h3 * (x + m * h2);
  }
}

static inline void rmsprop(const float *h, int root, int n, const float *w, const float *g,
                           float *restrict moment1, float *restrict moment2,
                           float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4], h5 = h[5], h6 = h[6];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor + w[i] * h1, before = moment2[i];
    float v = (root ? before * before : before) * h2 + (x * x) * h3, deviation = sqrtf(v);
    float m = moment1[i] * h4 + x / (deviation + h5);
    moment1[i] = m;
    moment2[i] = root ? deviation : v;
    change[i] = h6 * m;
  }
}

static inline void compute(const Storage *as, const float *h, int n, const float *w,
                           const float *g, float *m, float *v, float *change) {
  if (as->formula == ADAMW)
    as->root ? adamw(h, 1, n, w, g, m, v, change) : adamw(h, 0, n, w, g, m, v, change);
  else if (as->formula == SGD)
    sgd(h, as->first != FORMAT_NONE, n, w, g, m, change);
  else if (as->formula == NESTEROV)
    nesterov(h, n, w, g, m, change);
  else
    as->root ? rmsprop(h, 1, n, w, g, m, v, change) : rmsprop(h, 0, n, w, g, m, v, change);
}

/* What is written to the parameter: `old` less `change`; settled with `words`, if given. */
static inline void subtract(int n, const float *old, const float *change, const uint32_t *words,
                            float *restrict new) {
  if (words)
    for (int i = 0; i < n; i++) new[i] = settle(old[i] - change[i], old[i], change[i], words[i]);
  else
    for (int i = 0; i < n; i++) new[i] = old[i] - change[i];
}

static inline void store_moment(void *to, int format, int saturate, int64_t i, int n,
                                const float *from, float *scratch, uint32_t *words,
                                const uint32_t *key, uint32_t index) {
  /* There is none, it was computed in place, or it is encoded later. */
  if (format <= FORMAT_F32 || format == FORMAT_C8) return;
  if (key) draw(words, n, key, index);
  store(to, format, saturate, i, n, from, scratch, key ? words : NULL);
}

/* `first` and `second` get moments that are stored in codes, for the caller to encode. */
static inline void update_block(const Storage *as, const Update *job, int64_t i, int n,
                                float *first, float *second) {
  const uint32_t index = job->start + (uint32_t)i, *keys = job->keys;
  uint32_t words[BLOCK];
  float old[BLOCK], new[BLOCK], change[BLOCK], scratch[BLOCK];
  if (as->rule == KAHAN)
    merge(job->param, job->remainder, as->param, i, n, old);
  else if (as->rule == SPLIT)
    merge_masters(job->param, job->remainder, as->param, i, n, old);
  else
    load(job->param, as->param, i, n, old);
  load(job->grad, as->grad, i, n, new);
  float *m = moment(job->first, job->first_scales, job->maps, as->first, i, n, first);
  float *v = moment(job->second, job->second_scales, job->maps + CODES, as->second, i, n, second);

  compute(as, job->hyper, n, old, new, m, v, change);

  const int drawn = (as->rule == STOCHASTIC || as->rule == SPLIT) && as->param != FORMAT_F32;
  if (drawn) draw(words, n, keys, index);
  subtract(n, old, change, drawn ? words : NULL, new);
  if (as->rule == KAHAN)
    split(job->param, job->remainder, as->param, i, n, new, scratch);
  else if (as->rule == SPLIT)
    split_masters(job->param, job->remainder, as->param, i, n, new, words);
  else
    store(job->param, as->param, as->saturate, i, n, new, scratch, drawn ? words : NULL);
  store_moment(job->first, as->first, as->saturate, i, n, m, scratch, words,
               as->first_stochastic ? keys + 2 : NULL, index);
  store_moment(job->second, as->second, as->saturate, i, n, v, scratch, words, keys + 4, index);
}

static inline void encode_moment(void *stored, float *scales, const float *maps, int which,
                                 int64_t at, int n, const float *from, const uint32_t *key,
                                 uint32_t index) {
  const uint8_t *starts = (const uint8_t *)(maps + 2 * CODES) + which * STARTS;
  uint32_t words[GROUP];
  if (key) draw(words, n, key, index);
  encode((uint8_t *)stored + at, scales + at / GROUP, maps + which * CODES, starts, n, from,
         key ? words : NULL);
}

/* A scale belongs to a group, so the moments of a group are encoded together. */
static inline void update_group(const Storage *as, const Update *job, int64_t i, int n) {
  const uint32_t index = job->start + (uint32_t)i, *keys = job->keys;
  float first[GROUP], second[GROUP];
  int at = 0;
  for (; at + BLOCK <= n; at += BLOCK)
    update_block(as, job, i + at, BLOCK, first + at, second + at);
  if (at < n) update_block(as, job, i + at, n - at, first + at, second + at);
  if (as->first == FORMAT_C8)
    encode_moment(job->first, job->first_scales, job->maps, 0, i, n, first,
                  as->first_stochastic ? keys + 2 : NULL, index);
  if (as->second == FORMAT_C8)
    encode_moment(job->second, job->second_scales, job->maps, 1, i, n, second, keys + 4, index);
}

static inline void update_groups(const Storage *as, const Update *job, int64_t start,
                                 int64_t stop) {
  for (int64_t i = start; i < stop; i += GROUP)
    update_group(as, job, i, (int)(stop - i < GROUP ? stop - i : GROUP));
}

static inline void update_blocks(const Storage *as, const Update *job, int64_t start,
                                 int64_t stop) {
  float first[BLOCK], second[BLOCK];
  int64_t i = start;
  for (; i + BLOCK <= stop; i += BLOCK) update_block(as, job, i, BLOCK, first, second);
  if (i < stop) update_block(as, job, i, (int)(stop - i), first, second);
}

static inline void update_range_as(const Storage *as, const Update *job, int64_t start,
                                   int64_t stop) {
  if (as->first == FORMAT_C8 || as->second == FORMAT_C8)
    update_groups(as, job, start, stop);
  else
    update_blocks(as, job, start, stop);
}
