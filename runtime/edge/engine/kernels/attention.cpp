// Attention over the paged KV cache on the CPU: for all tokens of a step and one layer, norm and rotate queries and
// keys, store keys and values, attend. What it means is `paged_attention_reference` in engine/attention.py; the layout
// of pages is in engine/kv_cache.py. Knows nothing about models.
//
// Letters: B sequences, N new tokens of one, H query heads, K key-value heads, G = H / K, D head dimension.
//
// The result of a query does not depend by a single bit on what else is in the step, on how its sequence was cut into
// steps, or on the number of threads. For each row (a query token and head) the order of operations follows from its
// position alone: products run over D in order; keys come in blocks of 64 at fixed places, blocks in splits of 256,
// and splits are merged in order, whether one thread does them all or each is a task. Hidden keys add exact zeros.
//
// Where the processor multiplies bfloat16 numbers, in pairs, added up in float32, the products of the formats below
// float32 are of those: queries and weights are rounded like the keys and values that they meet. Codes are exact in
// bfloat16; their scales are applied to scores and weights. Elsewhere all products are of floats. A page is turned into
// pairs (or floats) once for all rows of a task, into memory of the first-level cache. Then both products, of queries
// with keys and of weights with values, are the same small matrix product: 12 rows by 2 vectors, or what there are
// registers for. Weights are 2^(score - M) with a whole number M: the factor between two such M is exact, and so the
// rounding of a weight does not depend on the M of its time.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace {

using namespace edge;

constexpr int kPage = 16;
constexpr int kBlockPages = 4;
constexpr int kBlock = kBlockPages * kPage;
constexpr int kSplit = 256;
constexpr int kSplitPages = kSplit / kPage;
constexpr int kMaxD = 256;
constexpr int kMaxRows = 48;
#if defined(__AVX512F__)
constexpr int kGroup = 12;  // rows of the small product
#else
constexpr int kGroup = 6;
#endif
constexpr int kFewRows = 4;  // so few of them multiply with bfloat16 pages as they are
#if defined(__AVX512BF16__)
constexpr bool kDots = true;  // whether products of pairs of bfloat16 numbers are one instruction
#else
constexpr bool kDots = false;
#endif
constexpr int kStride = kMaxD + 16;  // of rows in scratch memory; rows at a power of two would share cache sets
constexpr int kScoreStride = kBlock + 16;
constexpr int kStoreTokens = 64;     // tokens whose keys and values one task stores
constexpr float kSmallestScale = 1e-37f;  // as in engine/kv_cache.py
constexpr float kLog2E = 1.44269504088896340736f;

enum Format { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

}  // namespace

extern "C" {

struct EdgeAttentionLayer {
  void* keys;
  void* values;
  uint16_t* key_scales;
  uint16_t* value_scales;
  uint16_t* value_minimums;
  uint16_t* side_keys;
  uint16_t* side_values;
  const float* q_norm;  // (D,) weights, or null
  const float* k_norm;
  float q_eps, k_eps;
  float scale;
  float softcap;  // 0: none
  int32_t format, num_heads, num_kv_heads, head_dim;
  int32_t num_pages, num_side_pages;
  int32_t window;  // 0: none
  int32_t rotate_keys, rotate_values, sink_pages, window_pages;
};

struct EdgeAttentionStep {
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* page_table;
  const int32_t* side_of_page;  // int4 only
  int32_t num_sequences, max_pages;
};

}  // extern "C"

namespace {

typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t I8x16 __attribute__((vector_size(16)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

inline Ints lanes() {
  static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<Ints>(kNumbers);
}

#if defined(__AVX512F__)
inline Ints wide(I8x16 x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }
inline Bits wide(U8x16 x) { return (Bits)_mm512_cvtepu8_epi32((__m128i)x); }
inline Bits wide(U16x16 x) { return (Bits)_mm512_cvtepu16_epi32((__m256i)x); }
inline U16x16 narrow(Bits x) { return (U16x16)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
inline Ints wide(I8x16 x) {
  const __m128i v = (__m128i)x;
  return {(Ints::Part)_mm256_cvtepi8_epi32(v), (Ints::Part)_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
inline Bits wide(U8x16 x) {
  const __m128i v = (__m128i)x;
  return {(Bits::Part)_mm256_cvtepu8_epi32(v), (Bits::Part)_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
inline Bits wide(U16x16 x) {
  const __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
  return {(Bits::Part)_mm256_cvtepu16_epi32(low), (Bits::Part)_mm256_cvtepu16_epi32(high)};
}
inline U16x16 narrow(Bits x) {  // which must fit
  return (U16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x.part[0], (__m256i)x.part[1]), 0xd8);
}
#else
template <class To, class E, class From>
inline To converted(From x) {
  E lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = E(x[i]);
  return load<To>(lanes);
}
inline Ints wide(I8x16 x) { return converted<Ints, int32_t>(x); }
inline Bits wide(U8x16 x) { return converted<Bits, uint32_t>(x); }
inline Bits wide(U16x16 x) { return converted<Bits, uint32_t>(x); }
inline U16x16 narrow(Bits x) { return converted<U16x16, uint16_t>(x); }
#endif
inline Floats floats(I8x16 x) { return to_floats(wide(x)); }
inline Floats floats(U16x16 x) { return (Floats)(wide(x) << 16); }

inline float float_of(uint16_t bfloat16) {
  const uint32_t raw = uint32_t(bfloat16) << 16;
  float x;
  std::memcpy(&x, &raw, sizeof x);
  return x;
}
inline U16x16 bfloat16s(Floats x) {  // to nearest, ties to even; NaN stays NaN
  Bits raw = (Bits)x;
  Bits rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16;
  return narrow(select(x != x, (raw >> 16) | 0x40, rounded));
}

// Two bfloat16 numbers in each lane: the first in its lower half.
inline Bits pairs(U16x16 first, U16x16 second) {
#if defined(__AVX512BW__)
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Bits)_mm512_permutexvar_epi16(order, both);
#else
  return wide(first) | wide(second) << 16;
#endif
}
inline Floats first_of(Bits pairs) { return (Floats)(pairs << 16); }
inline Floats second_of(Bits pairs) { return (Floats)(pairs & 0xFFFF0000u); }
// Of floats that are bfloat16 numbers.
inline Bits exact_pairs(Floats first, Floats second) { return (Bits)first >> 16 | (Bits)second; }
// The sixteen floats of `first` and then those of `second`, rounded to bfloat16, neighbours in pairs.
inline Bits rounded_neighbours(Floats first, Floats second) {
#if defined(__AVX512BF16__)
  return (Bits)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  const U16x16 halves[2] = {bfloat16s(first), bfloat16s(second)};
  return load<Bits>(halves);
#endif
}

// Sums and maxima of 16 lanes, always as the same tree.
template <class Combine>
inline float reduce(Floats x, Combine combine) {
  x = combine(x, swapped<8>(x));
  x = combine(x, swapped<4>(x));
  x = combine(x, swapped<2>(x));
  x = combine(x, swapped<1>(x));
  return x[0];
}
inline Floats larger(Floats a, Floats b) {  // b if one is NaN
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}
inline float total(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}
inline float maximum(Floats x) { return reduce(x, larger); }

// 2^x for x <= 0, exact for whole numbers; NaN stays NaN.
inline Floats exp2_(Floats x) {
#if defined(__AVX512DQ__)
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, 8);  // x less the nearest whole number; 0 for -infinity
#else
  const Floats clamped = select(x < -126.0f, splat(-126.0f), x);
  const Ints whole = round_to_ints(clamped);
  const Floats f = clamped - to_floats(whole);
#endif
  Floats p = splat(1.32647273e-3f);  // the best of degree 5 for -0.5 to 0.5, relative error 1e-7
  p = multiply_add(p, f, splat(9.67151299e-3f));
  p = multiply_add(p, f, splat(5.55073358e-2f));
  p = multiply_add(p, f, splat(2.40222424e-1f));
  p = multiply_add(p, f, splat(6.93147004e-1f));
  p = multiply_add(p, f, splat(1.0f));
#if defined(__AVX512DQ__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
#else
  return select(x < -126.0f, Floats{}, p * (Floats)((whole + 127) << 23));
#endif
}
// 2^x for a whole number x <= 0; 0 below -126.
inline float power_of_two(float x) {
  const uint32_t raw = x < -126.0f ? 0 : uint32_t(int32_t(x) + 127) << 23;
  float power;
  std::memcpy(&power, &raw, sizeof power);
  return power;
}

// tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|)
inline Floats tanh_(Floats x) {
  Floats magnitude = select(x < 0.0f, -x, x);
  Floats e = exp2_(magnitude * (-2.0f * kLog2E));
  Floats t = (1.0f - e) / (1.0f + e);
  return select(x < 0.0f, -t, t);
}

// Rows of q and weights, keys and values are of floats, or of pairs of bfloat16 numbers in the same 32 bits.
struct Scratch {
  alignas(64) uint32_t q[kMaxRows * kStride];
  alignas(64) float acc[kMaxRows * kStride];
  alignas(64) float total[kMaxRows * kStride];
  alignas(64) uint32_t keys[kBlock * kMaxD];
  alignas(64) uint32_t values[kBlock * kMaxD];
  alignas(64) float key_scales[kBlock], value_scales[kBlock], value_minimums[kBlock];
  alignas(64) float scores[kGroup * kScoreStride];
  alignas(64) uint32_t weights[kGroup * kScoreStride];
  Floats sums[kMaxRows], minimums[kMaxRows];  // lane by lane, of the weights and of the weights times minimums
  float factors[kMaxRows];  // by which a block's new maximum scales what was before it
  float max[kMaxRows], sum[kMaxRows], total_max[kMaxRows], total_sum[kMaxRows];
  int position[kMaxRows];
};

struct Task {
  int sequence, kv_head;
  int first_row, num_rows;  // of the N * G rows of this sequence and head: token * G + head in group
  int split;                // of the keys; -1: all, and the results are final
  int partial;              // where the results of a split go
  long cost;
  const Task* next;  // what this thread probably does next, or null
};

struct Call {
  const EdgeAttentionLayer& layer;
  const EdgeAttentionStep& step;
  const float* qkv;
  const float* cos;
  const float* sin;
  int half_rotary;
  float* out;

  int G() const { return layer.num_heads / layer.num_kv_heads; }
  int num_new(int b) const { return step.starts[b + 1] - step.starts[b]; }
  int position(int b, int token) const { return step.lengths[b] - num_new(b) + token; }
  const int32_t* pages(int b) const { return step.page_table + size_t(b) * step.max_pages; }
};

// ---- queries, keys and values of one token ----

void norm(float* x, int D, const float* weight, float eps) {
  Floats squares{};
  for (int d = 0; d < D; d += 16) squares += load<Floats>(x + d) * load<Floats>(x + d);
  float factor = 1.0f / std::sqrt(total(squares) / D + eps);
  for (int d = 0; d < D; d += 16) store(x + d, load<Floats>(x + d) * factor * load<Floats>(weight + d));
}

void rotate(float* x, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const Floats low = load<Floats>(x + i), high = load<Floats>(x + i + half);
    const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
    store(x + i, low * c - high * s);
    store(x + i + half, high * c + low * s);
  }
  for (; i < half; i++) {
    float low = x[i], high = x[i + half];
    x[i] = low * cos[i] - high * sin[i];
    x[i + half] = high * cos[i] + low * sin[i];
  }
}

// x times the normalised Hadamard matrix of the largest power of two that divides D, block by block.
void hadamard(float* x, int D) {
  const int block = D & -D;
  const Ints lane = lanes();
  const auto negated = [&](Floats v, int32_t bit) { return select((lane & bit) != 0, -v, v); };
  for (int d = 0; d < D; d += 16) {
    Floats v = load<Floats>(x + d);
    v = swapped<1>(v) + negated(v, 1);
    v = swapped<2>(v) + negated(v, 2);
    v = swapped<4>(v) + negated(v, 4);
    v = swapped<8>(v) + negated(v, 8);
    store(x + d, v);
  }
  for (int width = 16; width < block; width *= 2)
    for (int start = 0; start < D; start += 2 * width)
      for (int d = start; d < start + width; d += 16) {
        Floats low = load<Floats>(x + d), high = load<Floats>(x + d + width);
        store(x + d, low + high);
        store(x + d + width, low - high);
      }
  const float factor = 1.0f / std::sqrt(float(block));
  for (int d = 0; d < D; d += 16) store(x + d, load<Floats>(x + d) * factor);
}

// Never inlined: one piece of code for every caller, so that rounding is the same everywhere.
__attribute__((noinline)) void prepare(
  const Call& call, int row, const float* from, float* to, const float* weight, float eps) {
  const int D = call.layer.head_dim;
  for (int d = 0; d < D; d += 16) store(to + d, load<Floats>(from + d));
  if (weight) norm(to, D, weight, eps);
  const size_t at = size_t(row) * call.half_rotary;
  rotate(to, call.cos + at, call.sin + at, call.half_rotary);
  if (call.layer.rotate_keys) hadamard(to, D);
}

// ---- storing ----

uint16_t rounded_up(float x) {  // bfloat16; away from 0 if positive, towards 0 if negative
  uint32_t raw;
  std::memcpy(&raw, &x, sizeof raw);
  return uint16_t((x > 0 ? raw + 0xFFFF : raw) >> 16);
}
float inverse(float scale) { return scale < kSmallestScale ? 0.0f : 1.0f / scale; }

struct Range {
  float low, high;
  float poison;  // NaN if any number is not finite, else 0: comparisons would drop it
};
Range range_of(const float* x, int D) {
  Floats low = load<Floats>(x), high = low, poison = low * 0.0f;
  for (int d = 16; d < D; d += 16) {
    Floats v = load<Floats>(x + d);
    low = select(v < low, v, low);
    high = select(v > high, v, high);
    poison += v * 0.0f;
  }
  return {-maximum(-low), maximum(high), total(poison)};
}
inline Ints rounded(Floats x, float low, float high) {
  x = select(x < low, splat(low), x);
  x = select(x > high, splat(high), x);
  return round_to_ints(x);
}

// Codes of x, D of them, in `codes`; returns the scale.
uint16_t quantize_int8(const float* x, int D, int32_t* codes) {
  Range range = range_of(x, D);
  uint16_t scale = rounded_up(std::max(range.high, -range.low) / 127.0f + range.poison);
  float factor = inverse(float_of(scale));
  for (int d = 0; d < D; d += 16) store(codes + d, rounded(load<Floats>(x + d) * factor, -127.0f, 127.0f));
  return scale;
}
uint16_t quantize_key_int4(const float* x, int D, int32_t* codes) {
  Range range = range_of(x, D);
  uint16_t scale = rounded_up(std::max(range.high, -range.low) / 7.5f + range.poison);
  float factor = inverse(float_of(scale));
  for (int d = 0; d < D; d += 16) store(codes + d, rounded(load<Floats>(x + d) * factor + 7.5f, 0.0f, 15.0f));
  return scale;
}
uint16_t quantize_value_int4(const float* x, int D, int32_t* codes, uint16_t* minimum) {
  Range range = range_of(x, D);
  *minimum = rounded_up(-range.low) ^ 0x8000;
  float low = float_of(*minimum);
  uint16_t scale = rounded_up((range.high - low) / 15.0f + range.poison);
  float factor = inverse(float_of(scale));
  for (int d = 0; d < D; d += 16) store(codes + d, rounded((load<Floats>(x + d) - low) * factor, 0.0f, 15.0f));
  return scale;
}

void store_bfloat16(const float* k, const float* v, int D, uint16_t* keys, uint16_t* values, int offset) {
  alignas(32) uint16_t narrow[kMaxD];
  for (int d = 0; d < D; d += 16) {
    store(narrow + d, bfloat16s(load<Floats>(k + d)));
    store(values + offset * D + d, bfloat16s(load<Floats>(v + d)));
  }
  for (int d = 0; d < D; d++) keys[d * kPage + offset] = narrow[d];
}

void store_int8(const EdgeAttentionLayer& layer, const float* k, const float* v, size_t page, int offset) {
  const int D = layer.head_dim;
  alignas(64) int32_t codes[kMaxD];
  layer.key_scales[page * kPage + offset] = quantize_int8(k, D, codes);
  int8_t* keys = static_cast<int8_t*>(layer.keys) + page * D * kPage;
  for (int d = 0; d < D; d++) keys[d * kPage + offset] = int8_t(codes[d]);
  layer.value_scales[page * kPage + offset] = quantize_int8(v, D, codes);
  int8_t* values = static_cast<int8_t*>(layer.values) + (page * kPage + offset) * D;
  for (int d = 0; d < D; d++) values[d] = int8_t(codes[d]);
}

void store_int4(const EdgeAttentionLayer& layer, const float* k, const float* v, size_t page, int offset) {
  const int D = layer.head_dim, half = D / 2;
  alignas(64) int32_t codes[kMaxD];
  layer.key_scales[page * kPage + offset] = quantize_key_int4(k, D, codes);
  uint8_t* keys = static_cast<uint8_t*>(layer.keys) + page * half * kPage;
  for (int d = 0; d < half; d++) keys[d * kPage + offset] = uint8_t(codes[d] | codes[d + half] << 4);
  uint16_t* minimum = layer.value_minimums + page * kPage + offset;
  layer.value_scales[page * kPage + offset] = quantize_value_int4(v, D, codes, minimum);
  uint8_t* values = static_cast<uint8_t*>(layer.values) + (page * kPage + offset) * half;
  for (int d = 0; d < half; d++) values[d] = uint8_t(codes[d] | codes[d + half] << 4);
}

void store_float32(const EdgeAttentionLayer& layer, const float* k, const float* v, size_t page, int offset) {
  const int D = layer.head_dim;
  float* keys = static_cast<float*>(layer.keys) + page * D * kPage;
  for (int d = 0; d < D; d++) keys[d * kPage + offset] = k[d];
  std::memcpy(static_cast<float*>(layer.values) + (page * kPage + offset) * D, v, D * sizeof(float));
}

// Keys and values of some new tokens of sequence b for one key-value head.
void store_tokens(const Call& call, int b, int kv_head, int first, int end) {
  const EdgeAttentionLayer& layer = call.layer;
  const int H = layer.num_heads, K = layer.num_kv_heads, D = layer.head_dim;
  alignas(64) float k[kMaxD], v[kMaxD];
  for (int token = first; token < end; token++) {
    const int row = call.step.starts[b] + token, position = call.position(b, token);
    const float* from = call.qkv + size_t(row) * (H + 2 * K) * D;
    prepare(call, row, from + (H + kv_head) * D, k, layer.k_norm, layer.k_eps);
    std::memcpy(v, from + (H + K + kv_head) * D, D * sizeof(float));
    const int number = call.pages(b)[position / kPage], offset = position % kPage;
    const size_t page = size_t(kv_head) * layer.num_pages + number;  // in units of a page of one head
    switch (layer.format) {
      case kFloat32: store_float32(layer, k, v, page, offset); break;
      case kBfloat16: {
        const size_t at = page * D * kPage;
        store_bfloat16(
          k, v, D, static_cast<uint16_t*>(layer.keys) + at, static_cast<uint16_t*>(layer.values) + at, offset);
        break;
      }
      case kInt8: store_int8(layer, k, v, page, offset); break;
      case kInt4: {
        if (layer.rotate_values) hadamard(v, D);
        store_int4(layer, k, v, page, offset);
        const int side = call.step.side_of_page[number];
        if (side >= 0) {
          const size_t at = (size_t(kv_head) * layer.num_side_pages + side) * D * kPage;
          store_bfloat16(k, v, D, layer.side_keys + at, layer.side_values + at, offset);
        }
        break;
      }
    }
  }
}

// ---- pages to floats and pairs ----

// One page of one head, as the rows of a task see it.
struct Page {
  int format;
  const void *keys, *values;
  const uint16_t *key_scales, *value_scales, *value_minimums;  // or null
};

size_t page_bytes(int format, int D) {
  static constexpr int kBits[] = {32, 16, 8, 4};
  return size_t(kPage) * D * kBits[format] / 8;
}

Page page_of(const Call& call, const Task& task, int index, int query_page) {
  const EdgeAttentionLayer& layer = call.layer;
  const int number = call.pages(task.sequence)[index], D = layer.head_dim;
  const auto part = [](const void* plane, size_t bytes) { return static_cast<const char*>(plane) + bytes; };
  if (layer.format == kInt4 && (index < layer.sink_pages || index > query_page - layer.window_pages)) {
    const int side = call.step.side_of_page[number];
    if (side >= 0) {
      const size_t at = (size_t(task.kv_head) * layer.num_side_pages + side) * page_bytes(kBfloat16, D);
      return {kBfloat16, part(layer.side_keys, at), part(layer.side_values, at), nullptr, nullptr, nullptr};
    }
  }
  const size_t page = size_t(task.kv_head) * layer.num_pages + number, at = page * page_bytes(layer.format, D);
  const auto scales = [&](const uint16_t* plane) { return plane ? plane + page * kPage : nullptr; };
  return {layer.format,
          part(layer.keys, at),
          part(layer.values, at),
          scales(layer.key_scales),
          scales(layer.value_scales),
          scales(layer.value_minimums)};
}


// Every reader of pages asks for the memory that is read a block later, line by line as it goes: the processor's own
// prefetching starts too late in the few kilobytes that a page has in one place, and a core waits for only so many
// lines at a time. Inlined, because the compiler takes a function that only prefetches for one without effect.
EDGE_INLINE void prefetch(const void* from, int byte) {
  __builtin_prefetch(static_cast<const char*>(from) + byte);
}

void copy(const void* from, const void* next, int count, uint32_t* to) {
  for (int i = 0; i < count; i += kLanes) {
    prefetch(next, i * 4);
    store(to + i, load<Bits>(static_cast<const uint32_t*>(from) + i));
  }
}

// Keys as (D/2, 16) pairs of dimensions d and d + D/2, or as (D, 16) floats; without their scales.
void expand_keys(const Page& page, const Page& next, int D, uint32_t* to) {
  const int half = D / 2 * kPage;
  const auto put = [=](int i, Floats first, Floats second) EDGE_INLINED {
    if (kDots) {
      store(to + i, exact_pairs(first, second));
    } else {
      store(to + i, first);
      store(to + half + i, second);
    }
  };
  switch (page.format) {
    case kFloat32: copy(page.keys, next.keys, D * kPage, to); break;
    case kBfloat16: {
      const uint16_t* from = static_cast<const uint16_t*>(page.keys);
      for (int i = 0; i < half; i += kPage) {
        prefetch(next.keys, i * 4);
        const U16x16 first = load<U16x16>(from + i), second = load<U16x16>(from + half + i);
        if (kDots)
          store(to + i, pairs(first, second));
        else
          put(i, floats(first), floats(second));
      }
      break;
    }
    case kInt8: {
      const int8_t* from = static_cast<const int8_t*>(page.keys);
      for (int i = 0; i < half; i += kPage) {
        prefetch(next.keys, i * 2);
        put(i, floats(load<I8x16>(from + i)), floats(load<I8x16>(from + half + i)));
      }
      break;
    }
    case kInt4: {
      const uint8_t* from = static_cast<const uint8_t*>(page.keys);
      for (int i = 0; i < half; i += kPage) {
        prefetch(next.keys, i);
        const Bits packed = wide(load<U8x16>(from + i));
        put(i, to_floats((Ints)(packed & 15)) - 7.5f, to_floats((Ints)(packed >> 4)) - 7.5f);
      }
      break;
    }
  }
}

// The first values as (count / 2, D) pairs of tokens, or as (count, D) floats; without scales and minimums. A last
// token of pairs that is alone is its own partner, with weight 0: what is in memory after it may be NaN.
void expand_values(const Page& page, const Page& next, int D, int count, uint32_t* to) {
  if (page.format == kFloat32) {
    copy(page.values, next.values, count * D, to);
    return;
  }
  const int half = D / 2;
  const auto expand = [&](int width, auto row) EDGE_INLINED {
    for (int token = 0; token < count; token += 2, to += kDots ? D : 2 * D)
      row(token * width, token + 1 < count ? width : 0);
  };
  const auto put = [&](int d, Floats first, Floats second) EDGE_INLINED {
    if (kDots) {
      store(to + d, exact_pairs(first, second));
    } else {
      store(to + d, first);
      store(to + D + d, second);
    }
  };
  switch (page.format) {
    case kBfloat16: {
      const uint16_t* from = static_cast<const uint16_t*>(page.values);
      expand(D, [&](int at, int partner) EDGE_INLINED {
        for (int d = 0; d < D; d += 16) {
          prefetch(next.values, (at + 2 * d) * 2);
          const U16x16 first = load<U16x16>(from + at + d), second = load<U16x16>(from + at + partner + d);
          if (kDots)
            store(to + d, pairs(first, second));
          else
            put(d, floats(first), floats(second));
        }
      });
      break;
    }
    case kInt8: {
      const int8_t* from = static_cast<const int8_t*>(page.values);
      expand(D, [&](int at, int partner) EDGE_INLINED {
        for (int d = 0; d < D; d += 16) {
          prefetch(next.values, at + 2 * d);
          put(d, floats(load<I8x16>(from + at + d)), floats(load<I8x16>(from + at + partner + d)));
        }
      });
      break;
    }
    case kInt4: {
      const uint8_t* from = static_cast<const uint8_t*>(page.values);
      expand(half, [&](int at, int partner) EDGE_INLINED {
        for (int d = 0; d < half; d += 16) {
          prefetch(next.values, at + 2 * d);
          const Bits first = wide(load<U8x16>(from + at + d)), second = wide(load<U8x16>(from + at + partner + d));
          put(d, to_floats((Ints)(first & 15)), to_floats((Ints)(second & 15)));
          put(half + d, to_floats((Ints)(first >> 4)), to_floats((Ints)(second >> 4)));
        }
      });
      break;
    }
  }
}

void expand_scales(const Page& page, int count, float* key_scales, float* value_scales, float* value_minimums) {
  const auto expand = [&](const uint16_t* from, float otherwise, float* to) {
    const Floats all = from ? floats(load<U16x16>(from)) : splat(otherwise);
    store(to, select(lanes() < count, all, splat(otherwise)));
  };
  expand(page.key_scales, 1, key_scales);
  expand(page.value_scales, 1, value_scales);
  expand(page.value_minimums, 0, value_minimums);
}

int first_split(const Call& call, const Task& task) {
  if (call.layer.window <= 0) return 0;
  const int position = call.position(task.sequence, task.first_row / call.G());
  return std::max(0, position - call.layer.window + 1) / kSplit;
}
int last_split(const Call& call, const Task& task) {
  return call.position(task.sequence, (task.first_row + task.num_rows - 1) / call.G()) / kSplit;
}

// The page that is read a block after the `index`th: of this task, or of the one that probably comes next.
Page page_ahead(const Call& call, const Task& task, int index, int query_page) {
  const auto first_page = [&](const Task& t) { return (t.split < 0 ? first_split(call, t) : t.split) * kSplitPages; };
  const auto last_page = [&](const Task& t) {
    const int last = call.position(t.sequence, (t.first_row + t.num_rows - 1) / call.G()) / kPage;
    return t.split < 0 ? last : std::min(last, (t.split + 1) * kSplitPages - 1);
  };
  const int ahead = index + kBlockPages, last = last_page(task);
  if (ahead <= last || !task.next) return page_of(call, task, std::min(ahead, last), query_page);
  const int last_of_next = last_page(*task.next), in_next = first_page(*task.next) + ahead - last - 1;
  return page_of(call, *task.next, std::min(in_next, last_of_next), last_of_next);
}

// Keys first_key to first_key + count.
void expand_block(const Call& call, const Task& task, int first_key, int count, Scratch& s) {
  const int D = call.layer.head_dim, last_key = s.position[task.num_rows - 1], query_page = last_key / kPage;
  for (int done = 0; done < count; done += kPage) {
    const int index = (first_key + done) / kPage, num_keys = std::min(kPage, count - done);
    const Page page = page_of(call, task, index, query_page);
    const Page next = page_ahead(call, task, index, query_page);
    const bool in_pairs = kDots && page.format != kFloat32;
    expand_keys(page, next, D, s.keys + done * (in_pairs ? D / 2 : D));
    expand_values(page, next, D, num_keys, s.values + (in_pairs ? done / 2 : done) * D);
    if (call.layer.key_scales) {
      expand_scales(page, num_keys, s.key_scales + done, s.value_scales + done, s.value_minimums + done);
      __builtin_prefetch(next.key_scales);
      __builtin_prefetch(next.value_scales);
      __builtin_prefetch(next.value_minimums);
    }
  }
  // Weights of 0 are multiplied with these too, and what another sequence left here need not be finite.
  for (int rest = (count + kPage - 1) / kPage * kPage; call.layer.key_scales && rest < kBlock; rest += kPage)
    for (float* unused : {s.key_scales, s.value_scales, s.value_minimums}) store(unused + rest, Floats{});
}

// ---- the small matrix product ----

// What differs between the formats.
struct Singles {
  static constexpr bool kPairs = false, kScaled = false;
};
struct Bfloat16s {
  static constexpr bool kPairs = kDots, kScaled = false;
};
struct Codes {
  static constexpr bool kPairs = kDots, kScaled = true;
};

// total + a * b, or the two products of pairs.
template <bool kPairs>
EDGE_INLINE Floats add_product(Floats total, Bits a, Bits b) {
#if defined(__AVX512BF16__)
  if (kPairs) return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#endif
  static_assert(kDots || !kPairs);
  return multiply_add((Floats)a, (Floats)b, total);
}

// Otherwise the compiler loads a vector again for every row, and loads are what this is short of.
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define KEEP_IN_REGISTER(v)
#endif

// Where a product finds its right side, by step t and then vector j: where `expand_block` has put it ...
template <bool kPairsOf>
struct Expanded {
  static constexpr bool kPairs = kPairsOf;
  const uint32_t* at;
  int vector, step;
  auto operator()(int t) const {
    return [=, from = at + size_t(t) * step](int j) EDGE_INLINED { return load<Bits>(from + j * vector); };
  }
};
// ... or straight in bfloat16 pages, which is faster for a few rows.
struct Pages {
  static constexpr bool kPairs = kDots;
  const uint16_t* pages[kBlockPages];
  const void* ahead[kBlockPages];
};
struct KeyPages : Pages {  // vector j is page first + j
  int half, first = 0;
  KeyPages from(int page) const {
    KeyPages others = *this;
    others.first = page;
    return others;
  }
  auto operator()(int t) const {
    return [this, t](int j) EDGE_INLINED {
      prefetch(ahead[first + j], t * (kDots ? 64 : 32));
      const uint16_t* from = pages[first + j] + t * kPage;
      if constexpr (kDots)
        return pairs(load<U16x16>(from), load<U16x16>(from + half * kPage));
      else
        return (Bits)floats(load<U16x16>(from));
    };
  }
};
struct ValuePages : Pages {  // vector j is dimensions d + 16 j
  int D, d, count;
  auto operator()(int t) const {
    constexpr int kPer = kDots ? 2 : 1;
    const int page = t / (kPage / kPer), token = t % (kPage / kPer) * kPer;
    const uint16_t* first = pages[page] + token * D + d;
    const uint16_t* second = first + (2 * t + 1 < count ? D : 0);
    return [=, next = static_cast<const uint16_t*>(ahead[page]) + token * D + kPer * d](int j) EDGE_INLINED {
      prefetch(next, j * 32 * kPer);
      if constexpr (kDots)
        return pairs(load<U16x16>(first + j * 16), load<U16x16>(second + j * 16));
      else
        return (Bits)floats(load<U16x16>(first + j * 16));
    };
  }
};

// c (R, N vectors) = c times factors (R,) + a (R, steps) times b (steps, N vectors); without factors, c begins as 0.
template <class Right, int R, int N>
void product(const uint32_t* a, int a_stride, const Right& b, int steps, float* c, int c_stride, const float* factors) {
  Floats acc[R * N];
  unrolled<R * N>([&](auto i) EDGE_INLINED {
    acc[i] = factors ? load<Floats>(c + i / N * c_stride + i % N * 16) * factors[i / N] : Floats{};
  });
  for (int t = 0; t < steps; t++) {
    Bits v[N];
    const auto vector = b(t);
    unrolled<N>([&](auto j) EDGE_INLINED {
      v[j] = vector(j);
      KEEP_IN_REGISTER(v[j]);
    });
    unrolled<R>([&](auto r) EDGE_INLINED {
      const Bits row = splat(a[r * a_stride + t]);
      unrolled<N>([&](auto j) EDGE_INLINED { acc[r * N + j] = add_product<Right::kPairs>(acc[r * N + j], row, v[j]); });
    });
  }
  unrolled<R * N>([&](auto i) EDGE_INLINED { store(c + i / N * c_stride + i % N * 16, acc[i]); });
}

template <class Right>
using Product = void (*)(const uint32_t*, int, const Right&, int, float*, int, const float*);
// By R; as many vectors at once as there are registers for.
#if defined(__AVX512F__)
constexpr int vectors_at_once(int R) { return R > 6 ? 2 : 4; }
#else
constexpr int vectors_at_once(int R) { return R > 3 ? 1 : 2; }
#endif
template <class Right, int R>
constexpr Product<Right> kProductsOf[4] = {product<Right, R, 1>, product<Right, R, std::min(2, vectors_at_once(R))>,
                                           product<Right, R, std::min(3, vectors_at_once(R))>,
                                           product<Right, R, vectors_at_once(R)>};
template <class Right, int... R>
Product<Right> product_of(std::integer_sequence<int, R...>, int rows, int num_vectors) {
  static constexpr const Product<Right>* kProducts[] = {kProductsOf<Right, R + 1>...};
  return kProducts[rows - 1][num_vectors - 1];
}
template <class Right, int kRows>
void multiply(int rows, int num_vectors, const uint32_t* a, int a_stride, const Right& b, int steps, float* c,
              int c_stride, const float* factors) {
  const auto function = product_of<Right>(std::make_integer_sequence<int, kRows>{}, rows, num_vectors);
  function(a, a_stride, b, steps, c, c_stride, factors);
}

// ---- attending ----

void load_queries(const Call& call, const Task& task, Scratch& s) {
  const EdgeAttentionLayer& layer = call.layer;
  const int H = layer.num_heads, K = layer.num_kv_heads, D = layer.head_dim, G = call.G();
  const float factor = layer.softcap > 0 ? layer.scale / layer.softcap : layer.scale * kLog2E;
  alignas(64) float q[kMaxD];
  alignas(32) uint16_t narrow[kMaxD];
  const auto row_of = [&](int r) { return call.step.starts[task.sequence] + (task.first_row + r) / G; };
  const auto query = [&](int r) {
    const int head = task.kv_head * G + (task.first_row + r) % G;
    return call.qkv + (size_t(row_of(r)) * (H + 2 * K) + head) * D;
  };
  for (int r = 0; r < task.num_rows; r++)
    for (int d = 0; d < D; d += 16) __builtin_prefetch(query(r) + d);
  for (int r = 0; r < task.num_rows; r++) {
    prepare(call, row_of(r), query(r), q, layer.q_norm, layer.q_eps);
    s.position[r] = call.position(task.sequence, (task.first_row + r) / G);
    uint32_t* to = s.q + r * kStride;
    if (!kDots || layer.format == kFloat32) {
      for (int d = 0; d < D; d += 16) store(to + d, load<Floats>(q + d) * factor);
      continue;
    }
    for (int d = 0; d < D; d += 16) store(narrow + d, bfloat16s(load<Floats>(q + d) * factor));
    int i = 0;
    for (; i + 16 <= D / 2; i += 16) store(to + i, pairs(load<U16x16>(narrow + i), load<U16x16>(narrow + D / 2 + i)));
    for (; i < D / 2; i++) to[i] = narrow[i] | uint32_t(narrow[i + D / 2]) << 16;
  }
}

// What row r does not see becomes -infinity in its scores over a block. The new maximum, and the factor that it brings
// for what was before.
template <class Form>
EDGE_INLINE void look(const EdgeAttentionLayer& layer, Scratch& s, int r, float* scores, int first_key) {
  const int last = s.position[r] - first_key;  // of the keys that the row sees, in this block
  const int first = layer.window > 0 ? last - layer.window + 1 : 0;
  const bool capped = layer.softcap > 0, masked = last < kBlock - 1 || first > 0;
  Floats x[kBlockPages], top = splat(-INFINITY);
  unrolled<kBlockPages>([&](auto j) EDGE_INLINED {
    x[j] = load<Floats>(scores + j * 16);
    if (Form::kScaled) x[j] *= load<Floats>(s.key_scales + j * 16);
  });
  if (capped) unrolled<kBlockPages>([&](auto j) EDGE_INLINED { x[j] = tanh_(x[j]) * (layer.softcap * kLog2E); });
  if (masked)
    unrolled<kBlockPages>([&](auto j) EDGE_INLINED {
      const Ints key = lanes() + j * 16;
      x[j] = select(key <= last, x[j], splat(-INFINITY));
      x[j] = select(key >= first, x[j], splat(-INFINITY));
    });
  if (Form::kScaled || capped || masked)
    unrolled<kBlockPages>([&](auto j) EDGE_INLINED { store(scores + j * 16, x[j]); });
  unrolled<kBlockPages>([&](auto j) EDGE_INLINED { top = larger(x[j], top); });
  const float before = s.max[r], now = std::max(before, std::ceil(maximum(top)));
  s.max[r] = now;
  s.factors[r] = power_of_two(before - (now == -INFINITY ? 0.0f : now));
}

// Scores to weights, and their sums.
template <class Form>
EDGE_INLINE void weigh(Scratch& s, int r, const float* scores, uint32_t* weights) {
  const float max = s.max[r] == -INFINITY ? 0.0f : s.max[r];
  Floats x[kBlockPages];
  unrolled<kBlockPages>([&](auto j) EDGE_INLINED { x[j] = exp2_(load<Floats>(scores + j * 16) - max); });
  const Floats sum = s.sums[r] * s.factors[r];
  if (Form::kScaled || !Form::kPairs) s.sums[r] = sum + ((x[0] + x[1]) + (x[2] + x[3]));
  if (Form::kScaled) {
    s.minimums[r] *= s.factors[r];
    unrolled<kBlockPages>([&](auto j) EDGE_INLINED {
      s.minimums[r] = multiply_add(x[j], load<Floats>(s.value_minimums + j * 16), s.minimums[r]);
      x[j] *= load<Floats>(s.value_scales + j * 16);
    });
  }
  if (!Form::kPairs) {
    unrolled<kBlockPages>([&](auto j) EDGE_INLINED { store(weights + j * 16, x[j]); });
    return;
  }
  const Bits low = rounded_neighbours(x[0], x[1]), high = rounded_neighbours(x[2], x[3]);
  store(weights, low);
  store(weights + 16, high);
  // Of the rounded weights, so that those that values are multiplied with sum to 1.
  if (!Form::kScaled) s.sums[r] = sum + ((first_of(low) + second_of(low)) + (first_of(high) + second_of(high)));
}

// Scores of some rows over a block to weights. First all maxima: each is a long chain of operations that wait for one
// another, and those of several rows go side by side. Never inlined, so that rounding is the same everywhere.
template <class Form>
__attribute__((noinline)) void soften(const EdgeAttentionLayer& layer, Scratch& s, int first, int rows, int first_key) {
  for (int r = 0; r < rows; r++) look<Form>(layer, s, first + r, s.scores + r * kScoreStride, first_key);
  for (int r = 0; r < rows; r++)
    weigh<Form>(s, first + r, s.scores + r * kScoreStride, s.weights + r * kScoreStride);
}

// `begins`: the block is the first of its split.
template <class Form>
void attend_block(const Call& call, const Task& task, Scratch& s, int first_key, int count, bool begins) {
  using Right = Expanded<Form::kPairs>;
  constexpr int kPer = Form::kPairs ? 2 : 1;
  const int D = call.layer.head_dim, num_pages = (count + kPage - 1) / kPage;
  expand_block(call, task, first_key, count, s);
  for (int first = 0; first < task.num_rows; first += kGroup) {
    const int rows = std::min(kGroup, task.num_rows - first), at_once = vectors_at_once(rows);
    for (int j = 0; j < num_pages; j += at_once) {
      const Right keys{s.keys + j * (D / kPer) * kPage, D / kPer * kPage, kPage};
      multiply<Right, kGroup>(rows, std::min(at_once, num_pages - j), s.q + first * kStride, kStride, keys, D / kPer,
                              s.scores + j * kPage, kScoreStride, nullptr);
    }
    soften<Form>(call.layer, s, first, rows, first_key);
    for (int d = 0; d < D; d += 16 * at_once) {
      const Right values{s.values + d, 16, D};
      multiply<Right, kGroup>(rows, std::min(at_once, (D - d) / 16), s.weights, kScoreStride, values,
                              (count + kPer - 1) / kPer, s.acc + first * kStride + d, kStride,
                              begins ? nullptr : s.factors + first);
    }
  }
}

// The same for a few rows and bfloat16 pages.
void attend_pages(const Call& call, const Task& task, Scratch& s, int first_key, int count, bool begins) {
  const int D = call.layer.head_dim, num_pages = (count + kPage - 1) / kPage;
  const int query_page = s.position[task.num_rows - 1] / kPage;
  KeyPages keys;
  ValuePages values;
  for (int j = 0; j < num_pages; j++) {
    const int index = first_key / kPage + j;
    const Page page = page_of(call, task, index, query_page), next = page_ahead(call, task, index, query_page);
    keys.pages[j] = static_cast<const uint16_t*>(page.keys);
    keys.ahead[j] = next.keys;
    values.pages[j] = static_cast<const uint16_t*>(page.values);
    values.ahead[j] = next.values;
  }
  keys.half = D / 2;
  values.D = D;
  values.count = count;
  constexpr int kPer = kDots ? 2 : 1;
  const int rows = task.num_rows, at_once = vectors_at_once(rows);
  for (int j = 0; j < num_pages; j += at_once) {
    multiply<KeyPages, kFewRows>(rows, std::min(at_once, num_pages - j), s.q, kStride, keys.from(j), D / kPer,
                                 s.scores + j * kPage, kScoreStride, nullptr);
  }
  soften<Bfloat16s>(call.layer, s, 0, rows, first_key);
  for (values.d = 0; values.d < D; values.d += 16 * at_once)
    multiply<ValuePages, kFewRows>(rows, std::min(at_once, (D - values.d) / 16), s.weights, kScoreStride, values,
                                   (count + kPer - 1) / kPer, s.acc + values.d, kStride, begins ? nullptr : s.factors);
}

void attend_block(const Call& call, const Task& task, Scratch& s, int first_key, int count, bool begins) {
  switch (call.layer.format) {
    case kFloat32: attend_block<Singles>(call, task, s, first_key, count, begins); break;
    case kBfloat16:
      if (task.num_rows <= kFewRows)
        attend_pages(call, task, s, first_key, count, begins);
      else
        attend_block<Bfloat16s>(call, task, s, first_key, count, begins);
      break;
    default: attend_block<Codes>(call, task, s, first_key, count, begins); break;
  }
}

// Maximum, sum and results of the task's rows over the keys of one split.
void attend_split(const Call& call, const Task& task, Scratch& s, int split) {
  const int D = call.layer.head_dim;
  for (int r = 0; r < task.num_rows; r++) {
    s.max[r] = -INFINITY;
    s.sums[r] = s.minimums[r] = Floats{};
  }
  int first_key = split * kSplit;
  if (call.layer.window > 0) {  // blocks that not even the first row sees
    const int seen = s.position[0] - call.layer.window + 1;
    if (seen > first_key) first_key = seen / kBlock * kBlock;
  }
  const int end = std::min((split + 1) * kSplit, s.position[task.num_rows - 1] + 1);
  for (bool begins = true; first_key < end; first_key += kBlock, begins = false)
    attend_block(call, task, s, first_key, std::min(kBlock, end - first_key), begins);
  for (int r = 0; r < task.num_rows; r++) {
    s.sum[r] = total(s.sums[r]);
    if (call.layer.format != kInt4) continue;
    const float minimum = total(s.minimums[r]);
    float* acc = s.acc + r * kStride;
    for (int d = 0; d < D; d += 16) store(acc + d, load<Floats>(acc + d) + minimum);
  }
}

// Add the results of a further split to those of the splits before it.
void merge(int D, float& total_max, float& total_sum, float* total, float max, float sum, const float* acc) {
  const float now = std::max(total_max, max), finite = now == -INFINITY ? 0.0f : now;
  const float old_factor = power_of_two(total_max - finite), factor = power_of_two(max - finite);
  total_max = now;
  total_sum = total_sum * old_factor + sum * factor;
  for (int d = 0; d < D; d += 16)
    store(total + d, load<Floats>(total + d) * old_factor + load<Floats>(acc + d) * factor);
}

void finish(const Call& call, const Task& task, int r, float sum, const float* total) {
  const EdgeAttentionLayer& layer = call.layer;
  const int D = layer.head_dim, G = call.G();
  const int token = (task.first_row + r) / G, head = task.kv_head * G + (task.first_row + r) % G;
  const float factor = 1.0f / sum;
  const size_t row = call.step.starts[task.sequence] + token;
  float* out = call.out + (row * layer.num_heads + head) * D;
  for (int d = 0; d < D; d += 16) store(out + d, load<Floats>(total + d) * factor);
  if (layer.rotate_values) hadamard(out, D);
}

void attend(const Call& call, const Task& task, Scratch& s) {
  const int D = call.layer.head_dim;
  load_queries(call, task, s);
  const int first = first_split(call, task), last = last_split(call, task);
  for (int split = first; split <= last; split++) {
    attend_split(call, task, s, split);
    for (int r = 0; r < task.num_rows; r++) {
      float* total = s.total + r * kStride;
      if (split == first) {
        s.total_max[r] = -INFINITY;
        s.total_sum[r] = 0;
        std::memset(total, 0, D * sizeof(float));
      }
      merge(D, s.total_max[r], s.total_sum[r], total, s.max[r], s.sum[r], s.acc + r * kStride);
    }
  }
  for (int r = 0; r < task.num_rows; r++) finish(call, task, r, s.total_sum[r], s.total + r * kStride);
}

// Results of the splits of one task that were computed apart; a row in it is maximum, sum, D results.
struct Partials {
  int D;
  std::vector<float> memory;
  float* row(int partial, int r) { return memory.data() + (size_t(partial) * kMaxRows + r) * (D + 16); }
};

void attend_apart(const Call& call, const Task& task, Scratch& s, Partials& partials) {
  load_queries(call, task, s);
  attend_split(call, task, s, task.split);
  for (int r = 0; r < task.num_rows; r++) {
    float* to = partials.row(task.partial, r);
    to[0] = s.max[r];
    to[1] = s.sum[r];
    std::memcpy(to + 16, s.acc + r * kStride, call.layer.head_dim * sizeof(float));
  }
}

void merge_apart(const Call& call, const Task& task, Scratch& s, Partials& partials) {
  const int num_splits = last_split(call, task) - first_split(call, task) + 1;
  for (int r = 0; r < task.num_rows; r++) {
    float max = -INFINITY, sum = 0;
    std::memset(s.total, 0, call.layer.head_dim * sizeof(float));
    for (int i = 0; i < num_splits; i++) {
      const float* part = partials.row(task.partial + i, r);
      merge(call.layer.head_dim, max, sum, s.total, part[0], part[1], part + 16);
    }
    finish(call, task, r, sum, s.total);
  }
}

// ---- tasks ----

struct StoreTask {
  int sequence, kv_head, first, end;
};

struct Plan {
  std::vector<StoreTask> stores;  // all done before any of `tasks`
  std::vector<Task> tasks;        // a task that is alone with its sequence and head stores for itself
  std::vector<Task> merges;       // done after all of `tasks`
  int num_partials = 0;
};

// The tasks of one sequence and head: rows in tiles.
void plan_tiles(const Call& call, int b, int kv_head, std::vector<Task>& tiles) {
  const int G = call.G(), num_rows = call.num_new(b) * G;
  for (int row = 0; row < num_rows;) {
    int count = std::min(kMaxRows, num_rows - row);
    if (call.layer.format == kInt4) {  // queries of another page see other pages in full precision
      const int token = row / G, left = kPage - call.position(b, token) % kPage;
      count = std::min(count, (token + left) * G - row);
    }
    const long num_keys = call.position(b, (row + count - 1) / G) + 1;
    tiles.push_back({b, kv_head, row, count, -1, 0, num_keys * (count + 8), nullptr});
    row += count;
  }
}

Plan make_plan(const Call& call, int num_threads) {
  Plan plan;
  std::vector<Task> tiles;
  const int B = call.step.num_sequences, K = call.layer.num_kv_heads;
  for (int b = 0; b < B; b++)
    for (int kv_head = 0; kv_head < K; kv_head++) plan_tiles(call, b, kv_head, tiles);
  const bool apart = num_threads > 1 && int(tiles.size()) < 4 * num_threads;
  for (Task& tile : tiles) {
    const int first = first_split(call, tile), num_splits = last_split(call, tile) - first + 1;
    const bool split = apart && num_splits > 1;
    const bool alone = !split && tile.num_rows == call.num_new(tile.sequence) * call.G();
    if (!alone && tile.first_row == 0) {
      const int num_new = call.num_new(tile.sequence);
      for (int at = 0; at < num_new; at += kStoreTokens)
        plan.stores.push_back({tile.sequence, tile.kv_head, at, std::min(at + kStoreTokens, num_new)});
    }
    if (!split) {
      plan.tasks.push_back(tile);
      continue;
    }
    tile.partial = plan.num_partials;
    plan.num_partials += num_splits;
    plan.merges.push_back(tile);
    for (int i = 0; i < num_splits; i++) {
      plan.tasks.push_back(tile);
      plan.tasks.back().split = first + i;
      plan.tasks.back().partial = tile.partial + i;
      plan.tasks.back().cost = tile.num_rows * kSplit;
    }
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  for (size_t i = 0; i + num_threads < plan.tasks.size(); i++) plan.tasks[i].next = &plan.tasks[i + num_threads];
  return plan;
}

void run(const Call& call, const Task& task, Scratch& s, Partials& partials) {
  if (task.split >= 0) {
    attend_apart(call, task, s, partials);
    return;
  }
  const int num_new = call.num_new(task.sequence);
  if (task.num_rows == num_new * call.G()) store_tokens(call, task.sequence, task.kv_head, 0, num_new);
  attend(call, task, s);
}

Scratch& scratch() {
  static thread_local Scratch s;
  Scratch* at = &s;
  __asm__("" : "+r"(at));  // otherwise the compiler asks for the address again wherever it is short of registers
  return *at;
}

}  // namespace

extern "C" void edge_attention(const EdgeAttentionLayer* layer, const EdgeAttentionStep* step, const float* qkv,
               const float* cos, const float* sin, int32_t half_rotary, float* out,
               int32_t num_threads) {
  const Call call{*layer, *step, qkv, cos, sin, half_rotary, out};
  const Plan plan = make_plan(call, num_threads);
  Partials partials{layer->head_dim, {}};
  partials.memory.resize(size_t(plan.num_partials) * kMaxRows * (layer->head_dim + 16));
  parallel(num_threads, int64_t(plan.stores.size()), [&](int64_t i) {
    const StoreTask& task = plan.stores[i];
    store_tokens(call, task.sequence, task.kv_head, task.first, task.end);
  });
  parallel(num_threads, int64_t(plan.tasks.size()), [&](int64_t i) { run(call, plan.tasks[i], scratch(), partials); });
  parallel(num_threads, int64_t(plan.merges.size()),
           [&](int64_t i) { merge_apart(call, plan.merges[i], scratch(), partials); });
}
