// Vectors of the width that the processor has, in the compilers' own notation: GCC and Clang, any processor.
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, TILE_ROWS = 8;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, TILE_ROWS = 4;
#else
constexpr int VECTOR_BYTES = 16, TILE_ROWS = 4;
#endif

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int16_t bits __attribute__((vector_size(VECTOR_BYTES / 2)));
};
template <> struct Lanes<double> {
    typedef double vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t ivec __attribute__((vector_size(VECTOR_BYTES)));
    typedef int16_t bits __attribute__((vector_size(VECTOR_BYTES / 4)));
};

template <class T> using Vec = typename Lanes<T>::vec;
template <class T> constexpr int LANES = VECTOR_BYTES / sizeof(T);

template <class T> static inline Vec<T> load(const T *p) { Vec<T> v; std::memcpy(&v, p, sizeof v); return v; }
template <class T> static inline void store(T *p, Vec<T> v) { std::memcpy(p, &v, sizeof v); }
// Fewer elements than lanes: what is not there is `rest`, and is not written.
template <class T> static inline Vec<T> load_first(const T *p, int64_t count, T rest) {
    Vec<T> v = Vec<T>{} + rest;
    std::memcpy(&v, p, size_t(count) * sizeof(T));
    return v;
}
template <class T> static inline void store_first(T *p, int64_t count, Vec<T> v) { std::memcpy(p, &v, size_t(count) * sizeof(T)); }
template <class T> static inline int64_t padded(int64_t n) { return (n + LANES<T> - 1) / LANES<T> * LANES<T>; }
