/* The kernels of the wheel: every storage and rule, chosen while they run.

round.c and update.c are compiled for one combination of dtypes; there are hundreds. A wheel holds
this file instead. It works on a block of elements at a time, in three stages with a loop each:
operands become float32 in arrays that stay in the nearest cache, the formula is computed, results
are rounded and stored. So each dtype, formula and rule needs one loop, not each combination.

It is compiled for several LEVELs, the bits of a processor's vectors (0: any processor's); Python
asks `mprun_level` which one to call. Threads are those of the OpenMP library that PyTorch has loaded, if it has loaded one. */

#include <stdatomic.h>

#include "blocks.h"

#define AT_LEVEL(name, level) NAME(name##_, level)

/* ---- threads ---- */

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

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
  const int64_t blocks = (shared->count + BLOCK - 1) / BLOCK;
  for (;;) {
    int64_t part = atomic_fetch_add(&shared->next, 1);
    if (part >= shared->parts) return;
    int64_t start = blocks * part / shared->parts * BLOCK;
    int64_t stop = blocks * (part + 1) / shared->parts * BLOCK;
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

/* ---- rounding: as round.c ---- */

typedef struct {
  const float *from;
  void *to;
  float *wide; /* the rounded numbers in float32 again, or NULL */
  const uint32_t *key; /* NULL: to nearest */
  uint32_t start;
  int format, saturate;
} Rounding;

static void round_range(const void *given, int64_t start, int64_t stop) {
  const Rounding *job = given;
  float scratch[BLOCK];
  for (int64_t i = start; i < stop; i += BLOCK) {
    int n = (int)(stop - i < BLOCK ? stop - i : BLOCK);
    store(job->to, job->format, job->saturate, i, n, job->from + i, scratch, job->key,
          job->start + (uint32_t)i);
    if (job->wide) load(job->to, job->format, i, n, job->wide + i);
  }
}

void AT_LEVEL(mprun_round, LEVEL)(const float *from, void *to, float *wide, int64_t count,
                                  uint32_t start, const uint32_t *key, int format, int saturate,
                                  int threads) {
  Rounding job = {from, to, wide, key, start, format, saturate};
  in_threads(round_range, &job, count, threads);
}

/* ---- the optimizer step: as update.c ---- */

enum { ADAMW, SGD, NESTEROV, RMSPROP };
enum { NEAREST, STOCHASTIC, KAHAN };

/* As mprun/kernels/prebuilt.py fills it. */
typedef struct {
  int32_t formula, param, grad, first, second, rule, first_stochastic, root, saturate;
} Storage;

typedef struct {
  Storage as;
  void *param, *first, *second;
  const void *grad;
  int16_t *remainder;
  uint32_t start;
  const float *hyper;
  const uint32_t *keys;
} Update;

/* Moments are those of the tensor itself where it is float32. */
static float *moment(void *stored, int format, int64_t at, int n, float *scratch) {
  if (format == FORMAT_F32) return (float *)stored + at;
  if (format == FORMAT_NONE)
    memset(scratch, 0, sizeof(float) * (size_t)n);
  else
    load(stored, format, at, n, scratch);
  return scratch;
}

static void adamw(const float *h, int n, const float *w, const float *g, float *restrict moment1,
                  float *restrict moment2, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4], h5 = h[5], h6 = h[6],
              h7 = h[7], h8 = h[8];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor, m = moment1[i] * h1 + x * h2, v = moment2[i] * h3 + (x * x) * h4;
    uint32_t finite = (pattern(w[i]) & MAGNITUDE) < INFINITE;
    float decay = number(choose(finite, pattern(w[i] * h5), 0u));
    moment1[i] = m;
    moment2[i] = v;
    change[i] = decay + h6 * (m / (sqrtf(v) * h7 + h8));
  }
}

static void sgd(const float *h, int n, const float *w, const float *g, float *restrict moment1,
                float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor + w[i] * h1, m = moment1[i] * h2 + x * h4;
    moment1[i] = m;
    change[i] = h3 * m;
  }
}

static void nesterov(const float *h, int n, const float *w, const float *g,
                     float *restrict moment1, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor + w[i] * h1, m = moment1[i] * h2 + x;
    moment1[i] = m;
    change[i] = h3 * (x + m * h2);
  }
}

static void rmsprop(const float *h, int n, const float *w, const float *g,
                    float *restrict moment1, float *restrict moment2, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4], h5 = h[5], h6 = h[6];
  for (int i = 0; i < n; i++) {
    float x = g[i] * factor + w[i] * h1, v = moment2[i] * h2 + (x * x) * h3;
    float m = moment1[i] * h4 + x / (sqrtf(v) + h5);
    moment1[i] = m;
    moment2[i] = v;
    change[i] = h6 * m;
  }
}

static void compute(int formula, const float *h, int n, const float *w, const float *g, float *m,
                    float *v, float *change) {
  if (formula == ADAMW)
    adamw(h, n, w, g, m, v, change);
  else if (formula == SGD)
    sgd(h, n, w, g, m, change);
  else if (formula == NESTEROV)
    nesterov(h, n, w, g, m, change);
  else
    rmsprop(h, n, w, g, m, v, change);
}

/* What is written to the parameter: `old` less `change`. */
static void subtract(int drawn, int n, const float *old, const float *change, const uint32_t *key,
                     uint32_t index, float *restrict new) {
  if (drawn)
    for (int i = 0; i < n; i++)
      new[i] = settle(old[i] - change[i], old[i], change[i],
                      hash(index + (uint32_t)i, key[0], key[1]));
  else
    for (int i = 0; i < n; i++) new[i] = old[i] - change[i];
}

static void update_block(const Update *job, int64_t i, int n) {
  const Storage *as = &job->as;
  const uint32_t index = job->start + (uint32_t)i;
  float old[BLOCK], gradient[BLOCK], change[BLOCK], first[BLOCK], second[BLOCK], scratch[BLOCK];
  if (as->rule == KAHAN)
    merge(job->param, job->remainder, as->param, i, n, old);
  else
    load(job->param, as->param, i, n, old);
  load(job->grad, as->grad, i, n, gradient);
  float *m = moment(job->first, as->first, i, n, first);
  float *v = moment(job->second, as->second, i, n, second);
  if (as->root)
    for (int j = 0; j < n; j++) v[j] = v[j] * v[j];

  compute(as->formula, job->hyper, n, old, gradient, m, v, change);

  const int drawn = as->rule == STOCHASTIC && as->param != FORMAT_F32;
  subtract(drawn, n, old, change, job->keys, index, gradient);
  if (as->rule == KAHAN)
    split(job->param, job->remainder, as->param, i, n, gradient);
  else
    store(job->param, as->param, as->saturate, i, n, gradient, scratch,
          drawn ? job->keys : NULL, index);
  if (as->first > FORMAT_F32)
    store(job->first, as->first, as->saturate, i, n, m, scratch,
          as->first_stochastic ? job->keys + 2 : NULL, index);
  if (as->root) {
    for (int j = 0; j < n; j++) v[j] = sqrtf(v[j]);
    store(job->second, as->second, as->saturate, i, n, v, scratch, job->keys + 4, index);
  }
}

static void update_range(const void *given, int64_t start, int64_t stop) {
  for (int64_t i = start; i < stop; i += BLOCK)
    update_block(given, i, (int)(stop - i < BLOCK ? stop - i : BLOCK));
}

void AT_LEVEL(mprun_update, LEVEL)(const Storage *as, void *param, const void *grad, void *first,
                                   void *second, int16_t *remainder, int64_t count, uint32_t start,
                                   const float *hyper, const uint32_t *keys, int threads) {
  Update job = {*as, param, first, second, grad, remainder, start, hyper, keys};
  in_threads(update_range, &job, count, threads);
}

#if LEVEL == 0

/* The best level that this processor and its system can run: 512 for AVX-512, 256 for AVX2. */
int mprun_level(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 0;
  int bits_and_words = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return bits_and_words && __builtin_cpu_supports("avx512vl") ? 512 : 256;
#else
  return 0;
#endif
}

/* Which sources this was built from: Python compares it with those beside it. */
uint32_t mprun_sources(void) { return SOURCES; }

#endif
