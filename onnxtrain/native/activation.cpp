// Activations x * s(z) with the sigmoid s of some z(x), their gradients, and gated activations.
//
//     silu: z = x      tanh-approximated gelu: x * (1 + tanh(u)) / 2 = x * s(2u), z = 2u = A * x + B * x^3
//     y = act(x)           dx = dy * act'(x)                  act'(x) = s(z) + x * s'(z) * z'(x)
//     y = act(gate) * up   dgate = dy * up * act'(gate)       dup = dy * act(gate)

template <class T> struct Silu {
    static inline Vec<T> z(Vec<T> x) { return x; }
    static inline Vec<T> slope(Vec<T>) { return Vec<T>{} + T(1); }
};
template <class T> struct Gelu {
    static constexpr T a = T(1.59576912160573071), b = T(0.0713548162726009177);  // 2 sqrt(2 / pi), and 0.044715 of it
    static inline Vec<T> z(Vec<T> x) { return x * (a + b * x * x); }
    static inline Vec<T> slope(Vec<T> x) { return a + 3 * b * x * x; }
};

template <class T, template <class> class Function> struct Activation {
    Vec<T> y, slope;
    explicit Activation(Vec<T> x) {
        const Sigmoid<T> s(Function<T>::z(x));
        y = x * s.value;
        slope = s.value + x * s.slope * Function<T>::slope(x);
    }
};

template <class T, template <class> class Function> static void forward(const T *x, T *y, int64_t count, int64_t threads) {
    parallel_vectors<T>(count, threads, [=](int64_t at, auto n) {
        store_first<T>(y + at, n, Activation<T, Function>(load_first<T>(x + at, n)).y);
    });
}

template <class T, template <class> class Function> static void backward(const T *dy, const T *x, T *dx, int64_t count, int64_t threads) {
    parallel_vectors<T>(count, threads, [=](int64_t at, auto n) {
        store_first<T>(dx + at, n, load_first<T>(dy + at, n) * Activation<T, Function>(load_first<T>(x + at, n)).slope);
    });
}

// The row strides of gate and up are `gate_row` and `up_row` elements, as for halves of one tensor; all else is contiguous.
struct Rows {
    int64_t count, width, gate_row, up_row;

    // f(offset in gate, offset in up, offset in contiguous rows, n)
    template <class T, class F> void each(int64_t threads, const F &f) const {
        if (count == 1) return parallel_vectors<T>(width, threads, [=](int64_t at, auto n) { f(at, at, at, n); });
        parallel_for(count * width < 32768 ? 1 : threads, count, [=](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++)
                each_vector<T>(0, width, [=](int64_t at, auto n) { f(r * gate_row + at, r * up_row + at, r * width + at, n); });
        });
    }
};

template <class T, template <class> class Function>
static void gated(const Rows &rows, const T *gate, const T *up, T *y, int64_t threads) {
    rows.each<T>(threads, [=](int64_t g, int64_t u, int64_t at, auto n) {
        store_first<T>(y + at, n, Activation<T, Function>(load_first<T>(gate + g, n)).y * load_first<T>(up + u, n));
    });
}

template <class T, template <class> class Function>
static void gated_backward(const Rows &rows, const T *dy, const T *gate, const T *up, T *dgate, T *dup, int64_t threads) {
    rows.each<T>(threads, [=](int64_t g, int64_t u, int64_t at, auto n) {
        const Activation<T, Function> act(load_first<T>(gate + g, n));
        const Vec<T> d = load_first<T>(dy + at, n);
        store_first<T>(dup + at, n, d * act.y);
        store_first<T>(dgate + at, n, d * load_first<T>(up + u, n) * act.slope);
    });
}

// Phi(-|x|) = t * p(t) * e^(-x^2 / 2), t = 1 / (1 + 0.47 |x| / sqrt 2) and a minimax polynomial p: a relative error of 8e-8
// for all x, where 1 + erf(x / sqrt 2) cancels for x < 0.
struct Normal {
    Vec<float> distribution, density;
    explicit Normal(Vec<float> x) {
        const Vec<float> t = 1 / (1 + 0.332340187f * absolute<float>(x)), e = exponential<float>(-0.5f * x * x);
        Vec<float> p = t * -0.0205648679f + 0.0824800381f;
        p = p * t + -0.100982764f;
        p = p * t + 0.010409837f;
        p = p * t + 0.00842984639f;
        p = p * t + 0.0480436623f;
        p = p * t + 0.0891230717f;
        p = p * t + 0.117890197f;
        p = p * t + 0.132586397f;
        p = p * t + 0.132584542f;
        const Vec<float> tail = t * p * e;
        distribution = x < 0.0f ? tail : 1 - tail;
        density = 0.398942280f * e;
    }
};

extern "C" void exact_gelu_float(const float *x, float *y, int64_t count, int64_t threads) {
    parallel_vectors<float>(count, threads, [=](int64_t at, auto n) {
        const Vec<float> v = load_first<float>(x + at, n);
        store_first<float>(y + at, n, v * Normal(v).distribution);
    });
}

extern "C" void exact_gelu_backward_float(const float *dy, const float *x, float *dx, int64_t count, int64_t threads) {
    parallel_vectors<float>(count, threads, [=](int64_t at, auto n) {
        const Vec<float> v = load_first<float>(x + at, n);
        const Normal normal(v);
        store_first<float>(dx + at, n, load_first<float>(dy + at, n) * (normal.distribution + v * normal.density));
    });
}

#define DEFINE(NAME, OF, TYPE)                                                                                                \
    extern "C" void NAME##_##TYPE(const TYPE *x, TYPE *y, int64_t count, int64_t threads) {                                   \
        forward<TYPE, OF>(x, y, count, threads);                                                                              \
    }                                                                                                                         \
    extern "C" void NAME##_backward_##TYPE(const TYPE *dy, const TYPE *x, TYPE *dx, int64_t count, int64_t threads) {         \
        backward<TYPE, OF>(dy, x, dx, count, threads);                                                                        \
    }
#define DEFINE_GATED(NAME, OF, TYPE)                                                                                          \
    extern "C" void gated_##NAME##_##TYPE(const TYPE *gate, const TYPE *up, TYPE *y, int64_t count, int64_t width,            \
                                          int64_t gate_row, int64_t up_row, int64_t threads) {                                \
        gated<TYPE, OF>({count, width, gate_row, up_row}, gate, up, y, threads);                                              \
    }                                                                                                                         \
    extern "C" void gated_##NAME##_backward_##TYPE(const TYPE *dy, const TYPE *gate, const TYPE *up, TYPE *dgate, TYPE *dup,  \
                                                   int64_t count, int64_t width, int64_t gate_row, int64_t up_row,            \
                                                   int64_t threads) {                                                         \
        gated_backward<TYPE, OF>({count, width, gate_row, up_row}, dy, gate, up, dgate, dup, threads);                        \
    }

DEFINE(tanh_gelu, Gelu, float)
DEFINE(tanh_gelu, Gelu, double)
DEFINE_GATED(tanh_gelu, Gelu, float)
DEFINE_GATED(tanh_gelu, Gelu, double)
DEFINE_GATED(silu, Silu, float)
DEFINE_GATED(silu, Silu, double)
