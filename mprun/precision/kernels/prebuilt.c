/* The kernels: every storage and rule, chosen while they run.

There is a loop of its own for each common combination, and for all others one that chooses for each
block. Compiled for several LEVELs, the bits of a processor's vectors (0: any processor's); Python
knows which one to call. */

#include "steps.h"

#define AT_LEVEL(name, level) NAME(name##_, level)

static void round_range(const void *job, int64_t start, int64_t stop) {
  round_blocks(job, start, stop);
}

void AT_LEVEL(mprun_round, LEVEL)(const float *from, void *to, float *wide, int64_t count,
                                  uint32_t start, const uint32_t *key, int format, int saturate,
                                  int threads) {
  Rounding job = {from, to, wide, key, start, format, saturate};
  in_threads(round_range, &job, count, threads);
}

#if LEVEL >= 512

/* ---- storages with loops of their own ----

Without `saturate`, and with gradients in the parameter's dtype. X gets formula, parameter, first and
second moment, rule, and whether the first moment is rounded stochastically. */

#define RULES(X, formula, param, first, second) \
  X(formula, param, first, second, NEAREST, 0) \
  X(formula, param, first, second, STOCHASTIC, 1) \
  X(formula, param, first, second, KAHAN, 1) \
  X(formula, param, first, second, SPLIT, 1)

/* `low` and `root` are the moments in 16 bits. */
#define QUOTIENT(X, formula, param, low, root) \
  RULES(X, formula, param, F32, F32) \
  RULES(X, formula, param, low, root) \
  RULES(X, formula, param, C8, C8)

#define MOMENTUM(X, formula, param) \
  RULES(X, formula, param, F32, NONE) \
  RULES(X, formula, param, param, NONE) \
  RULES(X, formula, param, C8, NONE)

#define STORAGES(X) \
  QUOTIENT(X, ADAMW, BF16, BF16, BF16) \
  QUOTIENT(X, ADAMW, F16, S16, S16) \
  MOMENTUM(X, SGD, BF16) \
  MOMENTUM(X, SGD, F16) \
  RULES(X, SGD, BF16, NONE, NONE) \
  RULES(X, SGD, F16, NONE, NONE) \
  MOMENTUM(X, NESTEROV, BF16) \
  MOMENTUM(X, NESTEROV, F16) \
  QUOTIENT(X, RMSPROP, BF16, BF16, BF16) \
  QUOTIENT(X, RMSPROP, F16, F16, S16) \
  X(ADAMW, F32, F32, F32, NEAREST, 1) \
  X(ADAMW, F32, BF16, BF16, NEAREST, 1) \
  X(ADAMW, F32, C8, C8, NEAREST, 1)

#define MADE(formula, param, first, second, rule, drawn) \
  update_##formula##_##param##_##first##_##second##_##rule
#define STORED(formula_, param_, first_, second_, rule_, drawn) \
  {.formula = formula_, \
   .param = FORMAT_##param_, \
   .grad = FORMAT_##param_, \
   .first = FORMAT_##first_, \
   .second = FORMAT_##second_, \
   .rule = rule_, \
   .first_stochastic = drawn, \
   .root = FORMAT_##second_ > FORMAT_F32}
#define DEFINE(...) \
  static int64_t MADE(__VA_ARGS__)(const Update *job, int64_t start, int64_t stop) { \
    static const Storage as = STORED(__VA_ARGS__); \
    return update_blocks(&as, job, start, stop, SHORT); \
  }
STORAGES(DEFINE)

/* A number for each storage: each field has at most 3 bits. */
#define NUMBER(formula, param, grad, first, second, rule, drawn, root, saturate) \
  ((formula) | (param) << 3 | (grad) << 6 | (first) << 9 | (second) << 12 | (rule) << 15 | \
   (drawn) << 18 | (root) << 19 | (saturate) << 20)
#define CASE(formula, param, first, second, rule, drawn) \
  case NUMBER(formula, FORMAT_##param, FORMAT_##param, FORMAT_##first, FORMAT_##second, rule, \
              drawn, FORMAT_##second > FORMAT_F32, 0): \
    return MADE(formula, param, first, second, rule, drawn)(job, start, stop);

/* The elements that a loop of its own updates; where the rest begins. */
static int64_t update_made(const Storage *as, const Update *job, int64_t start, int64_t stop) {
  switch (NUMBER(as->formula, as->param, as->grad, as->first, as->second, as->rule,
                 as->first_stochastic, as->root, as->saturate)) { STORAGES(CASE) }
  return start;
}

#endif

static void update_part(const Storage *as, const Update *job, int64_t start, int64_t stop) {
#if LEVEL >= 512
  start = update_made(as, job, start, stop);
#endif
  update_range_as(as, job, start, stop);
}

static void update_range(const void *job, int64_t start, int64_t stop) {
  update_rows(update_part, job, start, stop);
}

/* Tensors that are stored alike: see List. */
void AT_LEVEL(mprun_update, LEVEL)(const Storage *as, const Row *rows, int64_t count,
                                   const uint64_t *words, const float *hypers,
                                   const float *maps, int threads) {
  List list = {as, rows, count, words, hypers, maps};
  in_threads(update_range, &list, whole_groups(&list), threads);
}

#if LEVEL == 0

/* Which sources this was built from: Python compares it with those beside it. */
uint32_t mprun_sources(void) { return SOURCES; }

#endif
