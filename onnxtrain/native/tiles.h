// Tiles of a GEMM's result that stay in registers, TALL rows by WIDE columns: 12 vectors of sums with 16 registers, 24 with
// 32 registers.
constexpr int TALL = VECTOR_BYTES == 64 ? 12 : 6, ACROSS = 2, WIDE = ACROSS * LANES<float>;

static inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(std::integral_constant of n) for 1 <= n <= TALL: n as a compile-time constant.
template <int N = TALL, class F> static inline void with_constant(int64_t n, const F &f) {
    if constexpr (N > 1) {
        if (n < N) return with_constant<N - 1>(n, f);
    }
    f(std::integral_constant<int, N>());
}

template <int N> static inline void copy_pieces(const float *from, int64_t stride, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) std::memcpy(to + i * N, from + i * stride, N * sizeof(float));
}
