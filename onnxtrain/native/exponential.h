// The exponential function of vectors, with the minimax polynomial for float and the Taylor series for double; the
// logarithm, and the sigmoid.

template <class T> struct Powers;
template <> struct Powers<float> {
    typedef float T;
    static constexpr int mantissa = 23;
    static constexpr int32_t one = 127 << 23;  // the bits of 1.0
    static constexpr float rounder = 12582912.0f, least = -87.33654f, log2e = 1.44269504088896341f;
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    static inline Vec<T> small(Vec<T> r) {  // e^r for |r| <= ln 2 / 2, with a relative error of 3.1e-9
        Vec<T> p = r * 1.3814539416e-3f + 8.3687454462e-3f;
        p = p * r + 4.1668388993e-2f;
        p = p * r + 1.6666521132e-1f;
        p = p * r + 4.9999994040e-1f;
        p = p * r + 1.0f;
        return p * r + 1.0f;
    }
};
template <> struct Powers<double> {
    typedef double T;
    static constexpr int mantissa = 52;
    static constexpr int64_t one = int64_t(1023) << 52;
    static constexpr double rounder = 6755399441055744.0, least = -708.39, log2e = 1.4426950408889634074;
    static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
    static inline Vec<T> small(Vec<T> r) {
        Vec<T> p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
        p = p * r + 1.0 / 39916800.0;
        p = p * r + 1.0 / 3628800.0;
        p = p * r + 1.0 / 362880.0;
        p = p * r + 1.0 / 40320.0;
        p = p * r + 1.0 / 5040.0;
        p = p * r + 1.0 / 720.0;
        p = p * r + 1.0 / 120.0;
        p = p * r + 1.0 / 24.0;
        p = p * r + 1.0 / 6.0;
        p = p * r + 0.5;
        return p * r * r + r + 1.0;
    }
};

// e^x for x <= 0; 0 where the result would be subnormal, NaN for NaN.
template <class T> static inline Vec<T> exponential(Vec<T> x) {
    typedef Powers<T> L;
    const Vec<T> shifted = x * L::log2e + L::rounder, n = shifted - L::rounder;
    const Vec<T> r = (x - n * L::ln2_high) - n * L::ln2_low;
    typename Lanes<T>::ivec bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << L::mantissa) + L::one;
    Vec<T> power;
    std::memcpy(&power, &bits, sizeof power);
    return x < L::least ? Vec<T>{} : L::small(r) * power;
}

// ln x for x >= 1. The bits of x, read as an integer, interpolate log2 linearly between powers of 2; two of Halley's
// iterations refine that.
template <class T> static inline Vec<T> logarithm_above_one(Vec<T> x) {
    typedef Powers<T> L;
    typename Lanes<T>::ivec bits;
    std::memcpy(&bits, &x, sizeof bits);
    Vec<T> y = __builtin_convertvector(bits - L::one, Vec<T>) * (1 / L::log2e / T(int64_t(1) << L::mantissa));
    for (int step = 0; step < 2; step++) {
        const Vec<T> near = x * exponential<T>(-y);
        y += 2 * (near - 1) / (near + 1);
    }
    return y;
}

// The sigmoid and its derivative, from e^-|x|, which does not overflow for either sign.
template <class T> struct Sigmoid {
    Vec<T> value, slope;
    explicit Sigmoid(Vec<T> x) {
        const Vec<T> e = exponential<T>(x < T(0) ? x : -x), one = 1 / (1 + e);
        value = x < T(0) ? e * one : one;
        slope = e * one * one;
    }
};
