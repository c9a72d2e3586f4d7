/* float32, float16 and bfloat16 in memory, and the roundings between them.

The same operations as mprun/precision/rounding.py and random_bits.py, which explain them; results
are equal bit for bit, but for what is inside a NaN. Written without branches, so that compilers vectorise the loops. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float F32;
typedef uint16_t F16;
typedef uint16_t BF16;

static inline uint32_t pattern(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t choose(uint32_t condition, uint32_t yes, uint32_t no) {
  uint32_t mask = -condition;
  return (yes & mask) | (no & ~mask);
}

static inline uint32_t hash(uint32_t index, uint32_t low, uint32_t high) {
  uint32_t word = (index ^ low) * 0xed5ad4bbu;
  word ^= word >> 11;
  word = (word ^ high) * 0xac4c1b51u;
  word = (word ^ (word >> 15)) * 0x31848babu;
  return word ^ (word >> 14);
}

/* The difference a - b or its neighbour, so that the mean is exact: the lower 16 bits decide. */
static inline float settle(float difference, float a, float b, uint32_t word) {
  float back = difference - a, rest = (a - (difference - back)) - (b + back);
  uint32_t bits = pattern(difference);
  uint32_t by = (uint32_t)((int32_t)(pattern(rest) ^ bits) >> 31) | 1u; /* -1 or 1 */
  float gap = fabsf(number(bits + by) - difference);
  float drawn = number(0x3f800040u | ((word << 7) & 0x7fff80u)) - 1.0f; /* 2^-16 (word + 1/2) */
  return number(fabsf(rest) > drawn * gap ? bits + by : bits);
}

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u /* float32's infinity */
#define QUANTUM 0x38800000u  /* 2^-14, float16's smallest normal */
#define REBIAS (112u << 23)  /* between the exponents of float32 and float16 */

#define LARGEST_F16 0x7bffu
#ifdef SATURATE
#define TOP_F16 LARGEST_F16
#define TOP_BF16 0x7f7fu
#else
#define TOP_F16 0x7c00u
#define TOP_BF16 0x7f80u
#endif

/* ---- float32: stored as it is ---- */

static inline float load_F32(F32 x) { return x; }
static inline F32 nearest_F32(float x) { return x; }
static inline F32 stochastic_F32(float x, uint32_t word) { return x; }

/* ---- bfloat16 ---- */

static inline float load_BF16(BF16 x) { return number((uint32_t)x << 16); }

/* `top` is what overflows become: TOP_BF16, infinity or the largest number. */
static inline BF16 finish_BF16(uint32_t bits, uint32_t rounded, uint32_t top) {
  uint32_t magnitude = bits & MAGNITUDE, sign = (bits >> 16) & 0x8000u;
  rounded = choose((rounded >= top) & (magnitude < INFINITE), top, rounded);
  rounded = choose(magnitude > INFINITE, 0x7fc0u, rounded);
  return rounded | sign;
}

static inline BF16 nearest_to_BF16(float x, uint32_t top) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  return finish_BF16(bits, (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16, top);
}

static inline BF16 stochastic_to_BF16(float x, uint32_t word, uint32_t top) {
  uint32_t bits = pattern(x);
  return finish_BF16(bits, ((bits & MAGNITUDE) + (word >> 16)) >> 16, top);
}

static inline BF16 nearest_BF16(float x) { return nearest_to_BF16(x, TOP_BF16); }
static inline BF16 stochastic_BF16(float x, uint32_t w) {
  return stochastic_to_BF16(x, w, TOP_BF16);
}

static inline BF16 split_BF16(float x, int16_t *remainder) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  uint32_t finite = magnitude < INFINITE;
  uint32_t rounded = (magnitude + choose(finite, 0x8000u, 0u)) >> 16;
  *remainder = (int16_t)choose(finite, magnitude - (rounded << 16), 0u);
  rounded = choose(magnitude > INFINITE, 0x7fc0u, rounded);
  return rounded | ((bits >> 16) & 0x8000u);
}

static inline float merge_BF16(BF16 x, int16_t remainder) {
  uint32_t wide = (uint32_t)x << 16, magnitude = wide & MAGNITUDE;
  uint32_t whole = magnitude + (uint32_t)(int32_t)remainder; /* a huge one where below zero */
  return number(choose(whole > INFINITE, magnitude, whole) | (wide & ~MAGNITUDE));
}

/* ---- float16 ---- */

static inline float load_F16(F16 x) {
  uint32_t bits = x, magnitude = (bits & 0x7fffu) << 13;
  uint32_t normal = magnitude + REBIAS + choose(magnitude >= (31u << 23), REBIAS, 0u);
  uint32_t small = pattern((float)(int32_t)(bits & 0x3ffu) * 0x1p-24f);
  return number(choose(magnitude < (1u << 23), small, normal) | ((bits & 0x8000u) << 16));
}

/* `top` is what overflows become: TOP_F16 or the largest number. */
static inline F16 finish_F16(uint32_t bits, uint32_t normal, uint32_t small, uint32_t top) {
  uint32_t magnitude = bits & MAGNITUDE;
  uint32_t rounded = choose(magnitude < QUANTUM, small, normal);
  rounded = choose((rounded >= top) & (magnitude < INFINITE), top, rounded);
  rounded = choose(magnitude == INFINITE, 0x7c00u, rounded);
  rounded = choose(magnitude > INFINITE, 0x7e00u, rounded);
  return rounded | ((bits >> 16) & 0x8000u);
}

static inline F16 nearest_to_F16(float x, uint32_t top) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  /* Adding 1/2 to a subnormal rounds it to a multiple of 2^-24, once. */
  uint32_t small = pattern(number(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t normal = (magnitude - REBIAS + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  return finish_F16(bits, normal, small, top);
}

static inline F16 stochastic_to_F16(float x, uint32_t word, uint32_t top) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE, add = word >> 19;
  uint32_t small = (pattern(number(magnitude) + 0x1p-14f) + add - (113u << 23)) >> 13;
  return finish_F16(bits, (magnitude - REBIAS + add) >> 13, small, top);
}

static inline F16 nearest_F16(float x) { return nearest_to_F16(x, TOP_F16); }
static inline F16 stochastic_F16(float x, uint32_t w) { return stochastic_to_F16(x, w, TOP_F16); }

/* The remainder of `x`, of which `rounded` is the nearest number of float16. */
static inline int16_t cut_F16(float x, float rounded) {
  uint32_t wide = pattern(rounded) & MAGNITUDE, magnitude = pattern(x) & MAGNITUDE;
  uint32_t small = pattern(number(magnitude) + 0x1p-14f) - pattern(number(wide) + 0x1p-14f);
  uint32_t difference = choose(wide < QUANTUM, small, magnitude - wide);
  return (int16_t)choose(wide < INFINITE, difference, 0u);
}

/* `x`, a number of float16, with its remainder. */
static inline float merged_F16(float x, int16_t remainder) {
  uint32_t bits = pattern(x), wide = bits & MAGNITUDE, add = (uint32_t)(int32_t)remainder;
  /* Below zero it has a sign, and so is a huge one here. */
  uint32_t small = pattern(number(pattern(number(wide) + 0x1p-14f) + add) - 0x1p-14f);
  uint32_t whole = choose(wide < QUANTUM, small, wide + add);
  return number(choose((whole > INFINITE) | (wide >= INFINITE), wide, whole) | (bits & ~MAGNITUDE));
}

static inline F16 split_F16(float x, int16_t *remainder) {
  F16 rounded = nearest_F16(x);
  *remainder = cut_F16(x, load_F16(rounded));
  return rounded;
}

static inline float merge_F16(F16 x, int16_t remainder) {
  return merged_F16(load_F16(x), remainder);
}

/* ---- 2^6 times the number in float16, at most the largest: see SCALE in mprun/optim ---- */

typedef uint16_t S16;

static inline float load_S16(S16 x) { return load_F16(x) * 0x1p-6f; }
static inline S16 nearest_S16(float x) { return nearest_to_F16(x * 0x1p6f, LARGEST_F16); }
static inline S16 stochastic_S16(float x, uint32_t word) {
  return stochastic_to_F16(x * 0x1p6f, word, LARGEST_F16);
}

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
