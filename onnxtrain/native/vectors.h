// SIMD vectors of the processor's width with the vector extensions of GCC and Clang, for any processor. A GEMM tile has
// TILE_ROWS times two vectors of sums: 12 of AVX's 16 registers. With 4 rows the latency of the additions shows, and
// attention of [16, 12, 128, 32] takes a quarter longer (22.3 ms backward on one thread of an EPYC, 17.5 with 6).
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, TILE_ROWS = 8;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, TILE_ROWS = 6;
#else
constexpr int VECTOR_BYTES = 16, TILE_ROWS = 4;
#endif

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int16_t bits __attribute__((vector_size(VECTOR_BYTES / 2)));
    typedef int32_t pairs __attribute__((vector_size(VECTOR_BYTES)));
};
template <> struct Lanes<double> {
    typedef double vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t ivec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int16_t bits __attribute__((vector_size(VECTOR_BYTES / 4)));
    typedef int32_t pairs __attribute__((vector_size(VECTOR_BYTES / 2)));
};

template <class T> using Vec = typename Lanes<T>::vec;
template <class T> constexpr int LANES = VECTOR_BYTES / sizeof(T);

template <class T> static inline Vec<T> load(const T *p) { Vec<T> v; std::memcpy(&v, p, sizeof v); return v; }
template <class T> static inline void store(T *p, Vec<T> v) { std::memcpy(p, &v, sizeof v); }
// The first `count` lanes only: missing lanes are `rest` when loaded, and are not stored.
template <class T> static inline Vec<T> load_first(const T *p, int64_t count, T rest = 0) {
    Vec<T> v = Vec<T>{} + rest;
    std::memcpy(&v, p, size_t(count) * sizeof(T));
    return v;
}
template <class T> static inline void store_first(T *p, int64_t count, Vec<T> v) { std::memcpy(p, &v, size_t(count) * sizeof(T)); }
template <class T> static inline int64_t padded(int64_t n) { return (n + LANES<T> - 1) / LANES<T> * LANES<T>; }

// f(at, count) for each vector of [begin, end), and for the remainder after the last full one. For a full vector `count` is
// a compile-time constant, which removes the branches.
template <class T, class F> static inline void each_vector(int64_t begin, int64_t end, const F &f) {
    int64_t at = begin;
    for (; at + LANES<T> <= end; at += LANES<T>) f(at, std::integral_constant<int64_t, LANES<T>>());
    if (at < end) f(at, end - at);
}

// The same for [0, count), with the full vectors divided equally among the threads.
template <class T, class F> static void parallel_vectors(int64_t count, int64_t threads, const F &f) {
    parallel_for(count < 32768 ? 1 : threads, padded<T>(count) / LANES<T>, [&](int64_t begin, int64_t end) {
        each_vector<T>(begin * LANES<T>, std::min(end * LANES<T>, count), f);
    });
}

template <class T> static inline Vec<T> absolute(Vec<T> x) {
    typename Lanes<T>::ivec bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= ~(typename Lanes<T>::ivec{} + 1 << (sizeof(T) * 8 - 1));
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The maximum of each lane; b if one of them is NaN.
template <class T> static inline Vec<T> maximum(Vec<T> a, Vec<T> b) { return a > b ? a : b; }

// Reduces all lanes to one value by halving, which needs few steps.
template <class T, class F> static inline T reduce_lanes(Vec<T> x, const F &f) {
    T lanes[LANES<T>];
    store<T>(lanes, x);
    for (int half = LANES<T> / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = f(lanes[i], lanes[i + half]);
    return lanes[0];
}

template <class T> static inline T sum_of(Vec<T> x) { return reduce_lanes<T>(x, [](T a, T b) { return a + b; }); }
template <class T> static inline T maximum_of(Vec<T> x) { return reduce_lanes<T>(x, [](T a, T b) { return b > a ? b : a; }); }

// a0 b0 a1 b1 ...: interleaves the lower halves of a and b, or the upper halves.
template <class T, bool UPPER, int... I> static inline Vec<T> interleaved(Vec<T> a, Vec<T> b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, ((UPPER * LANES<T> + I) / 2 + I % 2 * LANES<T>)...);
#else
    return __builtin_shuffle(a, b, typename Lanes<T>::ivec{((UPPER * LANES<T> + I) / 2 + I % 2 * LANES<T>)...});
#endif
}

// Transposes LANES x LANES elements: to[j, i] = from[i, j]. In each round the highest bit of a vector's index becomes the
// lowest bit of its lanes' indices.
template <class T> __attribute__((noinline)) static void transpose_tile(const T *from, int64_t from_stride, T *to, int64_t to_stride) {
    constexpr int N = LANES<T>;
    constexpr auto lanes = std::make_integer_sequence<int, N>();
    Vec<T> x[N], y[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = load<T>(from + i * from_stride);
#pragma GCC unroll 4
    for (int round = 1; round < N; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < N / 2; i++) {
            y[2 * i] = interleaved<T, false>(x[i], x[i + N / 2], lanes);
            y[2 * i + 1] = interleaved<T, true>(x[i], x[i + N / 2], lanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) x[i] = y[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) store<T>(to + i * to_stride, x[i]);
}

// Aligned memory, which the caller frees.
template <class T> static T *scratch(int64_t count) {
    T *memory = static_cast<T *>(std::aligned_alloc(64, size_t((count * sizeof(T) + 63) / 64 * 64)));
    if (memory == nullptr) std::abort();
    return memory;
}
