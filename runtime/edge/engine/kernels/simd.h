// Vectors of 16 floats or 64 bytes, with the few operations that the kernels need beyond arithmetic.
//
// The types are the compiler's own vectors, so that +, *, <, ?: and shifts work on every machine; under #if is what
// some machines have better instructions for. The results are the same up to the rounding of multiply-adds.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace edge {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));

constexpr int kLanes = 16;

#define EDGE_INLINE static inline __attribute__((always_inline))

template <class Vector, class Element>
EDGE_INLINE Vector load(const Element* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector, class Element>
EDGE_INLINE void store(Element* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

EDGE_INLINE Floats splat(float x) { return x - Floats{}; }
EDGE_INLINE Ints splat(int32_t x) { return x - Ints{}; }

EDGE_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// a * b + c
EDGE_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// 16 IEEE half floats, which must be finite.
EDGE_INLINE Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  Bits bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = from[i];
  const Bits magnitude = (bits & 0x7fff) << 13;
  const Floats value = (Floats)magnitude * 0x1p112f;  // moves the exponent's bias, and makes subnormals normal
  return (Floats)((Bits)value | (bits & 0x8000) << 16);
#endif
}

// Rounds to the nearest integer, ties to even; |v| < 2^22.
EDGE_INLINE Ints round_to_ints(Floats v) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#else
  constexpr float kMagic = 0x1.8p23f;  // its last mantissa bit counts ones
  return (Ints)((Bits)(v + kMagic) - 0x4b400000u);
#endif
}

// The lowest byte of each.
EDGE_INLINE void store_bytes(int8_t* to, Ints v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = int8_t(v[i]);
#endif
}

EDGE_INLINE int32_t sum(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// Pairwise, in a fixed order that does not depend on the machine.
EDGE_INLINE float sum(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

EDGE_INLINE int32_t largest(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// For each of 32 pairs: a[2i] * b[2i] + a[2i+1] * b[2i+1].
EDGE_INLINE Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  Ints out;
  for (int i = 0; i < 2; ++i) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)&a + i), y = _mm256_loadu_si256((const __m256i*)&b + i);
    _mm256_storeu_si256((__m256i*)&out + i, _mm256_madd_epi16(x, y));
  }
  return out;
#else
  Ints out;
  for (int i = 0; i < kLanes; ++i) out[i] = int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
  return out;
#endif
}

// For each of 16 outputs: total + the product of its four codes with the same four values.
EDGE_INLINE Ints dot(Ints total, Bytes codes, const int8_t* four) {
  int32_t packed;
  std::memcpy(&packed, four, sizeof packed);
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(packed));
#else
  const Shorts values = (Shorts)splat(packed);
  const Shorts odd = values >> 8, even = (Shorts)((Words)values << 8) >> 8;
  const Words pairs = (Words)codes;
  return total + multiply_pairs((Shorts)(pairs & 255), even) + multiply_pairs((Shorts)(pairs >> 8), odd);
#endif
}

// e^v for |v| < 87, within 2e-7 of it; NaN stays.
EDGE_INLINE Floats exp(Floats v) {
  const Ints power = round_to_ints(v * 1.44269504f);
  const Floats whole = to_floats(power);
  // ln 2 in two parts, the first with so few digits that its product is exact.
  Floats r = multiply_add(whole, splat(-0.693359375f), v);
  r = multiply_add(whole, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);  // the polynomial of Cephes' expf
  p = multiply_add(p, r, splat(1.3981999507e-3f));
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + 1.0f);
  return p * (Floats)((Bits)(power + 127) << 23);
}

}  // namespace edge
