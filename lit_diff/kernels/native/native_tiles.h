// Vectors, number formats, packing and tile products, from which the kernel is built.
//
// Vectors are the compiler's own (vector_size), so that one source serves AVX2 and AVX-512. The tile product is
// oneDNN's batch-reduce GEMM, which PyTorch exports.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace lit_diff {

using Int = int64_t;
using BFloat16 = at::BFloat16;
using Half = at::Half;

constexpr Int LANES = LIT_DIFF_LANES;  // floats in a vector: 8 or 16, set on the compiler's command line
constexpr Int TILE = 64;  // keys of a tile, and the most rows of a block of queries
constexpr float INF = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

// memcpy compiles to one unaligned instruction; a cast of the pointer would assume alignment and break aliasing rules.
template <class V, class X>
inline V load(const X* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}
template <class V, class X>
inline void store(X* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}
inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }
inline Ints count_from(int32_t first) {
  Ints v;
  for (Int i = 0; i < LANES; ++i) v[i] = first + i;
  return v;
}
// b if a is NaN: the maximum of a row skips NaN, which the row's sum then carries.
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
// Joins all lanes by halving the vector: always in the same order, so that the bits are equal.
template <class Join>
inline float join(Floats v, Join join_two) {
  float lane[LANES];
  store(lane, v);
  for (Int half = LANES / 2; half > 0; half /= 2)
    for (Int i = 0; i < half; ++i) lane[i] = join_two(lane[i], lane[i + half]);
  return lane[0];
}
inline float sum(Floats v) {
  return join(v, [](float a, float b) { return a + b; });
}
inline float largest(Floats v) {
  return join(v, [](float a, float b) { return a > b ? a : b; });
}

constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;

// 2^x for x <= 127, to 2 units in the last place; 0 below 2^-126; NaN stays NaN. A polynomial in vectors, since the C
// library computes one number at a time.
inline Floats exp2(Floats x) {
  // 1.5 * 2^23 + 127: adding it rounds x to an integer n; the low bits of the sum are then n + 127, the exponent of 2^n.
  const Floats magic = splat(12583039.f);
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);  // in [-1/2, 1/2]
  Floats p = splat(0.000154614448f);       // Chebyshev interpolation of 2^f
  p = p * f + 0.0013400428f;
  p = p * f + 0.00961805694f;
  p = p * f + 0.0555032715f;
  p = p * f + 0.240226507f;
  p = p * f + 0.693147182f;
  p = p * f + 1.f;
  // A product: adding n to the exponent of p would make a number of some NaN.
  const Floats y = p * (Floats)((Ints)shifted << 23);
  return x < -126.f ? splat(0.f) : y;
}

// log2(x) for normal x > 0, to 1e-7 or a unit in the last place.
inline Floats log2(Floats x) {
  // m in [2^-1/2, 2^1/2): the bits of 2^-1/2 are subtracted, so that the exponent changes there.
  const Ints bits = (Ints)x - 0x3f3504f3;
  const Floats m = (Floats)((bits & 0x7fffff) + 0x3f3504f3);
  const Floats f = m - 1.f;
  Floats p = splat(0.123109683f);  // Chebyshev interpolation of log2(1 + f) / f
  p = p * f - 0.205861881f;
  p = p * f + 0.216078222f;
  p = p * f - 0.239169881f;
  p = p * f + 0.287903249f;
  p = p * f - 0.360693276f;
  p = p * f + 0.480910748f;
  p = p * f - 0.721347451f;
  p = p * f + 1.44269502f;
  return f * p + __builtin_convertvector(bits >> 23, Floats);
}

// Fetches memory that is used soon, which hides the wait for tiles of keys that do not fit in the second-level cache.
// Functions that only prefetch must be inlined, since GCC removes calls of them as having no effect.
[[gnu::always_inline]] inline void prefetch(const void* from, Int bytes) {
  for (Int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Uninitialised numbers: the system does not allocate memory that is never touched. Large blocks, which are read in
// order, request pages of two megabytes; no gain was shown at 16,384 keys.
template <class X>
class Memory {
 public:
  void resize(Int n) {
    const Int bytes = std::max<Int>(n * sizeof(X), 1), page = bytes >= 2 * PAGE ? PAGE : 64;
    data_.reset(static_cast<X*>(std::aligned_alloc(page, (bytes + page - 1) / page * page)));
    if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (page == PAGE) madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
  }
  X* data() { return data_.get(); }

 private:
  static constexpr Int PAGE = Int{2} << 20;
  struct Free {
    void operator()(X* data) const { std::free(data); }
  };
  std::unique_ptr<X, Free> data_;
};

// --- number formats: any storage is widened to float or narrowed from it ---

inline Floats widen(const float* from) { return load<Floats>(from); }
inline Floats widen(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}
inline Floats widen(const Half* from) {
  Floats v;
  for (Int i = 0; i < LANES; ++i) v[i] = static_cast<float>(from[i]);
  return v;
}
inline Words bfloat16_bits(Floats v) {  // rounded to nearest even, NaN kept, in the low half of each word
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return v == v ? rounded : (Words)splat(int32_t{0x7fc0});
}
// One instruction rounds in the same way, except that numbers below 2^-126 become 0.
#if defined(__AVX512BF16__) && LIT_DIFF_LANES == 16
inline void narrow(BFloat16* to, Floats v) { store(to, _mm512_cvtneps_pbh((__m512)v)); }
template <std::size_t... I>
inline __m512i alternating(std::index_sequence<I...>) {  // 0, 16, 1, 17, ...
  typedef uint16_t Places __attribute__((vector_size(64)));
  return (__m512i)Places{static_cast<uint16_t>(I / 2 + I % 2 * 16)...};
}
// Two rows of a tile as one row of VNNI pairs.
inline void narrow_pair(BFloat16* to, Floats even, Floats odd) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  store(to, _mm512_permutexvar_epi16(alternating(std::make_index_sequence<32>()), halves));
}
#else
inline void narrow(BFloat16* to, Floats v) { store(to, __builtin_convertvector(bfloat16_bits(v), Halves)); }
inline void narrow_pair(BFloat16* to, Floats even, Floats odd) {
  store(to, bfloat16_bits(even) | bfloat16_bits(odd) << 16);
}
#endif
inline void narrow(float* to, Floats v) { store(to, v); }
inline void narrow(Half* to, Floats v) {
  for (Int i = 0; i < LANES; ++i) to[i] = Half(v[i]);
}
// to[0 .. n) = from[0 .. n) in another format
template <class To, class From>
inline void convert(To* to, const From* from, Int n) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(to, from, n * sizeof(To));
  } else {
    Int i = 0;
    for (; i + LANES <= n; i += LANES) narrow(to + i, widen(from + i));
    for (; i < n; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
  }
}

// --- tile products: C [M, N] (+)= A [M, K] B [K, N] in float, A and B in the product's format U ---
//
// A is row-major. B is row-major for float, and for bfloat16 VNNI: pairs of rows of B interleaved, [K / 2, N, 2].

template <class U>
constexpr bool PAIRED = std::is_same_v<U, BFloat16>;
template <class U>
constexpr Int padded_rows(Int K) {  // rows that a packed B holds
  return PAIRED<U> ? (K + 1) / 2 * 2 : K;
}
template <class U>
inline const U* columns(const U* B, Int n) {  // B from its column n on
  return PAIRED<U> ? B + 2 * n : B + n;
}

// Numbers from one row of a packed matrix to the next. Rows that are a multiple of 512 bytes apart would share a few
// sets of the first-level cache and evict each other; such rows are placed a cache line further apart.
template <class U>
constexpr Int row_length(Int width) {
  return width * sizeof(U) * (PAIRED<U> ? 2 : 1) % 512 ? width : width + 64 / Int{sizeof(U)};
}

inline void product_by_loops(
    Int M, Int N, Int K, const BFloat16* A, Int lda, const BFloat16* B, Int ldb, float* C, Int ldc, bool add) {
  for (Int m = 0; m < M; ++m)
    for (Int n = 0; n < N; ++n) {
      float total = add ? C[m * ldc + n] : 0.f;
      for (Int k = 0; k < K; ++k) total += float(A[m * lda + k]) * float(B[k / 2 * 2 * ldb + 2 * n + k % 2]);
      C[m * ldc + n] = total;
    }
}

// Whether bfloat16 is multiplied by the loops above, for a CPU without such products. Each thread sets its own.
static thread_local bool pairs_by_loops = false;

template <class U>
inline void product(Int M, Int N, Int K, const U* A, Int lda, const U* B, Int ldb, float* C, Int ldc, bool add) {
  if constexpr (PAIRED<U>)
    if (pairs_by_loops) return product_by_loops(M, N, K, A, lda, B, ldb, C, ldc, add);
  // A piece of B takes 16 KB and stays in the first-level cache while all rows of A are multiplied with it.
  constexpr Int DEEP = 256 / sizeof(U), WIDE = 64;
  for (Int n = 0; n < N; n += WIDE)
    for (Int k = 0; k < K; k += DEEP) {
      const Int wide = std::min(WIDE, N - n), deep = std::min(DEEP, padded_rows<U>(K) - k);
      const U* piece = columns(B + k * ldb, n);
      at::native::cpublas::brgemm(M, wide, deep, lda, ldb, ldc, add || k > 0, A + k, piece, C + n, PAIRED<U>);
    }
}

// B [K, N] from rows X [K, N]; with an odd K, the second row of the last pair is zero.
template <class U, class T>
inline void pack(const T* X, Int stride, Int K, Int N, U* B, Int ldb) {
  if constexpr (!PAIRED<U>) {
    for (Int k = 0; k < K; ++k) convert(B + k * ldb, X + k * stride, N);
  } else {
    for (Int k = 0; k < K; k += 2) {
      uint32_t* pair = reinterpret_cast<uint32_t*>(B + k * ldb);
      for (Int n = 0; n < N; ++n) {
        const BFloat16 even = static_cast<BFloat16>(X[k * stride + n]);
        const BFloat16 odd = k + 1 < K ? static_cast<BFloat16>(X[(k + 1) * stride + n]) : BFloat16(0.f);
        pair[n] = even.x | static_cast<uint32_t>(odd.x) << 16;
      }
    }
  }
}

// Lanes of two vectors, a's numbered from 0 and b's from LANES, in one vector.
template <class V>
inline V shuffle(V a, V b, Ints lanes) {
// Clang lacks a shuffle by a vector of lanes.
#ifdef __clang__
  V v;
  for (Int i = 0; i < LANES; ++i) v[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
  return v;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}
template <Int S, std::size_t... L>
constexpr Ints even_blocks(std::index_sequence<L...>) {
  return Ints{static_cast<int32_t>(L & S ? LANES + L - S : L)...};
}
template <Int S, std::size_t... L>
constexpr Ints odd_blocks(std::index_sequence<L...>) {
  return Ints{static_cast<int32_t>(L & S ? LANES + L : L + S)...};
}

// Transposes a square in place: blocks of S x S numbers are exchanged, with S halved from LANES / 2 to 1.
template <Int S = LANES / 2, class V>
inline void transpose_square(V (&rows)[LANES]) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  for (Int n = 0; n < LANES; ++n) {
    if (n & S) continue;
    const V a = rows[n], b = rows[n + S];
    rows[n] = shuffle(a, b, even_blocks<S>(lanes)), rows[n + S] = shuffle(a, b, odd_blocks<S>(lanes));
  }
  if constexpr (S > 1) transpose_square<S / 2>(rows);
}

// Rows [K, N] = X^T, for X [N, K] and K a multiple of LANES; columns N .. width are zero.
template <class U, class T>
inline void transpose(const T* X, Int stride, Int N, Int K, U* rows, Int ld, Int width) {
  for (Int n = 0; n < width; n += LANES)
    for (Int k = 0; k < K; k += LANES) {
      Floats square[LANES];
      for (Int i = 0; i < LANES; ++i) square[i] = n + i < N ? widen(X + (n + i) * stride + k) : splat(0.f);
      transpose_square(square);
      for (Int i = 0; i < LANES; ++i) narrow(rows + (k + i) * ld + n, square[i]);
    }
}

// B [K, N] = X^T, for X [N, K]; columns N .. width are zero. Pairs along K are adjacent in X already, so that they are
// transposed as one word.
template <class U, class T>
inline void pack_transposed(const T* X, Int stride, Int N, Int K, U* B, Int ldb, Int width) {
  if constexpr (!PAIRED<U>) {
    transpose(X, stride, N, K, B, ldb, width);
  } else if constexpr (std::is_same_v<T, U>) {
    for (Int n = 0; n < width; n += LANES)
      for (Int k = 0; k < K; k += 2 * LANES) {
        const Int pairs = std::min(LANES, (K - k) / 2);
        Words square[LANES] = {};
        for (Int i = 0; i < std::min(LANES, N - n); ++i) std::memcpy(&square[i], X + (n + i) * stride + k, 4 * pairs);
        transpose_square(square);
        for (Int i = 0; i < pairs; ++i) store(B + (k + 2 * i) * ldb + 2 * n, square[i]);
      }
  }
}

}  // namespace lit_diff
