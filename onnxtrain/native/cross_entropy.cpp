// Cross entropy of rows of scores [n, c] with class indices. Forward and backward read each row from memory once.
//
//     peak = max x      log_sum = log sum exp(x - peak)      loss = weight * (log_sum + peak - x[label])
//     dx = cotangent * (exp(x - peak - log_sum) - (class == label))

// The result may ignore a NaN among the scores: `log_sum` is NaN then.
template <class T> static T largest(const T *x, int64_t count) {
    const int64_t vectors_end = count / LANES<T> * LANES<T>;
    Vec<T> maxima = Vec<T>{} - std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < vectors_end; i += LANES<T>) {
        const Vec<T> v = load<T>(x + i);
        maxima = v > maxima ? v : maxima;
    }
    T result = maximum_of<T>(maxima);
    for (int64_t i = vectors_end; i < count; i++) result = x[i] > result ? x[i] : result;
    return result;
}

template <class T> static T sum_of_powers(const T *x, int64_t count, T peak) {
    const int64_t vectors_end = count / LANES<T> * LANES<T>;
    Vec<T> sum[2] = {};  // two independent chains of additions
    int64_t i = 0;
    for (; i + LANES<T> < vectors_end; i += 2 * LANES<T>) {
        sum[0] += exponential<T>(load<T>(x + i) - peak);
        sum[1] += exponential<T>(load<T>(x + i + LANES<T>) - peak);
    }
    if (i < vectors_end) sum[0] += exponential<T>(load<T>(x + i) - peak);
    if (vectors_end < count) sum[1] += exponential<T>(load_first<T>(x + vectors_end, count - vectors_end, -std::numeric_limits<T>::infinity()) - peak);
    return sum_of<T>(sum[0] + sum[1]);
}

template <class T>
static void forward(const T *x, const int64_t *labels, const T *weights, int64_t ignored, T *loss, T *weight, T *peak,
                    T *log_sum, int64_t *invalid_label, int64_t rows, int64_t classes, int64_t threads) {
    std::atomic<int64_t> found_invalid{0};
    parallel_for(rows * classes < 32768 ? 1 : threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *row = x + r * classes;
            const int64_t label = labels[r];
            peak[r] = largest(row, classes);
            log_sum[r] = logarithm(sum_of_powers(row, classes, peak[r]));
            loss[r] = weight[r] = 0;
            if (label == ignored) continue;
            if (label < 0 || label >= classes) { found_invalid = 1; continue; }
            weight[r] = weights ? weights[label] : T(1);
            loss[r] = weight[r] * (log_sum[r] - (row[label] - peak[r]));
        }
    });
    *invalid_label = found_invalid;
}

// `cotangents`[n]: the cotangent of each row's loss times the row's weight; 0 for ignored rows.
template <class T>
static void backward(const T *x, const int64_t *labels, const T *cotangents, const T *peak, const T *log_sum,
                     int64_t ignored, T *dx, int64_t rows, int64_t classes, int64_t threads) {
    parallel_for(rows * classes < 32768 ? 1 : threads, rows, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T *row = x + r * classes;
            T *out = dx + r * classes;
            if (labels[r] == ignored) {
                std::memset(out, 0, size_t(classes) * sizeof(T));
                continue;
            }
            const T row_peak = peak[r], row_log_sum = log_sum[r], factor = cotangents[r];
            const int64_t vectors_end = classes / LANES<T> * LANES<T>;
            for (int64_t i = 0; i < vectors_end; i += LANES<T>)
                store<T>(out + i, exponential<T>(load<T>(row + i) - row_peak - row_log_sum) * factor);
            if (vectors_end < classes) {
                const Vec<T> v = load_first<T>(row + vectors_end, classes - vectors_end, row_peak);
                store_first<T>(out + vectors_end, classes - vectors_end, exponential<T>(v - row_peak - row_log_sum) * factor);
            }
            out[labels[r]] -= factor;
        }
    });
}

#define FORWARD(NAME, T)                                                                                               \
    extern "C" void NAME(const T *x, const int64_t *labels, const T *weights, int64_t ignored, T *loss, T *weight,     \
                         T *peak, T *log_sum, int64_t *invalid_label, int64_t rows, int64_t classes, int64_t threads) {        \
        forward<T>(x, labels, weights, ignored, loss, weight, peak, log_sum, invalid_label, rows, classes, threads);           \
    }
#define BACKWARD(NAME, T)                                                                                              \
    extern "C" void NAME(const T *x, const int64_t *labels, const T *cotangents, const T *peak, const T *log_sum,      \
                         int64_t ignored, T *dx, int64_t rows, int64_t classes, int64_t threads) {                     \
        backward<T>(x, labels, cotangents, peak, log_sum, ignored, dx, rows, classes, threads);                        \
    }

FORWARD(forward_float, float)
FORWARD(forward_double, double)
BACKWARD(backward_float, float)
BACKWARD(backward_double, double)
