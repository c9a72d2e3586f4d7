/* Blocks of numbers between memory and float32 arrays: the loops of formats.h over a block.

Compilers do not find all conversions that processors have, so some are named here: those between 16
and 32 bits, and those of float16. The latter take float32 numbers that float16 has exactly, or
round to nearest, with the same result as formats.h. */

#include "formats.h"

#if defined(__AVX512F__) || (defined(__F16C__) && defined(__AVX__))
#include <immintrin.h>
#endif

/* The arrays of a step stay in the nearest cache. Blocks of 64 need fewer registers, but with AVX2 a
step takes 10 to 25 % longer in them: gcc unrolls their loops whole. */
#if defined(__AVX512F__)
#define BLOCK 64
#else
#define BLOCK 128
#endif

/* S16 is 2^6 times the number in float16, at most the largest: see SCALE in mprun/optim. */
/* C8 are codes of 8 bits with a scale for each GROUP: see mprun/optim/formulas.py. */
enum { FORMAT_NONE, FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMAT_S16, FORMAT_C8 };

#define GROUP 256
#define CODES 256
#define STARTS 65536

/* Words of 16 bits as words of 32. */
static inline void widen(const uint16_t *from, int n, uint32_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_si512(to + i,
                        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(from + i))));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_si256((void *)(to + i),
                        _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(from + i))));
#endif
  for (; i < n; i++) to[i] = from[i];
}

/* The lower halves of words, whose upper halves are 0. */
static inline void narrow(const uint32_t *from, int n, uint16_t *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((void *)(to + i), _mm512_cvtepi32_epi16(_mm512_loadu_si512(from + i)));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    __m256i words = _mm256_loadu_si256((const void *)(from + i));
    _mm_storeu_si128((void *)(to + i), _mm_packus_epi32(_mm256_castsi256_si128(words),
                                                        _mm256_extracti128_si256(words, 1)));
  }
#endif
  for (; i < n; i++) to[i] = (uint16_t)from[i];
}

static inline void widen_F16(const F16 *from, int n, float *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i))));
#elif defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
#endif
  for (; i < n; i++) to[i] = load_F16(from[i]);
}

/* To nearest; overflows become infinite. */
static inline void narrow_F16(const float *from, int n, F16 *restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((void *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 8));
#elif defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 8));
#endif
  for (; i < n; i++) to[i] = nearest_to_F16(from[i], 0x7c00u);
}

/* `x` stochastically rounded to a number of float16, as a float32; larger finite numbers become
`limit`, a pattern. */
static inline float drawn_F16(float x, uint32_t word, uint32_t limit) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  float shift = number(choose(magnitude < QUANTUM, QUANTUM, 0u));
  uint32_t y = (pattern(number(magnitude) + shift) + (word >> 19)) & ~0x1fffu;
  y = pattern(number(y) - shift);
  y = y > limit ? limit : y;
  y = magnitude < INFINITE ? y : magnitude; /* infinities and NaN as they are */
  return number(y | (bits & ~MAGNITUDE));
}

#define LARGEST_AS_F32 0x477fe000u /* float16's largest number */

static inline void widen_BF16(const BF16 *from, int n, float *restrict to) {
  uint32_t words[BLOCK];
  widen(from, n, words);
  for (int i = 0; i < n; i++) to[i] = number(words[i] << 16);
}

/* Remainders of Kahan sums, which have a sign. */
static inline void widen_rest(const int16_t *from, int n, uint32_t *restrict to) {
  widen((const uint16_t *)from, n, to);
  for (int i = 0; i < n; i++) to[i] = (uint32_t)((int32_t)(to[i] << 16) >> 16);
}

static inline void load(const void *from, int format, int64_t at, int n, float *restrict to) {
  if (format == FORMAT_F32)
    memcpy(to, (const float *)from + at, sizeof(float) * (size_t)n);
  else if (format == FORMAT_BF16)
    widen_BF16((const BF16 *)from + at, n, to);
  else
    widen_F16((const F16 *)from + at, n, to);
  if (format == FORMAT_S16)
    for (int i = 0; i < n; i++) to[i] = to[i] * 0x1p-6f;
}

/* Random bits of the elements from `index` on. */
static inline void draw(uint32_t *restrict words, int n, const uint32_t *key, uint32_t index) {
  const uint32_t low = key[0], high = key[1];
  for (int i = 0; i < n; i++) words[i] = hash(index + (uint32_t)i, low, high);
}

static inline void store_BF16(BF16 *restrict to, uint32_t top, int n, const float *from,
                              const uint32_t *words) {
  uint32_t rounded[BLOCK];
  if (words)
    for (int i = 0; i < n; i++) rounded[i] = stochastic_to_BF16(from[i], words[i], top);
  else
    for (int i = 0; i < n; i++) rounded[i] = nearest_to_BF16(from[i], top);
  narrow(rounded, n, to);
}

static inline void store_F16(F16 *restrict to, float factor, int saturate, int n,
                             const float *from, float *restrict scratch, const uint32_t *words) {
  const uint32_t limit = saturate ? LARGEST_AS_F32 : INFINITE;
  if (words) {
    for (int i = 0; i < n; i++) scratch[i] = drawn_F16(from[i] * factor, words[i], limit);
  } else {
    for (int i = 0; i < n; i++) {
      uint32_t bits = pattern(from[i] * factor), magnitude = bits & MAGNITUDE;
      uint32_t y = magnitude > limit ? limit : magnitude;
      scratch[i] = number((magnitude < INFINITE ? y : magnitude) | (bits & ~MAGNITUDE));
    }
  }
  narrow_F16(scratch, n, to);
}

/* Rounded stochastically with `words`, or to nearest where it is NULL. */
static inline void store(void *to, int format, int saturate, int64_t at, int n, const float *from,
                         float *restrict scratch, const uint32_t *words) {
  if (format == FORMAT_F32)
    memcpy((float *)to + at, from, sizeof(float) * (size_t)n);
  else if (format == FORMAT_BF16)
    store_BF16((BF16 *)to + at, saturate ? 0x7f7fu : 0x7f80u, n, from, words);
  else if (format == FORMAT_S16)
    store_F16((F16 *)to + at, 0x1p6f, 1, n, from, scratch, words);
  else
    store_F16((F16 *)to + at, 1.0f, saturate, n, from, scratch, words);
}

static inline void merge(const void *from, const int16_t *remainder, int format, int64_t at, int n,
                         float *restrict to) {
  uint32_t rest[BLOCK];
  widen_rest(remainder + at, n, rest);
  if (format == FORMAT_BF16) {
    widen_BF16((const BF16 *)from + at, n, to);
    for (int i = 0; i < n; i++) to[i] = merged_BF16(to[i], rest[i]);
  } else {
    widen_F16((const F16 *)from + at, n, to);
    for (int i = 0; i < n; i++) to[i] = merged_F16(to[i], rest[i]);
  }
}

static inline void split(void *to, int16_t *remainder, int format, int64_t at, int n,
                         const float *from, float *restrict nearest) {
  uint32_t rest[BLOCK], rounded[BLOCK];
  if (format == FORMAT_BF16) {
    for (int i = 0; i < n; i++) rounded[i] = split_BF16(from[i], rest + i);
    narrow(rounded, n, (BF16 *)to + at);
  } else {
    narrow_F16(from, n, (F16 *)to + at);
    widen_F16((const F16 *)to + at, n, nearest);
    for (int i = 0; i < n; i++) rest[i] = cut_F16(from[i], nearest[i]);
  }
  narrow(rest, n, (uint16_t *)remainder + at);
}

static inline void merge_masters(const void *from, const int8_t *rest, int format, int64_t at,
                                 int n, float *restrict to) {
  const uint16_t *parameter = (const uint16_t *)from + at;
  const uint32_t top = format == FORMAT_BF16 ? 0x7f80u : 0x7c00u;
  for (int i = 0; i < n; i++) {
    uint32_t own = parameter[i] & 0x7fffu, sign = (uint32_t)(parameter[i] & 0x8000u) << 16;
    int8_t more = own < top ? rest[at + i] : 0;
    uint32_t whole = format == FORMAT_BF16 ? number_BF16(merge_master(own, 16, more))
                                           : number_F16(merge_master(own, 13, more));
    uint32_t wide = format == FORMAT_BF16 ? own << 16 : pattern(load_F16((F16)own));
    to[i] = number(choose(own < top, whole, wide) | sign);
  }
}

static inline void split_masters(void *to, int8_t *rest, int format, int64_t at, int n,
                                 const float *from, const uint32_t *words) {
  uint32_t rounded[BLOCK], more[BLOCK]; /* bytes may alias anything, so they are written last */
  if (format == FORMAT_BF16)
    for (int i = 0; i < n; i++)
      rounded[i] = split_master(from[i], integer_BF16(from[i]), 16, 0x7f80u, words[i], more + i);
  else
    for (int i = 0; i < n; i++)
      rounded[i] = split_master(from[i], integer_F16(from[i]), 13, 0x7c00u, words[i], more + i);
  narrow(rounded, n, (uint16_t *)to + at);
  for (int i = 0; i < n; i++) rest[at + i] = (int8_t)(uint8_t)more[i];
}

/* ---- codes of 8 bits ---- */

/* Numbers of one group, or of a part of it. */
static inline void decode(const uint8_t *from, float scale, const float *map, int n,
                          float *restrict to) {
  for (int i = 0; i < n; i++) to[i] = map[from[i]] * scale;
}

/* The number of largest magnitude; NaN where one is not finite. */
static inline float largest(const float *from, int n) {
  uint32_t all = 0, positive = 0;
  for (int i = 0; i < n; i++) {
    uint32_t bits = pattern(from[i]), magnitude = bits & MAGNITUDE;
    uint32_t above = choose(bits >> 31, 0u, magnitude);
    all = magnitude > all ? magnitude : all;
    positive = above > positive ? above : positive;
  }
  if (all >= INFINITE) return number(0x7fc00000u);
  return number(all > positive ? all | ~MAGNITUDE : all);
}

/* The codes of one group and its scale. `starts` has, for the upper 16 bits of a number, the last
code whose value is not above the smallest number with these bits; at most one value of the map is
between such numbers. Then one of the neighbours is taken: with `words`, either; else the nearer. */
static inline void encode(uint8_t *restrict to, float *scale, const float *map,
                          const uint8_t *starts, int n, const float *from,
                          const uint32_t *words) {
  const float size = largest(from, n);
  const int32_t lowest = map[0] == 0.0f; /* a positive root never becomes 0 */
  float ratios[GROUP], low[GROUP], gap[GROUP];
  int32_t codes[GROUP];
  *scale = size;
  for (int i = 0; i < n; i++) {
    float ratio = from[i] / size;
    ratios[i] = number(choose((pattern(ratio) & MAGNITUDE) > INFINITE, 0u, pattern(ratio)));
  }
  for (int i = 0; i < n; i++) { /* sums instead of choices: there is nothing to mispredict */
    int32_t code = starts[pattern(ratios[i]) >> 16];
    code += (ratios[i] >= map[code + (code < CODES - 1)]) & (code < CODES - 1);
    codes[i] = code;
    low[i] = map[code];
    gap[i] = map[code + (code < CODES - 1)];
  }
  for (int i = 0; i < n; i++) gap[i] -= low[i];
  if (words)
    for (int i = 0; i < n; i++)
      codes[i] += (ratios[i] - low[i] >
                   ((float)(int32_t)(words[i] >> 16) * 0x1p-16f + 0x1p-17f) * gap[i]) &
                  (codes[i] < CODES - 1);
  else
    for (int i = 0; i < n; i++)
      codes[i] += (ratios[i] - low[i] >= gap[i] * 0.5f) & (codes[i] < CODES - 1);
  for (int i = 0; i < n; i++) {
    int32_t least = lowest & (ratios[i] > 0.0f);
    to[i] = (uint8_t)(codes[i] > least ? codes[i] : least);
  }
}
