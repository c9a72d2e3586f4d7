/* float32, float16 and bfloat16, and the roundings between them.

The same operations as mprun/precision/rounding.py and random_bits.py, which explain them; results
are equal bit for bit, but for what is inside a NaN. Written without branches, so that compilers
vectorise the loops. */

#include <math.h>
#include <stdint.h>
#include <string.h>

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

/* ---- bfloat16 ---- */

/* `top` is what overflows become: infinity, which both roundings give by themselves, or the largest
number. */
static inline uint32_t finish_BF16(uint32_t bits, uint32_t rounded, uint32_t top) {
  uint32_t magnitude = bits & MAGNITUDE, sign = (bits >> 16) & 0x8000u;
  if (top != INFINITE >> 16)
    rounded = choose((rounded >= top) & (magnitude < INFINITE), top, rounded);
  rounded = (int32_t)magnitude > (int32_t)INFINITE ? 0x7fc0u : rounded;
  return rounded | sign;
}

static inline uint32_t nearest_to_BF16(float x, uint32_t top) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  return finish_BF16(bits, (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16, top);
}

static inline uint32_t stochastic_to_BF16(float x, uint32_t word, uint32_t top) {
  uint32_t bits = pattern(x);
  return finish_BF16(bits, ((bits & MAGNITUDE) + (word >> 16)) >> 16, top);
}

/* The remainder is a word of 16 bits with a sign; its upper half is 0. */
static inline uint32_t split_BF16(float x, uint32_t *remainder) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE;
  uint32_t finite = magnitude < INFINITE;
  uint32_t rounded = (magnitude + choose(finite, 0x8000u, 0u)) >> 16;
  *remainder = choose(finite, (magnitude - (rounded << 16)) & 0xffffu, 0u);
  rounded = choose(magnitude > INFINITE, 0x7fc0u, rounded);
  return rounded | ((bits >> 16) & 0x8000u);
}

/* `x`, a number of bfloat16, with its remainder, which has a sign. */
static inline float merged_BF16(float x, uint32_t remainder) {
  uint32_t wide = pattern(x), magnitude = wide & MAGNITUDE;
  uint32_t whole = magnitude + remainder; /* a huge one where below zero */
  return number(choose(whole > INFINITE, magnitude, whole) | (wide & ~MAGNITUDE));
}

/* ---- float16 ---- */

static inline float load_F16(F16 x) {
  uint32_t bits = x, magnitude = (bits & 0x7fffu) << 13;
  uint32_t normal = magnitude + REBIAS + choose(magnitude >= (31u << 23), REBIAS, 0u);
  uint32_t small = pattern((float)(int32_t)(bits & 0x3ffu) * 0x1p-24f);
  return number(choose(magnitude < (1u << 23), small, normal) | ((bits & 0x8000u) << 16));
}

/* `top` is what overflows become: infinity or the largest number. */
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

/* The remainder of `x`, of which `rounded` is the nearest number of float16. */
static inline uint32_t cut_F16(float x, float rounded) {
  uint32_t wide = pattern(rounded) & MAGNITUDE, magnitude = pattern(x) & MAGNITUDE;
  uint32_t small = pattern(number(magnitude) + 0x1p-14f) - pattern(number(wide) + 0x1p-14f);
  uint32_t difference = choose(wide < QUANTUM, small, magnitude - wide);
  return choose(wide < INFINITE, difference & 0xffffu, 0u);
}

/* `x`, a number of float16, with its remainder. */
static inline float merged_F16(float x, uint32_t add) {
  uint32_t bits = pattern(x), wide = bits & MAGNITUDE;
  /* Below zero it has a sign, and so is a huge one here. */
  uint32_t small = pattern(number(pattern(number(wide) + 0x1p-14f) + add) - 0x1p-14f);
  uint32_t whole = choose(wide < QUANTUM, small, wide + add);
  return number(choose((whole > INFINITE) | (wide >= INFINITE), wide, whole) | (bits & ~MAGNITUDE));
}

/* ---- masters of 24 bits: mprun/precision/rounding.py ---- */

/* The integer whose upper bits are the magnitude of the 16-bit parameter. */
static inline uint32_t integer_BF16(float x) { return pattern(x) & MAGNITUDE; }

static inline uint32_t integer_F16(float x) {
  uint32_t magnitude = pattern(x) & MAGNITUDE;
  uint32_t low = pattern(number(magnitude) + 0x1p-14f) - QUANTUM;
  return choose(magnitude < QUANTUM, low, magnitude - (QUANTUM - 0x800000u));
}

static inline uint32_t number_BF16(uint32_t integer) { return integer; }

static inline uint32_t number_F16(uint32_t integer) {
  uint32_t low = pattern(number(integer + QUANTUM) - 0x1p-14f);
  return choose(integer < 0x800000u, low, integer + (QUANTUM - 0x800000u));
}

/* The parameter, and the 8 bits beside it, which have a sign. `cut` bits of the integer are below
the parameter; `top` is its infinity. */
static inline uint32_t split_master(float x, uint32_t integer, uint32_t cut, uint32_t top,
                                    uint32_t word, uint32_t *rest) {
  uint32_t bits = pattern(x), magnitude = bits & MAGNITUDE, unit = cut - 8;
  uint32_t master = (integer + (word >> (32 - unit))) >> unit;
  uint32_t parameter = (master + 0x80u) >> 8;
  uint32_t finite = (magnitude < INFINITE) & (parameter < top);
  *rest = choose(finite, master - (parameter << 8), 0u); /* its last 8 bits */
  parameter = choose(finite, parameter, top);
  parameter = choose(magnitude > INFINITE, 0x7fffu, parameter);
  return parameter | ((bits >> 16) & 0x8000u);
}

/* The integer of a parameter with its 8 bits; without them where they carry it past zero. */
static inline uint32_t merge_master(uint32_t parameter, uint32_t cut, int8_t rest) {
  uint32_t own = (parameter & 0x7fffu) << cut;
  uint32_t master = own + (uint32_t)(int32_t)rest * (1u << (cut - 8));
  return choose(master >> 31, own, master);
}

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
