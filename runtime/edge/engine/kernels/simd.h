// Vectors of 16 floats or 64 bytes, with the few operations that the kernels need beyond arithmetic.
//
// With AVX-512 such a vector is the compiler's own, one register. Elsewhere it is a `Wide` of several smaller ones with
// the same operators: a compiler keeps vectors that are larger than its registers in memory, which costs ten times as
// much. Under #if is what some machines have better instructions for; results are the same up to the rounding of
// multiply-adds. Comparisons give masks, and `select` takes them.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace edge {

constexpr int kLanes = 16;

#define EDGE_INLINE static inline __attribute__((always_inline))

// body(0), body(1) ...: constants, so that the compiler keeps arrays that they index in registers.
template <int... I, class Body>
EDGE_INLINE void unrolled(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
EDGE_INLINE void unrolled(const Body& body) {
  unrolled(std::make_integer_sequence<int, N>{}, body);
}
#define EDGE_INLINED __attribute__((always_inline))

#if defined(__AVX512F__)

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));

template <class Mask, class Vector>
EDGE_INLINE Vector select(Mask mask, Vector yes, Vector no) {
  return mask ? yes : no;
}

#else

#define EDGE_PARTS(first, second, ...) \
  {                                    \
    constexpr int i = first;           \
    __VA_ARGS__;                       \
  }                                    \
  {                                    \
    constexpr int i = second;          \
    __VA_ARGS__;                       \
  }
#if defined(__AVX2__)
constexpr int kPartBytes = 32;
// The statement with every part's number for i, written out: what is in a loop over parts would be kept in memory.
#define EDGE_EACH_PART(...) EDGE_PARTS(0, 1, __VA_ARGS__)
#define EDGE_SHUFFLE(v, a, b, c, d, e, f, g, h) __builtin_shufflevector(v, v, a, b, c, d, e, f, g, h)
#else
constexpr int kPartBytes = 16;
#define EDGE_EACH_PART(...)     \
  EDGE_PARTS(0, 1, __VA_ARGS__) \
  EDGE_PARTS(2, 3, __VA_ARGS__)
#define EDGE_SHUFFLE(v, a, b, c, d, e, f, g, h) __builtin_shufflevector(v, v, (a) & 3, (b) & 3, (c) & 3, (d) & 3)
#endif

template <class E>
struct Wide {
  static constexpr int kParts = 64 / kPartBytes;
  typedef E Part __attribute__((vector_size(kPartBytes)));

  Part part[kParts];

  // The same bits.
  template <class F>
  __attribute__((always_inline)) explicit operator Wide<F>() const {
    Wide<F> to;
    EDGE_EACH_PART(to.part[i] = (typename Wide<F>::Part)part[i])
    return to;
  }
  __attribute__((always_inline)) E operator[](int i) const {
    constexpr int kPer = kPartBytes / int(sizeof(E));
    return part[i / kPer][i % kPer];
  }
};

typedef Wide<float> Floats;
typedef Wide<int32_t> Ints;
typedef Wide<uint32_t> Bits;
typedef Wide<uint8_t> Bytes;
typedef Wide<int16_t> Shorts;
typedef Wide<uint16_t> Words;

template <class E>
struct ScalarOf {
  typedef E Type;
};
template <class E>
using Scalar = typename ScalarOf<E>::Type;  // not deduced, so that any number will do

#define EDGE_OPERATOR(op) \
  template <class E> \
  EDGE_INLINE Wide<E> operator op(Wide<E> a, Wide<E> b) { \
    EDGE_EACH_PART(a.part[i] = a.part[i] op b.part[i]) \
    return a; \
  } \
  template <class E> \
  EDGE_INLINE Wide<E> operator op(Wide<E> a, Scalar<E> b) { \
    EDGE_EACH_PART(a.part[i] = a.part[i] op b) \
    return a; \
  } \
  template <class E> \
  EDGE_INLINE Wide<E> operator op(Scalar<E> a, Wide<E> b) { \
    EDGE_EACH_PART(b.part[i] = a op b.part[i]) \
    return b; \
  } \
  template <class E, class B> \
  EDGE_INLINE Wide<E>& operator op##=(Wide<E>& a, B b) { \
    return a = a op b; \
  }
EDGE_OPERATOR(+)
EDGE_OPERATOR(-)
EDGE_OPERATOR(*)
EDGE_OPERATOR(/)
EDGE_OPERATOR(&)
EDGE_OPERATOR(|)
EDGE_OPERATOR(<<)
EDGE_OPERATOR(>>)
#undef EDGE_OPERATOR

template <class E>
EDGE_INLINE Wide<E> operator-(Wide<E> a) {
  EDGE_EACH_PART(a.part[i] = -a.part[i])
  return a;
}

#define EDGE_COMPARISON(op) \
  template <class E> \
  EDGE_INLINE Ints operator op(Wide<E> a, Wide<E> b) { \
    static_assert(sizeof(E) == sizeof(int32_t), "masks are of 32 bits"); \
    Ints mask; \
    EDGE_EACH_PART(mask.part[i] = a.part[i] op b.part[i]) \
    return mask; \
  } \
  template <class E> \
  EDGE_INLINE Ints operator op(Wide<E> a, Scalar<E> b) { \
    return a op (b - Wide<E>{}); \
  }
EDGE_COMPARISON(<)
EDGE_COMPARISON(>)
EDGE_COMPARISON(<=)
EDGE_COMPARISON(>=)
EDGE_COMPARISON(==)
EDGE_COMPARISON(!=)
#undef EDGE_COMPARISON

template <class E>
EDGE_INLINE Wide<E> select(Ints mask, Wide<E> yes, Wide<E> no) {
  EDGE_EACH_PART(yes.part[i] = mask.part[i] ? yes.part[i] : no.part[i])
  return yes;
}

#endif

template <class Vector, class Element>
EDGE_INLINE Vector load(const Element* from) {
  Vector v;
#if defined(__AVX512F__)
  std::memcpy(&v, from, sizeof v);
#else
  if constexpr (sizeof v < 64) {
    std::memcpy(&v, from, sizeof v);
  } else {
    EDGE_EACH_PART(std::memcpy(&v.part[i], (const char*)from + i * kPartBytes, kPartBytes))
  }
#endif
  return v;
}

template <class Vector, class Element>
EDGE_INLINE void store(Element* to, Vector v) {
#if defined(__AVX512F__)
  std::memcpy(to, &v, sizeof v);
#else
  if constexpr (sizeof v < 64) {
    std::memcpy(to, &v, sizeof v);
  } else {
    EDGE_EACH_PART(std::memcpy((char*)to + i * kPartBytes, &v.part[i], kPartBytes))
  }
#endif
}

EDGE_INLINE Floats splat(float x) { return x - Floats{}; }
EDGE_INLINE Ints splat(int32_t x) { return x - Ints{}; }
EDGE_INLINE Bits splat(uint32_t x) { return x - Bits{}; }

// Lane i of the result is lane i ^ N.
template <int N>
EDGE_INLINE Floats swapped(Floats v) {
  static_assert(N == 1 || N == 2 || N == 4 || N == 8, "half of a whole");
#if defined(__AVX512F__)
  if (N == 1) return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  if (N == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  if (N == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  constexpr int kPer = kLanes / Floats::kParts;
  Floats to;
  if constexpr (N >= kPer) {
    EDGE_EACH_PART(to.part[i] = v.part[i ^ N / kPer])
  } else if constexpr (N == 1) {
    EDGE_EACH_PART(to.part[i] = EDGE_SHUFFLE(v.part[i], 1, 0, 3, 2, 5, 4, 7, 6))
  } else if constexpr (N == 2) {
    EDGE_EACH_PART(to.part[i] = EDGE_SHUFFLE(v.part[i], 2, 3, 0, 1, 6, 7, 4, 5))
  } else {
    EDGE_EACH_PART(to.part[i] = EDGE_SHUFFLE(v.part[i], 4, 5, 6, 7, 0, 1, 2, 3))
  }
  return to;
#endif
}

EDGE_INLINE Floats to_floats(Ints v) {
#if defined(__AVX512F__)
  return __builtin_convertvector(v, Floats);
#else
  Floats to;
  EDGE_EACH_PART(to.part[i] = __builtin_convertvector(v.part[i], Floats::Part))
  return to;
#endif
}

// a * b + c
EDGE_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  EDGE_EACH_PART(c.part[i] = _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]))
  return c;
#else
  return a * b + c;
#endif
}

// 16 IEEE half floats, which must be finite.
EDGE_INLINE Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + 1))};
#else
  uint32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = from[i];
  const Bits bits = load<Bits>(lanes);
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
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(v.part[0] & 255), high = (__m256i)(v.part[1] & 255);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  const __m128i first = _mm256_castsi256_si128(words), second = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(first, second));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = int8_t(v[i]);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// What `join` makes of all lanes, in any order.
template <class Join>
EDGE_INLINE int32_t joined(Ints v, const Join& join) {
  const __m256i both = (__m256i)v.part[0], other = (__m256i)v.part[1];
  __m128i four = join(join(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)),
                      join(_mm256_castsi256_si128(other), _mm256_extracti128_si256(other, 1)));
  four = join(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(join(four, _mm_shuffle_epi32(four, 0xb1)));
}
#endif

EDGE_INLINE int32_t sum(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  return joined(v, [](__m128i a, __m128i b) EDGE_INLINED { return _mm_add_epi32(a, b); });
#else
  int32_t lanes[kLanes], total = 0;
  store(lanes, v);
  for (int32_t lane : lanes) total += lane;
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
#elif defined(__AVX2__)
  return joined(v, [](__m128i a, __m128i b) EDGE_INLINED { return _mm_max_epi32(a, b); });
#else
  int32_t lanes[kLanes];
  store(lanes, v);
  int32_t most = lanes[0];
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  return most;
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
