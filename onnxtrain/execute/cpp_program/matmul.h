// GEMMs of sizes known to the compiler. The right operand has contiguous rows.

// With 4 rows: 8 vectors of sums for floats, and their row of b stays in registers.
constexpr int kColumns = VECTOR_BYTES == 64 ? 32 : 16;

// A vector of elements, or one element. Without vectors, GCC may vectorize over k: 4 to 25 times slower with AVX2.
template <class T, bool FULL> struct Lane {
  typedef T type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> struct Lane<T, false> {
  typedef T type;
};

template <class T, int R, int J, int K, int AI, int AK, int BK, int CI>
static inline void gemm_tile(const T* __restrict a, const T* __restrict b, T* __restrict c) {
  using V = typename Lane<T, J * sizeof(T) % VECTOR_BYTES == 0>::type;
  constexpr int lanes = sizeof(V) / sizeof(T);
  V sums[R][J / lanes] = {};
  add_matmul(K, a, AI, AK, b, BK, sums);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; j += lanes) {
      const V sum = sums[r][j / lanes];
      std::memcpy(c + r * CI + j, &sum, sizeof sum);
    }
}

template <class T, int M, int J, int K, int AI, int AK, int BK, int CI>
static inline void gemm_columns(const T* a, const T* b, T* c) {
  for (int i = 0; i + 4 <= M; i += 4) gemm_tile<T, 4, J, K, AI, AK, BK, CI>(a + i * AI, b, c + i * CI);
  constexpr int done = M / 4 * 4;
  if constexpr (M > done) gemm_tile<T, M - done, J, K, AI, AK, BK, CI>(a + done * AI, b, c + done * CI);
}

// c[i, j] = sum over k of a[i * AI + k * AK] * b[k * BK + j]; c[i, j] is at i * CI + j.
template <class T, int M, int N, int K, int AI, int AK, int BK, int CI>
static inline void gemm(const T* a, const T* b, T* c) {
  for (int j = 0; j + kColumns <= N; j += kColumns) gemm_columns<T, M, kColumns, K, AI, AK, BK, CI>(a, b + j, c + j);
  constexpr int lanes = VECTOR_BYTES / sizeof(T), done = N / kColumns * kColumns, full = N / lanes * lanes;
  if constexpr (full > done) gemm_columns<T, M, full - done, K, AI, AK, BK, CI>(a, b + done, c + done);
  if constexpr (N > full) gemm_columns<T, M, N - full, K, AI, AK, BK, CI>(a, b + full, c + full);
}

// Transposition in registers takes 0.2 us for 32 x 32 floats; a loop, which gathers, 1.1: more than the GEMM after it.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES
#endif
#endif

#if defined(HAS_SHUFFLES)
// Exchanges the lanes of `a` that are S to the right of their target with those of `b` that are S to the left of it.
template <int S, int N, class V, int... C>
static inline void exchange(V& a, V& b, std::integer_sequence<int, C...>) {
  const V above = __builtin_shufflevector(a, b, (C & S ? N + C - S : C)...);
  b = __builtin_shufflevector(a, b, (C & S ? N + C : C + S)...);
  a = above;
}

template <int S, int N, class V>
static inline void exchange_all(V* rows) {
  for (int i = 0; i < N; ++i)
    if (!(i & S)) exchange<S, N>(rows[i], rows[i + S], std::make_integer_sequence<int, N>());
  if constexpr (S > 1) exchange_all<S / 2, N>(rows);
}
#endif

// to[r, c] = from[c, r]; from[c, r] is at c * FC + r, and `to` is contiguous.
template <class T, int R, int C, int FC>
static inline void transpose(const T* __restrict from, T* __restrict to) {
#if defined(HAS_SHUFFLES)
  typedef T V __attribute__((vector_size(VECTOR_BYTES)));
  constexpr int N = VECTOR_BYTES / sizeof(T), rows = R / N * N, columns = C / N * N;
  for (int r = 0; r < rows; r += N)
    for (int c = 0; c < columns; c += N) {
      V block[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) std::memcpy(&block[i], from + (c + i) * FC + r, VECTOR_BYTES);
      exchange_all<N / 2, N>(block);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) std::memcpy(to + (r + i) * C + c, &block[i], VECTOR_BYTES);
    }
#else
  constexpr int rows = 0, columns = 0;
#endif
  for (int r = 0; r < R; ++r)
    for (int c = r < rows ? columns : 0; c < C; ++c) to[r * C + c] = from[c * FC + r];
}

// The sum of n adjacent elements, in 16 parts: it may be vectorized, and is as accurate as a vectorized sum.
template <class T>
static inline T sum_of(const T* x, int64_t n) {
  T parts[16] = {}, total = 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int p = 0; p < 16; ++p) parts[p] += x[i + p];
  for (; i < n; ++i) total += x[i];
  for (int step = 8; step; step /= 2)
    for (int p = 0; p < step; ++p) parts[p] += parts[p + step];
  return total + parts[0];
}
