// Gelu by its tanh, and its gradient: y = x * (1 + tanh(u)) / 2 = x * sigmoid(2u) with 2u = A * x + B * x^3.

template <class T> struct Gate {
    static constexpr T a = T(1.59576912160573071), b = T(0.0713548162726009177);  // 2 sqrt(2 / pi), and 0.044715 of it
    Vec<T> s, slope;  // the sigmoid of 2u, and its slope s * (1 - s)
    explicit Gate(Vec<T> x) {
        const Vec<T> z = x * (a + b * x * x);
        const Vec<T> e = exponential<T>(z < T(0) ? z : -z), one = 1 / (1 + e);
        s = z < T(0) ? e * one : one;
        slope = e * one * one;
    }
};

template <class T> static void forward(const T *x, T *y, int64_t count, int64_t threads) {
    parallel_vectors<T>(count, threads, [=](int64_t at, auto n) {
        const Vec<T> v = load_first<T>(x + at, n);
        store_first<T>(y + at, n, v * Gate<T>(v).s);
    });
}

template <class T> static void backward(const T *dy, const T *x, T *dx, int64_t count, int64_t threads) {
    parallel_vectors<T>(count, threads, [=](int64_t at, auto n) {
        const Vec<T> v = load_first<T>(x + at, n), d = load_first<T>(dy + at, n);
        const Gate<T> gate(v);
        store_first<T>(dx + at, n, d * (gate.s + v * gate.slope * (Gate<T>::a + 3 * Gate<T>::b * v * v)));
    });
}

#define DEFINE(TYPE)                                                                                                   \
    extern "C" void forward_##TYPE(const TYPE *x, TYPE *y, int64_t count, int64_t threads) {                           \
        forward<TYPE>(x, y, count, threads);                                                                           \
    }                                                                                                                  \
    extern "C" void backward_##TYPE(const TYPE *dy, const TYPE *x, TYPE *dx, int64_t count, int64_t threads) {         \
        backward<TYPE>(dy, x, dx, count, threads);                                                                     \
    }

DEFINE(float)
DEFINE(double)
