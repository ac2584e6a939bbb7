// The recurrence of an LSTM: all that a step computes from the previous step. Hochreiter and Schmidhuber 1997,
// https://doi.org/10.1162/neco.1997.9.8.1735. PyTorch computes the GEMMs over all steps, before and after.
//
//     i, f, o = sigmoid(x + r @ h)    g = tanh(x + r @ h)    c' = f * c + i * g    h' = o * tanh(c')
//
// s steps, b samples, h hidden units; gates i, f, g, o. A thread computes the same units in all steps, so it reads only
// their part of r, which stays in its cache, packed for sequential access. The threads synchronize after each step.

constexpr int GATES = 4;

// tanh near 0, where 1 - e^-2x would lose precision: Cephes' tanhf and tanh.
static inline Vec<float> small_tanh(Vec<float> x) {
    const Vec<float> z = x * x;
    Vec<float> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return p * z * x + x;
}
static inline Vec<double> small_tanh(Vec<double> x) {
    const Vec<double> z = x * x;
    Vec<double> p = z * -9.64399179425052238628e-1 - 9.92877231001918586564e1;
    p = p * z - 1.61468768441708447952e3;
    Vec<double> q = z + 1.12811678491632931402e2;
    q = q * z + 2.23548839060100448583e3;
    q = q * z + 4.84406305325125486048e3;
    return p / q * z * x + x;
}
template <class T> static inline Vec<T> tanh_of(Vec<T> x) {
    const Vec<T> size = x < T(0) ? -x : x, e = exponential<T>(-2 * size), large = (1 - e) / (1 + e);
    return size < T(0.625) ? small_tanh(x) : (x < T(0) ? -large : large);
}

struct Sizes {
    int64_t steps, samples, hidden;
    bool reverse;
    int64_t at(int64_t step) const { return reverse ? steps - 1 - step : step; }  // in the order of the direction
};

// A barrier for all threads of a team.
class Barrier {
    std::atomic<int64_t> arrived_{0}, round_{0};

  public:
    void wait(int64_t team) {
        const int64_t round = round_.load();
        if (arrived_.fetch_add(1) == team - 1) {
            arrived_.store(0);
            round_.store(round + 1);
        } else
            for (int64_t tries = 0; round_.load() == round; tries++)
                if (tries > 2000) sched_yield();  // another thread may not be running
    }
};

// Forward of M samples and LANES units: gates hold W x + biases and are overwritten with the activated gates.
template <class T, int M>
static void units_forward(const Sizes &z, const T *previous_h, const T *packed, int64_t unit, T *gates, const T *cell, T *state, T *y) {
    const int64_t h = z.hidden;
    Vec<T> sums[M][GATES] = {};
    add_matmul(h, previous_h, h, 1, packed, GATES * LANES<T>, sums);
    each_vector<T>(unit, std::min(unit + LANES<T>, h), [&](int64_t, auto n) {
        for (int r = 0; r < M; r++) {
            T *unit_gates = gates + r * GATES * h + unit;
            Vec<T> gate[GATES];
            for (int q = 0; q < GATES; q++) gate[q] = load_first<T>(unit_gates + q * h, n) + sums[r][q];
            for (const int q : {0, 1, 3}) gate[q] = Sigmoid<T>(gate[q]).value;
            gate[2] = tanh_of<T>(gate[2]);
            for (int q = 0; q < GATES; q++) store_first<T>(unit_gates + q * h, n, gate[q]);
            const Vec<T> c = gate[1] * load_first<T>(cell + r * h + unit, n) + gate[0] * gate[2];
            store_first<T>(state + r * h + unit, n, c);
            store_first<T>(y + r * h + unit, n, gate[3] * tanh_of<T>(c));
        }
    });
}

// r[4 h, h]; gates[s, b, 4 h] hold W x + biases; initial[b, h] and cell[b, h] are the initial states.
template <class T>
static void forward(const Sizes &z, const T *r, T *gates, const T *initial, const T *cell, T *states, T *y, int64_t threads) {
    const int64_t h = z.hidden, blocks = (h + LANES<T> - 1) / LANES<T>, state_size = z.samples * h, panel = h * GATES * LANES<T>;
    Barrier barrier;
    parallel_team(std::min(threads, blocks), [&](int64_t thread, int64_t team) {
        const int64_t begin = blocks * thread / team, end = blocks * (thread + 1) / team;
        T *packed = scratch<T>((end - begin) * panel);  // [block, h, gate, unit]
        for (int64_t block = begin; block < end; block++)
            for (int64_t q = 0; q < GATES; q++)
                for (int64_t u = 0; u < LANES<T>; u++) {
                    const int64_t unit = block * LANES<T> + u;
                    T *to = packed + (block - begin) * panel + q * LANES<T> + u;
                    for (int64_t k = 0; k < h; k++) to[k * GATES * LANES<T>] = unit < h ? r[(q * h + unit) * h + k] : T(0);
                }
        for (int64_t step = 0; step < z.steps; step++) {
            const int64_t t = z.at(step);
            const T *previous_h = step ? y + z.at(step - 1) * state_size : initial, *previous_c = step ? states + z.at(step - 1) * state_size : cell;
            for (int64_t block = begin; block < end; block++) {
                const T *block_panel = packed + (block - begin) * panel;
                const auto run = [&](int64_t b, auto rows) {
                    units_forward<T, decltype(rows)::value>(z, previous_h + b * h, block_panel, block * LANES<T>, gates + (t * z.samples + b) * GATES * h,
                                                            previous_c + b * h, states + t * state_size + b * h, y + t * state_size + b * h);
                };
                int64_t b = 0;
                for (; b + 4 <= z.samples; b += 4) run(b, std::integral_constant<int, 4>());
                for (; b < z.samples; b++) run(b, std::integral_constant<int, 1>());
            }
            barrier.wait(team);
        }
        std::free(packed);
    });
}

// The gradients of a step's gates of the units [begin, end); dc becomes that of the previous cell state.
template <class T>
static void gates_backward(const Sizes &z, int64_t begin, int64_t end, const T *gates, const T *state, const T *previous_c, const T *dy, const T *dh, T *dc, T *dgates) {
    const int64_t h = z.hidden;
    for (int64_t b = 0; b < z.samples; b++)
        each_vector<T>(begin, end, [&](int64_t unit, auto n) {
            const int64_t at = b * h + unit;
            const T *unit_gates = gates + b * GATES * h + unit;
            T *to = dgates + b * GATES * h + unit;
            const Vec<T> i = load_first<T>(unit_gates, n), f = load_first<T>(unit_gates + h, n), g = load_first<T>(unit_gates + 2 * h, n),
                         o = load_first<T>(unit_gates + 3 * h, n), tanh_c = tanh_of<T>(load_first<T>(state + at, n));
            const Vec<T> total_dh = load_first<T>(dy + at, n) + load_first<T>(dh + at, n);
            const Vec<T> d = load_first<T>(dc + at, n) + total_dh * o * (1 - tanh_c * tanh_c);
            store_first<T>(to, n, d * g * i * (1 - i));
            store_first<T>(to + h, n, d * load_first<T>(previous_c + at, n) * f * (1 - f));
            store_first<T>(to + 2 * h, n, d * i * (1 - g * g));
            store_first<T>(to + 3 * h, n, total_dh * tanh_c * o * (1 - o));
            store_first<T>(dc + at, n, d * f);
        });
}

// dh[M, N * LANES units] = dgates[M, 4 h] @ r.
template <class T, int M, int N>
static void states_backward(const Sizes &z, const T *dgates, const T *packed, int64_t unit, T *dh) {
    Vec<T> sums[M][N] = {};
    add_matmul(GATES * z.hidden, dgates, GATES * z.hidden, 1, packed, N * LANES<T>, sums);
    for (int r = 0; r < M; r++)
        each_vector<T>(unit, std::min(unit + N * LANES<T>, z.hidden), [&](int64_t at, auto n) {
            store_first<T>(dh + r * z.hidden + at, n, sums[r][(at - unit) / LANES<T>]);
        });
}

// dgates[s, b, 4 h]: the gradients of the gates. dh[b, h] and dc[b, h] are those of the last states and become those of
// the initial states.
template <class T>
static void backward(const Sizes &z, const T *r, const T *gates, const T *states, const T *cell, const T *dy, T *dh, T *dc, T *dgates, int64_t threads) {
    constexpr int N = 2, M = 8;
    const int64_t h = z.hidden, width = N * LANES<T>, blocks = (h + width - 1) / width, state_size = z.samples * h, panel = GATES * h * width;
    Barrier barrier;
    parallel_team(std::min(threads, blocks), [&](int64_t thread, int64_t team) {
        const int64_t begin = blocks * thread / team, end = blocks * (thread + 1) / team;
        T *packed = scratch<T>((end - begin) * panel);  // [block, 4 h, unit]
        for (int64_t block = begin; block < end; block++)
            for (int64_t k = 0; k < GATES * h; k++)
                for (int64_t u = 0; u < width; u++) {
                    const int64_t unit = block * width + u;
                    packed[(block - begin) * panel + k * width + u] = unit < h ? r[k * h + unit] : T(0);
                }
        for (int64_t step = z.steps - 1; step >= 0; step--) {
            const int64_t t = z.at(step);
            T *step_dgates = dgates + t * z.samples * GATES * h;
            gates_backward<T>(z, begin * width, std::min(end * width, h), gates + t * z.samples * GATES * h, states + t * state_size,
                              step ? states + z.at(step - 1) * state_size : cell, dy + t * state_size, dh, dc, step_dgates);
            barrier.wait(team);
            for (int64_t block = begin; block < end; block++) {
                const T *part = packed + (block - begin) * panel;
                int64_t b = 0;
                for (; b + M <= z.samples; b += M) states_backward<T, M, N>(z, step_dgates + b * GATES * h, part, block * width, dh + b * h);
                for (; b < z.samples; b++) states_backward<T, 1, N>(z, step_dgates + b * GATES * h, part, block * width, dh + b * h);
            }
        }
        std::free(packed);
    });
}

#define DEFINE(TYPE)                                                                                                                  \
    extern "C" void forward_##TYPE(const TYPE *r, TYPE *gates, const TYPE *initial, const TYPE *cell, TYPE *states, TYPE *y,            \
                                   int64_t steps, int64_t samples, int64_t hidden, int64_t reverse, int64_t threads) {                \
        forward<TYPE>({steps, samples, hidden, reverse != 0}, r, gates, initial, cell, states, y, threads);                             \
    }                                                                                                                                 \
    extern "C" void backward_##TYPE(const TYPE *r, const TYPE *gates, const TYPE *states, const TYPE *cell, const TYPE *dy, TYPE *dh, \
                                    TYPE *dc, TYPE *dgates, int64_t steps, int64_t samples, int64_t hidden, int64_t reverse,           \
                                    int64_t threads) {                                                                                \
        backward<TYPE>({steps, samples, hidden, reverse != 0}, r, gates, states, cell, dy, dh, dc, dgates, threads);                   \
    }

DEFINE(float)
DEFINE(double)
