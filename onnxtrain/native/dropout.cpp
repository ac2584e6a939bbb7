// Dropout with keyed random bits: y = x * (bits >= least ? scale : 0) + residual, elements in contiguous order. residual may
// be null; y may be x. After a Relu: y = max(x, 0) * (...), whose gradient is dx = y > 0 ? dy * scale : 0; NaN stays NaN, as
// in PyTorch.

constexpr int64_t CHUNK = 1024;  // elements whose random bits are generated together

template <class F> static void in_chunks(const int64_t *key, int64_t count, int64_t threads, const F &f) {
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    parallel_for(count < 32768 ? 1 : threads, chunks, [&](int64_t begin, int64_t end) {
        alignas(64) int16_t random_bits[CHUNK + 64];
        for (int64_t c = begin; c < end; c++) {
            const int64_t at = c * CHUNK, n = std::min(CHUNK, count - at);
            write_random_bits(random_bits, n, at / 4, key);
            f(at, n, random_bits);
        }
    });
}

// y = join(offset, count, x, factor) for each vector.
template <class T, class F>
static void dropout(const T *x, T *y, const int64_t *key, int64_t least, T scale, int64_t count, int64_t threads, const F &join) {
    const int16_t low = int16_t(least);
    in_chunks(key, count, threads, [=](int64_t at, int64_t n, const int16_t *random_bits) {
        each_vector<T>(0, n, [=](int64_t i, auto m) {
            const Vec<T> v = load_first<T>(x + at + i, m), f = dropout_factor<T>(random_bits + i, low, scale);
            store_first<T>(y + at + i, m, join(at + i, m, v, f));
        });
    });
}

template <class T>
static void dropout(const T *x, const T *residual, T *y, const int64_t *key, int64_t least, T scale, int64_t count, int64_t threads) {
    if (residual)
        dropout<T>(x, y, key, least, scale, count, threads, [=](int64_t at, auto n, Vec<T> v, Vec<T> f) {
            return v * f + load_first<T>(residual + at, n);
        });
    else
        dropout<T>(x, y, key, least, scale, count, threads, [](int64_t, auto, Vec<T> v, Vec<T> f) { return v * f; });
}

template <class T>
static void relu_dropout(const T *x, T *y, const int64_t *key, int64_t least, T scale, int64_t count, int64_t threads) {
    dropout<T>(x, y, key, least, scale, count, threads, [](int64_t, auto, Vec<T> v, Vec<T> f) {
        return (v < 0 ? Vec<T>{} : v) * f;
    });
}

template <class T>
static void relu_dropout_backward(const T *dy, const T *y, T *dx, T scale, int64_t count, int64_t threads) {
    parallel_vectors<T>(count, threads, [=](int64_t at, auto n) {
        const Vec<T> kept = load_first<T>(y + at, n), d = load_first<T>(dy + at, n) * scale;
        store_first<T>(dx + at, n, kept <= 0 ? Vec<T>{} : d);
    });
}

#define OF_TYPE(TYPE)                                                                                                       \
    extern "C" void dropout_##TYPE(const TYPE *x, const TYPE *residual, TYPE *y, const int64_t *key, int64_t least,         \
                                   double scale, int64_t count, int64_t threads) {                                          \
        dropout<TYPE>(x, residual, y, key, least, TYPE(scale), count, threads);                                             \
    }                                                                                                                       \
    extern "C" void relu_dropout_##TYPE(const TYPE *x, TYPE *y, const int64_t *key, int64_t least, double scale,            \
                                        int64_t count, int64_t threads) {                                                   \
        relu_dropout<TYPE>(x, y, key, least, TYPE(scale), count, threads);                                                  \
    }                                                                                                                       \
    extern "C" void relu_dropout_backward_##TYPE(const TYPE *dy, const TYPE *y, TYPE *dx, double scale, int64_t count,      \
                                                 int64_t threads) {                                                         \
        relu_dropout_backward<TYPE>(dy, y, dx, TYPE(scale), count, threads);                                                \
    }

OF_TYPE(float)
OF_TYPE(double)

// The mask: 1 where an element is kept, 0 where it is dropped.
extern "C" void kept(uint8_t *mask, const int64_t *key, int64_t least, int64_t count, int64_t threads) {
    typedef int16_t wide __attribute__((vector_size(64)));
    typedef int8_t narrow __attribute__((vector_size(32)));
    const int16_t low = int16_t(least);
    in_chunks(key, count, threads, [=](int64_t at, int64_t n, const int16_t *random_bits) {
        for (int64_t i = 0; i < n; i += 32) {
            wide bits;
            std::memcpy(&bits, random_bits + i, sizeof bits);
            const narrow is_kept = __builtin_convertvector(bits >= low, narrow) & 1;
            std::memcpy(mask + at + i, &is_kept, size_t(std::min<int64_t>(32, n - i)));
        }
    });
}
