// Batch norm of rows x[m, c], as of images in channels_last memory format, with an optional residual and Relu. Sums of few
// rows are accumulated in float, and these sums in double.

typedef Vec<float> vec;
typedef double wide __attribute__((vector_size(2 * VECTOR_BYTES)));
constexpr int64_t BLOCK = 8;     // rows that are accumulated in float
constexpr int64_t SAMPLED = 128;  // rows for the estimate of a mean, whose error is then a tenth of the deviation

static inline void add_to(double *total, vec v) {
    wide sum;
    std::memcpy(&sum, total, sizeof sum);
    sum += __builtin_convertvector(v, wide);
    std::memcpy(total, &sum, sizeof sum);
}

// A mean as a multiple of about a thousandth of `scale`, of the size of most x (a power of 2): x - centre is then exact for
// these x. With more bits it would be rounded to the last bit of x, in the same direction for all x of one exponent: an error
// that sums over x - centre, and later means over the result, keep.
static inline float coarse(double mean, double scale) {
    const double large = 3 * double(int64_t(1) << 41) * scale;  // its last bit is that power of 2
    return float((mean + large) - large);
}

// Distributes the rows among the threads in the same way in every pass: a thread finds its rows in its cache.
struct Rows {
    int64_t count, channels, threads, part, padded;

    Rows(int64_t count, int64_t channels, int64_t threads)
        : count(count), channels(channels), threads(count * channels < 32768 ? 1 : threads),
          part((count + this->threads - 1) / this->threads), padded(::padded<float>(channels)) {}

    // f(thread, first row, row after the last)
    template <class F> void for_threads(const F &f) const {
        parallel_for(threads, threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) f(t, std::min(t * part, count), std::min((t + 1) * part, count));
        });
    }

    // term(offset, channel, n, sums) adds the contribution of n elements to two vectors of sums.
    template <class Term> void sums(double *totals, const Term &term) const {
        double *partial = static_cast<double *>(std::calloc(size_t(threads * 2 * padded), sizeof(double)));
        for_threads([&](int64_t t, int64_t first, int64_t last) {
            double *thread_sums = partial + t * 2 * padded;
            for (int64_t row = first; row < last; row += BLOCK) {
                const int64_t end = std::min(row + BLOCK, last);
                each_vector<float>(0, channels, [&](int64_t c, auto n) {
                    vec block_sums[2] = {vec{}, vec{}};
                    for (int64_t r = row; r < end; r++) term(r * channels + c, c, n, block_sums);
                    add_to(thread_sums + c, block_sums[0]);
                    add_to(thread_sums + padded + c, block_sums[1]);
                });
            }
        });
        for (int64_t i = 0; i < 2 * padded; i++) {
            totals[i] = 0;
            for (int64_t t = 0; t < threads; t++) totals[i] += partial[t * 2 * padded + i];
        }
        std::free(partial);
    }

    // An estimate of the mean from rows spread over all of them: at multiples of the golden ratio, which follow no pattern
    // of the data.
    void estimate_mean(const float *x, float *centre) const {
        double *total = static_cast<double *>(std::calloc(size_t(2 * padded), sizeof(double)));
        for (int64_t i = 0; i < SAMPLED; i++) {
            const double position = double(i) * 0.6180339887498949;
            const int64_t row = int64_t((position - double(int64_t(position))) * double(count));
            each_vector<float>(0, channels, [&](int64_t c, auto n) {
                const vec v = load_first<float>(x + row * channels + c, n);
                add_to(total + c, v);
                add_to(total + padded + c, v * v);
            });
        }
        for (int64_t c = 0; c < channels; c++) centre[c] = coarse(total[c] / SAMPLED, square_root(total[padded + c] / SAMPLED));
        std::free(total);
    }

    // The sums of x - centre and of its squares.
    void moments(const float *x, const float *centre, double *totals) const {
        sums(totals, [=](int64_t o, int64_t c, auto n, vec *s) {
            const vec d = load_first<float>(x + o, n) - load<float>(centre + c);
            s[0] += d;
            s[1] += d * d;
        });
    }

    // mean[c] and var[c] of m rows in one pass instead of two, with an estimate of the mean from some of the rows. If the
    // estimate is so far off that squares around it lose precision, a second pass uses the mean of the first.
    void statistics(const float *x, double *mean, double *var) const {
        double *totals = static_cast<double *>(std::calloc(size_t(2 * padded), sizeof(double)));
        float *centre = static_cast<float *>(std::calloc(size_t(padded), sizeof(float)));
        bool needs_second_pass = count < 8 * SAMPLED;
        if (needs_second_pass) moments(x, centre, totals);
        else estimate_mean(x, centre);
        for (int pass = needs_second_pass; pass < 2; pass++) {
            if (pass == 1) {
                for (int64_t c = 0; c < channels; c++) {
                    const double squares = totals[padded + c] / double(count);
                    centre[c] = coarse(centre[c] + totals[c] / double(count), square_root(squares));
                }
            }
            moments(x, centre, totals);
            needs_second_pass = false;
            for (int64_t c = 0; c < channels; c++) {
                const double off = totals[c] / double(count);  // the error of the centre
                mean[c] = centre[c] + off;
                var[c] = std::max(totals[padded + c] / double(count) - off * off, 0.0);
                needs_second_pass |= !(off * off <= 0.25 * var[c]);
            }
            if (!needs_second_pass) break;
        }
        std::free(centre);
        std::free(totals);
    }

    // Writes value(offset, channel, n), n elements, everywhere.
    template <class Value> void each(float *y, const Value &value) const {
        for_threads([&](int64_t, int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) {
                const int64_t at = row * channels;
                each_vector<float>(0, channels, [=](int64_t c, auto n) { store_first<float>(y + at + c, n, value(at + c, c, n)); });
            }
        });
    }
};

// f(flags...) with each flag as a compile-time constant, which removes the branches from the loops in f.
template <class F> static inline void with_flags(const F &f) { f(); }
template <class F, class... Flags> static inline void with_flags(const F &f, bool flag, Flags... flags) {
    if (flag) with_flags([&](auto... others) { f(std::true_type(), others...); }, flags...);
    else with_flags([&](auto... others) { f(std::false_type(), others...); }, flags...);
}

extern "C" {

// y = (x - mean) * inv_std * scale + b + residual; with `relu`, max(y, 0). Also writes mean and inv_std of the rows, and the
// running statistics updated by `momentum` with mean and the unbiased var. scale, b and residual may be null; so may the
// running statistics, with their updated values.
void forward(const float *x, const float *scale, const float *b, const float *residual, const float *running_mean,
             const float *running_var, float *y, float *new_mean, float *new_var, float *mean, float *inv_std,
             int64_t count, int64_t channels, double momentum, double epsilon, int64_t relu, int64_t threads) {
    const Rows rows(count, channels, threads);
    const int64_t padded = rows.padded;
    double *means = static_cast<double *>(std::calloc(size_t(2 * padded), sizeof(double))), *variances = means + padded;
    float *centre = static_cast<float *>(std::calloc(size_t(3 * padded), sizeof(float)));
    float *factor = centre + padded, *shift = factor + padded;
    rows.statistics(x, means, variances);
    for (int64_t c = 0; c < channels; c++) {
        const double v = variances[c], inverse = 1 / square_root(v + epsilon);
        mean[c] = float(means[c]);
        inv_std[c] = float(inverse);
        centre[c] = coarse(means[c], 1 / inverse);
        factor[c] = scale ? float(inverse * scale[c]) : float(inverse);
        // Adds what rounding the mean removed: a later mean over y would keep the error in full.
        shift[c] = float((b ? b[c] : 0.0) - (means[c] - centre[c]) * factor[c]);
        if (new_mean) {
            const double unbiased = v * double(count) / double(count - 1);  // inf or NaN for a single row, as in PyTorch
            new_mean[c] = float(running_mean[c] + momentum * (means[c] - running_mean[c]));
            new_var[c] = float((1 - momentum) * running_var[c] + momentum * unbiased);
        }
    }
    const auto write = [&](auto adds, auto cuts) {
        rows.each(y, [=](int64_t o, int64_t c, auto n) {
            vec v = (load_first<float>(x + o, n) - load<float>(centre + c)) * load<float>(factor + c) + load<float>(shift + c);
            if constexpr (adds) v += load_first<float>(residual + o, n);
            if constexpr (cuts) v = v < 0 ? vec{} : v;
            return v;
        });
    };
    with_flags(write, residual != nullptr, relu != 0);
    std::free(centre);
    std::free(means);
}

// dscale = sum(g * z), db = sum(g), dx = scale * inv_std * (g - (db + z * dscale) / m) with z = (x - mean) * inv_std;
// without `of_rows`, when mean and inv_std are not those of the rows, dx = scale * inv_std * g. g is dy + added, and 0 where
// y, if given, is <= 0; g is written to dresidual if that is given. scale, y, added, dx and dresidual may be null.
void backward(const float *dy, const float *x, const float *scale, const float *mean, const float *inv_std, const float *y,
              const float *added, float *dx, float *dscale, float *db, float *dresidual, int64_t count, int64_t channels,
              int64_t of_rows, int64_t threads) {
    const Rows rows(count, channels, threads);
    const int64_t padded = rows.padded;
    double *totals = static_cast<double *>(std::calloc(size_t(2 * padded), sizeof(double)));
    float *centre = static_cast<float *>(std::calloc(size_t(4 * padded), sizeof(float)));
    float *factor = centre + padded, *slope = factor + padded, *shift = slope + padded;
    std::copy(mean, mean + channels, centre);
    float *const stored_g = dresidual ? dresidual : added ? dx : nullptr;  // g, if reading it is cheaper than recomputing it
    const auto add = [&](auto sums, auto masks, auto writes) {
        rows.sums(totals, [=](int64_t o, int64_t c, auto n, vec *s) {
            vec g = load_first<float>(dy + o, n);
            if constexpr (sums) g += load_first<float>(added + o, n);
            if constexpr (masks) g = load_first<float>(y + o, n) <= 0 ? vec{} : g;
            if constexpr (writes) store_first<float>(stored_g + o, n, g);
            s[0] += g;
            s[1] += g * (load_first<float>(x + o, n) - load<float>(centre + c));
        });
    };
    with_flags(add, added != nullptr, y != nullptr, stored_g != nullptr);
    for (int64_t c = 0; c < channels; c++) {
        const double inverse = inv_std[c], f = scale ? inverse * scale[c] : inverse;
        const double ds = totals[padded + c] * inverse;
        db[c] = float(totals[c]);
        dscale[c] = float(ds);
        factor[c] = float(f);
        slope[c] = of_rows ? float(inverse * ds / double(count)) : 0.0f;
        shift[c] = of_rows ? float(-totals[c] * f / double(count)) : 0.0f;
    }
    const float *const source = stored_g ? stored_g : dy;
    const auto write = [&](auto masks) {
        rows.each(dx, [=](int64_t o, int64_t c, auto n) {
            vec g = load_first<float>(source + o, n);
            if constexpr (masks) g = load_first<float>(y + o, n) <= 0 ? vec{} : g;
            // x is centered first: the rounding error of a channel's constant would accumulate in the sums over dx of
            // earlier layers.
            const vec d = load_first<float>(x + o, n) - load<float>(centre + c);
            return (g - d * load<float>(slope + c)) * load<float>(factor + c) + load<float>(shift + c);
        });
    };
    if (dx) with_flags(write, y && !stored_g);
    std::free(centre);
    std::free(totals);
}

}
