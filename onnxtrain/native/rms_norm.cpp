// RMS norm of rows x[count, width] and its gradient; Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
//
//     inv_std = 1 / sqrt(mean(x^2) + epsilon)      y = x * inv_std * scale
//     dx = inv_std * (g - z * mean(g * z)) + added        dscale = sum(dy * z)        with z = x * inv_std, g = dy * scale

constexpr int64_t BLOCK = 16;  // rows whose dscale is accumulated in the elements' type; blocks are accumulated in double
constexpr int CHAINS = 4;      // independent sums

// The sum of term(offset, count) over the vectors of a row.
template <class T, class F> static inline T sum_of_row(int64_t width, const F &term) {
    Vec<T> sums[CHAINS] = {};
    int64_t c = 0;
    for (; c + CHAINS * LANES<T> <= width; c += CHAINS * LANES<T>)
        for (int i = 0; i < CHAINS; i++) sums[i] += term(c + i * LANES<T>, std::integral_constant<int64_t, LANES<T>>());
    each_vector<T>(c, width, [&](int64_t at, auto n) { sums[0] += term(at, n); });
    return sum_of<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static inline int64_t team_size(int64_t count, int64_t width, int64_t threads) { return count * width < 32768 ? 1 : threads; }

template <class T>
static void forward(const T *x, const T *scale, T *y, T *inv_std, int64_t count, int64_t width, double epsilon, int64_t threads) {
    parallel_for(team_size(count, width, threads), count, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *from = x + r * width;
            T *to = y + r * width;
            const T squares = sum_of_row<T>(width, [=](int64_t c, auto n) {
                const Vec<T> v = load_first<T>(from + c, n);
                return v * v;
            });
            const T inverse = 1 / square_root(squares / T(width) + T(epsilon));
            inv_std[r] = inverse;
            if (scale)
                each_vector<T>(0, width, [=](int64_t c, auto n) {
                    store_first<T>(to + c, n, load_first<T>(from + c, n) * inverse * load_first<T>(scale + c, n));
                });
            else
                each_vector<T>(0, width, [=](int64_t c, auto n) { store_first<T>(to + c, n, load_first<T>(from + c, n) * inverse); });
        }
    });
}

// scale, added, dx and dscale may be null.
template <class T>
static void backward(const T *dy, const T *x, const T *scale, const T *inv_std, const T *added, T *dx, T *dscale,
                     int64_t count, int64_t width, int64_t threads) {
    threads = std::min(team_size(count, width, threads), std::max<int64_t>(count, 1));
    const int64_t part = (count + threads - 1) / threads, padded = ::padded<T>(width);
    double *partial = dscale ? static_cast<double *>(std::calloc(size_t(threads * padded), sizeof(double))) : nullptr;
    parallel_for(threads, threads, [=](int64_t first, int64_t last) {
        T *block = dscale ? scratch<T>(padded) : nullptr;
        for (int64_t t = first; t < last; t++) {
            const int64_t end = std::min((t + 1) * part, count);
            for (int64_t row = std::min(t * part, count); row < end; row += BLOCK) {
                const int64_t stop = std::min(row + BLOCK, end);
                if (dscale) std::fill(block, block + padded, T(0));
                for (int64_t r = row; r < stop; r++) {
                    const T *d = dy + r * width, *from = x + r * width, inverse = inv_std[r];
                    const auto scaled_dy = [=](int64_t c, auto n) {
                        const Vec<T> v = load_first<T>(d + c, n);
                        return scale ? v * load_first<T>(scale + c, n) : v;
                    };
                    if (dx) {
                        const T sum = sum_of_row<T>(width, [=](int64_t c, auto n) {
                            return scaled_dy(c, n) * (load_first<T>(from + c, n) * inverse);
                        });
                        const T mean = sum / T(width);
                        const T *added_row = added ? added + r * width : nullptr;
                        T *to = dx + r * width;
                        each_vector<T>(0, width, [=](int64_t c, auto n) {
                            const Vec<T> z = load_first<T>(from + c, n) * inverse, slope = (scaled_dy(c, n) - z * mean) * inverse;
                            store_first<T>(to + c, n, added_row ? slope + load_first<T>(added_row + c, n) : slope);
                        });
                    }
                    if (dscale)
                        each_vector<T>(0, width, [=](int64_t c, auto n) {
                            const Vec<T> z = load_first<T>(from + c, n) * inverse;
                            store<T>(block + c, load<T>(block + c) + load_first<T>(d + c, n) * z);
                        });
                }
                if (dscale) for (int64_t c = 0; c < width; c++) partial[t * padded + c] += double(block[c]);
            }
        }
        std::free(block);
    });
    if (!dscale) return;
    for (int64_t c = 0; c < width; c++) {
        double sum = 0;
        for (int64_t t = 0; t < threads; t++) sum += partial[t * padded + c];
        dscale[c] = T(sum);
    }
    std::free(partial);
}

#define DEFINE(TYPE)                                                                                                       \
    extern "C" void forward_##TYPE(const TYPE *x, const TYPE *scale, TYPE *y, TYPE *inv_std, int64_t count, int64_t width, \
                                   double epsilon, int64_t threads) {                                                      \
        forward<TYPE>(x, scale, y, inv_std, count, width, epsilon, threads);                                               \
    }                                                                                                                      \
    extern "C" void backward_##TYPE(const TYPE *dy, const TYPE *x, const TYPE *scale, const TYPE *inv_std,                 \
                                    const TYPE *added, TYPE *dx, TYPE *dscale, int64_t count, int64_t width,               \
                                    int64_t threads) {                                                                     \
        backward<TYPE>(dy, x, scale, inv_std, added, dx, dscale, count, width, threads);                                   \
    }

DEFINE(float)
DEFINE(double)
