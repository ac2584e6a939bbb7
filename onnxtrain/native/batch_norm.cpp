// Batch norm of rows x[m, c], as pictures that lie channels-last are. Sums of few rows are float, their sums double.

typedef Vec<float> vec;
typedef double wide __attribute__((vector_size(2 * VECTOR_BYTES)));
constexpr int64_t BLOCK = 16;  // rows that are added in float

static inline void add_to(double *total, vec v) {
    wide sum;
    std::memcpy(&sum, total, sizeof sum);
    sum += __builtin_convertvector(v, wide);
    std::memcpy(total, &sum, sizeof sum);
}

// What all rows are dealt to the threads by, in every pass alike: a thread finds its rows in its cache again.
struct Rows {
    int64_t count, channels, threads, part, padded;

    Rows(int64_t count, int64_t channels, int64_t threads)
        : count(count), channels(channels), threads(count * channels < 32768 ? 1 : threads),
          part((count + this->threads - 1) / this->threads), padded(::padded<float>(channels)) {}

    // f(thread, first row, row after the last)
    template <class F> void deal(const F &f) const {
        parallel_for(threads, threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) f(t, std::min(t * part, count), std::min((t + 1) * part, count));
        });
    }

    // term(offset, channel, n, sums): adds what the n elements there give to two vectors of sums.
    template <class Term> void sums(double *totals, const Term &term) const {
        double *partial = static_cast<double *>(std::calloc(size_t(threads * 2 * padded), sizeof(double)));
        deal([&](int64_t t, int64_t first, int64_t last) {
            double *own = partial + t * 2 * padded;
            for (int64_t row = first; row < last; row += BLOCK) {
                const int64_t end = std::min(row + BLOCK, last);
                each_vector<float>(0, channels, [&](int64_t c, auto n) {
                    vec found[2] = {vec{}, vec{}};
                    for (int64_t r = row; r < end; r++) term(r * channels + c, c, n, found);
                    add_to(own + c, found[0]);
                    add_to(own + padded + c, found[1]);
                });
            }
        });
        for (int64_t i = 0; i < 2 * padded; i++) {
            totals[i] = 0;
            for (int64_t t = 0; t < threads; t++) totals[i] += partial[t * 2 * padded + i];
        }
        std::free(partial);
    }

    // value(offset, channel, n): the n elements that are written there.
    template <class Value> void each(float *y, const Value &value) const {
        deal([&](int64_t, int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) {
                const int64_t at = row * channels;
                each_vector<float>(0, channels, [=](int64_t c, auto n) { store_first<float>(y + at + c, n, value(at + c, c, n)); });
            }
        });
    }
};

extern "C" {

// y = (x - mean) * inv_std * scale + b; gives mean, var (of m, not m - 1) and inv_std. scale and b may be null.
void forward(const float *x, const float *scale, const float *b, float *y, float *mean, float *var, float *inv_std,
             int64_t count, int64_t channels, double epsilon, int64_t threads) {
    const Rows rows(count, channels, threads);
    const int64_t padded = rows.padded;
    double *totals = static_cast<double *>(std::calloc(size_t(2 * padded), sizeof(double)));
    float *centre = static_cast<float *>(std::calloc(size_t(3 * padded), sizeof(float)));
    float *factor = centre + padded, *shift = factor + padded;
    rows.sums(totals, [=](int64_t o, int64_t, auto n, vec *s) { s[0] += load_first<float>(x + o, n); });
    for (int64_t c = 0; c < channels; c++) mean[c] = centre[c] = float(totals[c] / double(count));
    rows.sums(totals, [=](int64_t o, int64_t c, auto n, vec *s) {
        const vec d = load_first<float>(x + o, n) - load<float>(centre + c);
        s[0] += d;
        s[1] += d * d;
    });
    for (int64_t c = 0; c < channels; c++) {
        const double off = totals[c] / double(count);  // what rounding the mean to float left
        const double v = std::max(totals[padded + c] / double(count) - off * off, 0.0), inverse = 1 / square_root(v + epsilon);
        var[c] = float(v);
        inv_std[c] = float(inverse);
        factor[c] = scale ? float(inverse * scale[c]) : float(inverse);
        shift[c] = b ? b[c] : 0.0f;
    }
    rows.each(y, [=](int64_t o, int64_t c, auto n) {
        return (load_first<float>(x + o, n) - load<float>(centre + c)) * load<float>(factor + c) + load<float>(shift + c);
    });
    std::free(centre);
    std::free(totals);
}

// dscale = sum(dy * z), db = sum(dy), dx = scale * inv_std * (dy - (db + z * dscale) / m) with z = (x - mean) * inv_std;
// where mean and inv_std are not those of the rows, dx = scale * inv_std * dy. dx and scale may be null.
void backward(const float *dy, const float *x, const float *scale, const float *mean, const float *inv_std, float *dx,
              float *dscale, float *db, int64_t count, int64_t channels, int64_t of_rows, int64_t threads) {
    const Rows rows(count, channels, threads);
    const int64_t padded = rows.padded;
    double *totals = static_cast<double *>(std::calloc(size_t(2 * padded), sizeof(double)));
    float *centre = static_cast<float *>(std::calloc(size_t(4 * padded), sizeof(float)));
    float *factor = centre + padded, *slope = factor + padded, *shift = slope + padded;
    std::copy(mean, mean + channels, centre);
    rows.sums(totals, [=](int64_t o, int64_t c, auto n, vec *s) {
        const vec g = load_first<float>(dy + o, n);
        s[0] += g;
        s[1] += g * (load_first<float>(x + o, n) - load<float>(centre + c));
    });
    for (int64_t c = 0; c < channels; c++) {
        const double inverse = inv_std[c], f = scale ? inverse * scale[c] : inverse;
        const double ds = totals[padded + c] * inverse;
        db[c] = float(totals[c]);
        dscale[c] = float(ds);
        factor[c] = float(f);
        slope[c] = of_rows ? float(inverse * ds / double(count)) : 0.0f;
        shift[c] = of_rows ? float(-totals[c] * f / double(count)) : 0.0f;
    }
    if (dx)
        rows.each(dx, [=](int64_t o, int64_t c, auto n) {
            // x is centred first: a rounded constant of a channel would add up in the sums of dx further back.
            const vec d = load_first<float>(x + o, n) - load<float>(centre + c);
            return (load_first<float>(dy + o, n) - d * load<float>(slope + c)) * load<float>(factor + c) + load<float>(shift + c);
        });
    std::free(centre);
    std::free(totals);
}

}
