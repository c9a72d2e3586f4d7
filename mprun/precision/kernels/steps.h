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

INLINE void round_block(const Rounding *job, int64_t i) {
  float scratch[BLOCK];
  uint32_t words[BLOCK];
  if (job->key) draw(words, BLOCK, job->key, job->start + (uint32_t)i);
  store(job->to, job->format, job->saturate, i, BLOCK, job->from + i, scratch,
        job->key ? words : NULL);
  if (job->wide) load(job->to, job->format, i, BLOCK, job->wide + i);
}

/* The last numbers in a copy of a whole block: so loops have one length. */
INLINE void round_blocks(const Rounding *job, int64_t start, int64_t stop) {
  float from[BLOCK] = {0}, wide[BLOCK], to[BLOCK];
  int64_t i = start;
  for (; i + BLOCK <= stop; i += BLOCK) round_block(job, i);
  if (i == stop) return;
  const size_t rest = (size_t)(stop - i), size = job->format == FORMAT_F32 ? 4 : 2;
  Rounding last = {from, to, wide, job->key, job->start + (uint32_t)i, job->format, job->saturate};
  memcpy(from, job->from + i, rest * 4);
  round_block(&last, 0);
  memcpy((char *)job->to + (size_t)i * size, to, rest * size);
  if (job->wide) memcpy(job->wide + i, wide, rest * 4);
}

/* ---- the optimizer step ---- */

enum { ADAMW, SGD, NESTEROV, RMSPROP };
enum { NEAREST, STOCHASTIC, KAHAN, SPLIT };

/* How a tensor's step is computed and stored; prebuilt.py fills it in this order. */
typedef struct {
  int32_t formula, param, grad, first, second, rule, first_stochastic, root, saturate;
} Storage;

#define HYPERS 9

typedef struct {
  void *param, *first, *second;
  const void *grad;
  void *remainder; /* int16 for Kahan's, int8 for masters of 24 bits */
  float *first_scales, *second_scales; /* of moments in codes */
  const float *maps; /* of first and second moments */
  uint32_t start;
  const float *hyper; /* what the formula needs; first the factor of the gradient */
  const uint32_t *keys; /* two words each for parameter, first and second moment */
} Update;

/* The float32 numbers of a moment: those of the tensor itself where it is float32; `decoded` are
those of one in codes. */
INLINE float *moment(void *stored, int format, int64_t at, int n, float *decoded,
                     float *restrict scratch) {
  if (format == FORMAT_F32) return (float *)stored + at;
  if (format == FORMAT_C8) return decoded;
  if (format == FORMAT_NONE)
    EACH(i, n) scratch[i] = 0.0f;
  else
    load(stored, format, at, n, scratch);
  return scratch;
}

/* The formulas are those of mprun/optim/optimizers.py, term by term. With `root` the second moment is
its square root, before and after. */

INLINE void adamw(const float *h, int root, int n, const float *w, const float *g,
                         float *restrict moment1, float *restrict moment2,
                         float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4], h5 = h[5], h6 = h[6],
              h7 = h[7], h8 = h[8];
  EACH(i, n) {
    float x = g[i] * factor, m = moment1[i] * h1 + x * h2, before = moment2[i];
    float v = (root ? before * before : before) * h3 + (x * x) * h4, deviation = sqrtf(v);
    float decay = (int32_t)(pattern(w[i]) & MAGNITUDE) < (int32_t)INFINITE ? w[i] * h5 : 0.0f;
    moment1[i] = m;
    moment2[i] = root ? deviation : v;
    change[i] = decay + h6 * (m / (deviation * h7 + h8));
  }
}

INLINE void sgd(const float *h, int has_moment, int n, const float *w, const float *g,
                       float *restrict moment1, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4];
  if (has_moment) {
    EACH(i, n) {
      float x = g[i] * factor + w[i] * h1, m = moment1[i] * h2 + x * h4;
      moment1[i] = m;
      change[i] = h3 * m;
    }
  } else { /* the sum with 0 makes a positive zero of a negative one */
    EACH(i, n) change[i] = h3 * (0.0f + (g[i] * factor + w[i] * h1) * h4);
  }
}

INLINE void nesterov(const float *h, int n, const float *w, const float *g,
                            float *restrict moment1, float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3];
  EACH(i, n) {
    float x = g[i] * factor + w[i] * h1, m = moment1[i] * h2 + x;
    moment1[i] = m;
    change[i] = h3 * (x + m * h2);
  }
}

INLINE void rmsprop(const float *h, int root, int n, const float *w, const float *g,
                           float *restrict moment1, float *restrict moment2,
                           float *restrict change) {
  const float factor = h[0], h1 = h[1], h2 = h[2], h3 = h[3], h4 = h[4], h5 = h[5], h6 = h[6];
  EACH(i, n) {
    float x = g[i] * factor + w[i] * h1, before = moment2[i];
    float v = (root ? before * before : before) * h2 + (x * x) * h3, deviation = sqrtf(v);
    float m = moment1[i] * h4 + x / (deviation + h5);
    moment1[i] = m;
    moment2[i] = root ? deviation : v;
    change[i] = h6 * m;
  }
}

INLINE void compute(const Storage *as, const float *h, int n, const float *w,
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
INLINE void subtract(int n, const float *old, const float *change, const uint32_t *words,
                            float *restrict new) {
  if (words)
    EACH(i, n) new[i] = settle(old[i] - change[i], old[i], change[i], words[i]);
  else
    EACH(i, n) new[i] = old[i] - change[i];
}

INLINE void store_moment(void *to, int format, int saturate, int64_t i, int n,
                                const float *from, float *scratch, uint32_t *words,
                                const uint32_t *key, uint32_t index) {
  /* There is none, it was computed in place, or it is encoded later. */
  if (format <= FORMAT_F32 || format == FORMAT_C8) return;
  if (key) draw(words, n, key, index);
  store(to, format, saturate, i, n, from, scratch, key ? words : NULL);
}

/* `first` and `second` are moments that are stored in codes, which the caller decodes and encodes. */
INLINE void update_block(const Storage *as, const Update *job, int64_t i, int n,
                                float *first, float *second) {
  const uint32_t index = job->start + (uint32_t)i, *keys = job->keys;
  uint32_t words[BLOCK];
  float old[BLOCK], new[BLOCK], change[BLOCK], scratch[BLOCK], one[BLOCK], other[BLOCK];
  if (as->rule == KAHAN)
    merge(job->param, job->remainder, as->param, i, n, old);
  else if (as->rule == SPLIT)
    merge_masters(job->param, job->remainder, as->param, i, n, old);
  else
    load(job->param, as->param, i, n, old);
  load(job->grad, as->grad, i, n, new);
  float *m = moment(job->first, as->first, i, n, first, one);
  float *v = moment(job->second, as->second, i, n, second, other);

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

/* A scale belongs to a group, so its moments are decoded and encoded together; numbers from `n` on
are none of the tensor's. */
INLINE void update_group(const Storage *as, const Update *job, int64_t i, int n, int block) {
  const uint32_t index = job->start + (uint32_t)i, *keys = job->keys;
  const int64_t group = i / GROUP;
  const float *maps = job->maps;
  uint8_t *codes = (uint8_t *)job->first + i, *root_codes = (uint8_t *)job->second + i;
  float first[GROUP], second[GROUP];
  if (as->first == FORMAT_C8) decode(codes, job->first_scales[group], maps, 0, first);
  if (as->second == FORMAT_C8)
    decode(root_codes, job->second_scales[group], maps + CODES, 1, second);
  for (int at = 0; at < GROUP; at += block)
    update_block(as, job, i + at, block, first + at, second + at);
  for (int at = n; at < GROUP; at++) first[at] = second[at] = 0.0f;
  if (as->first == FORMAT_C8)
    encode(codes, job->first_scales + group, maps, 0, first,
           as->first_stochastic ? keys + 2 : NULL, index);
  if (as->second == FORMAT_C8)
    encode(root_codes, job->second_scales + group, maps + CODES, 1, second, keys + 4, index);
}

INLINE int is_coded(const Storage *as) {
  return as->first == FORMAT_C8 || as->second == FORMAT_C8;
}

/* The whole blocks, or groups, from `i` on; where the rest begins. */
INLINE int64_t update_blocks(const Storage *as, const Update *given, int64_t i, int64_t stop,
                             int block) {
  /* In memory of its own: what is written cannot be one of them. */
  Update job = *given;
  float hyper[HYPERS];
  uint32_t keys[6];
  memcpy(hyper, given->hyper, sizeof hyper);
  memcpy(keys, given->keys, sizeof keys);
  job.hyper = hyper;
  job.keys = keys;
  if (is_coded(as))
    for (; i + GROUP <= stop; i += GROUP) update_group(as, &job, i, GROUP, block);
  else
    for (; i + block <= stop; i += block) update_block(as, &job, i, block, NULL, NULL);
  return i;
}

/* Bytes of a number; 0 without one. */
INLINE size_t size_of(int format) {
  return format == FORMAT_NONE ? 0 : format == FORMAT_C8 ? 1 : format == FORMAT_F32 ? 4 : 2;
}

/* The last `n` numbers, fewer than a group, in a copy of whole blocks: so loops have one length. */
INLINE void update_rest(const Storage *as, const Update *job, int64_t i, int n) {
  const size_t sizes[] = {size_of(as->param), size_of(as->grad), size_of(as->first),
                          size_of(as->second),
                          as->rule == KAHAN ? 2 : as->rule == SPLIT ? 1 : 0};
  void *const from[] = {job->param, (void *)job->grad, job->first, job->second, job->remainder};
  float copies[5][GROUP] = {0};
  Update copied = *job;
  for (int k = 0; k < 5; k++)
    if (sizes[k]) memcpy(copies[k], (char *)from[k] + (size_t)i * sizes[k], sizes[k] * (size_t)n);
  copied.param = copies[0];
  copied.grad = copies[1];
  copied.first = copies[2];
  copied.second = copies[3];
  copied.remainder = copies[4];
  copied.start += (uint32_t)i;
  if (is_coded(as)) {
    copied.first_scales += as->first == FORMAT_C8 ? i / GROUP : 0;
    copied.second_scales += as->second == FORMAT_C8 ? i / GROUP : 0;
    update_group(as, &copied, 0, n, BLOCK);
  } else {
    for (int at = 0; at < n; at += BLOCK) update_block(as, &copied, at, BLOCK, NULL, NULL);
  }
  for (int k = 0; k < 5; k++)
    if (sizes[k] && k != 1)
      memcpy((char *)from[k] + (size_t)i * sizes[k], copies[k], sizes[k] * (size_t)n);
}

INLINE void update_range_as(const Storage *as, const Update *job, int64_t start, int64_t stop) {
  const int64_t rest = update_blocks(as, job, start, stop, BLOCK);
  if (rest < stop) update_rest(as, job, rest, (int)(stop - rest));
}

/* ---- the step of a list of tensors ---- */

/* A tensor, or a part of one whose random bits have one key; engines.py fills it in this order. */
typedef struct {
  void *param, *first, *second, *remainder;
  float *first_scales, *second_scales;
  int64_t count;
  int64_t tensor, skipped; /* which tensor of the step, and its elements before this part */
  uint64_t number;         /* of the tensor's random bits */
  int64_t block, start;    /* the index of the first element: block * 2^31 + start */
} Row;

typedef struct {
  const Storage *as;
  const Row *rows;
  int64_t count;
  const uint64_t *words; /* of each tensor the address of its gradient; seed and step, mixed */
  const float *hypers;   /* HYPERS of each tensor */
  const float *maps;
} List;

#define SITES 3

/* splitmix64's finalizer: mprun/precision/random_bits.py */
static inline uint64_t mixed(uint64_t state, uint64_t part) {
  state = (state ^ part) + 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

/* The keys of a row's parameter and moments: two words each. */
static inline void row_keys(uint64_t state, const Row *row, uint32_t *keys) {
  const uint64_t whole = mixed(state, row->number);
  for (uint64_t site = 0; site < SITES; site++) {
    uint64_t key = mixed(whole, site);
    if (row->block)
      key = mixed(mixed(mixed(0, (uint32_t)key), key >> 32), (uint64_t)row->block);
    keys[2 * site] = (uint32_t)key;
    keys[2 * site + 1] = (uint32_t)(key >> 32);
  }
}

static inline int64_t whole_groups_of(const Row *row) {
  return (row->count + GROUP - 1) / GROUP * GROUP;
}

/* The elements of all rows, each one's rounded up to whole groups. */
static inline int64_t whole_groups(const List *list) {
  int64_t sum = 0;
  for (int64_t i = 0; i < list->count; i++) sum += whole_groups_of(list->rows + i);
  return sum;
}

static inline int64_t bytes_of(int format) { return format == FORMAT_F32 ? 4 : 2; }

typedef void (*part_work)(const Storage *as, const Update *job, int64_t start, int64_t stop);

/* What lies between `start` and `stop` where the rows stand one behind the other. */
static inline void update_rows(part_work work, const List *list, int64_t start, int64_t stop) {
  int64_t begin = 0;
  for (int64_t i = 0; i < list->count && begin < stop; i++) {
    const Row *row = list->rows + i;
    int64_t from = start > begin ? start - begin : 0;
    int64_t to = stop - begin < row->count ? stop - begin : row->count;
    begin += whole_groups_of(row);
    if (from >= to) continue;
    uint32_t keys[2 * SITES];
    row_keys(list->words[2 * row->tensor + 1], row, keys);
    const Update update = {
        .param = row->param,
        .first = row->first,
        .second = row->second,
        .grad = (const char *)list->words[2 * row->tensor] + row->skipped * bytes_of(list->as->grad),
        .remainder = row->remainder,
        .first_scales = row->first_scales,
        .second_scales = row->second_scales,
        .maps = list->maps,
        .start = (uint32_t)row->start,
        .hyper = list->hypers + HYPERS * row->tensor,
        .keys = keys,
    };
    work(list->as, &update, from, to);
  }
}
