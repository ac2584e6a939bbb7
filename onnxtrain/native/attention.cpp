// Attention of one head at a time, scores in a block of rows that stays in the cache; Dao 2023,
// https://arxiv.org/abs/2307.08691, with whole rows instead of the running maximum.
//
//     s = scale * q @ k^T + added, `fill` where hidden      p = softmax(s)      y = drop(p) @ v
//     dv = drop(p)^T @ dy      dp = drop(dy @ v^T)      ds = p * (dp - p . dp)      dq = scale * ds @ k      dk = scale * ds^T @ q
//
// Backward computes p again from q and k. The last axis of q, k, v, y and their gradients is dense; all other strides
// are free. Sequences of one length lie in a batch; those of several lengths one after another, with offsets.

constexpr int BLOCK = 32;       // rows of q that are worked on together
constexpr double HIDES = -1e30;  // what is added to a score, or put in its place, to hide it: this or less

// Products: c[m, n] (+)= a[m, k] @ b[k, n]. n is a multiple of the lanes; element [i, l] of a lies at i * am + l * ak.

template <class T, int M, int N, bool ADD>
static inline void tile(int64_t depth, const T *a, int64_t am, int64_t ak, const T *b, int64_t bk, T *c, int64_t cm) {
    Vec<T> sums[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) sums[i][j] = ADD ? load<T>(c + i * cm + j * LANES<T>) : Vec<T>{};
    add_product<T, M, N>(depth, a, am, ak, b, bk, sums);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store<T>(c + i * cm + j * LANES<T>, sums[i][j]);
}

template <class T, int M, bool ADD>
static void row_of_tiles(int64_t n, int64_t k, const T *a, int64_t am, int64_t ak, const T *b, int64_t bk, T *c, int64_t cm) {
    int64_t j = 0;
    for (; j + 2 * LANES<T> <= n; j += 2 * LANES<T>) tile<T, M, 2, ADD>(k, a, am, ak, b + j, bk, c + j, cm);
    for (; j < n; j += LANES<T>) tile<T, M, 1, ADD>(k, a, am, ak, b + j, bk, c + j, cm);
}

template <class T, bool ADD>
static void product(int64_t m, int64_t n, int64_t k, const T *a, int64_t am, int64_t ak, const T *b, int64_t bk, T *c, int64_t cm) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= m; i += TILE_ROWS) row_of_tiles<T, TILE_ROWS, ADD>(n, k, a + i * am, am, ak, b, bk, c + i * cm, cm);
    for (; i + 4 <= m; i += 4) row_of_tiles<T, 4, ADD>(n, k, a + i * am, am, ak, b, bk, c + i * cm, cm);
    for (; i < m; i++) row_of_tiles<T, 1, ADD>(n, k, a + i * am, am, ak, b, bk, c + i * cm, cm);
}

// Tensors. What is read is copied into dense scratch in the type of the sums, rows filled up with zeros.

template <class S, class T> static inline T widened(S x) { return T(x); }

struct bfloat16 { uint16_t bits; };
template <> inline float widened<bfloat16, float>(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
template <class T, class S> static inline void narrowed(T x, S *to) { *to = S(x); }
template <> inline void narrowed<float, bfloat16>(float x, bfloat16 *to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class S, class T>
static void copy_rows(const S *from, int64_t stride, int64_t rows, int64_t width, T factor, T *to, int64_t to_stride) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t d = 0; d < width; d++) to[i * to_stride + d] = widened<S, T>(from[i * stride + d]) * factor;
        for (int64_t d = width; d < to_stride; d++) to[i * to_stride + d] = 0;
    }
}

template <class S, class T>
static void copy_transposed(const S *from, int64_t stride, int64_t rows, int64_t width, T *to, int64_t to_stride) {
    for (int64_t first = 0; first < rows; first += 16)
        for (int64_t d = 0; d < width; d++)
            for (int64_t i = first; i < std::min(first + 16, rows); i++) to[d * to_stride + i] = widened<S, T>(from[i * stride + d]);
    for (int64_t d = 0; d < width; d++)
        for (int64_t i = rows; i < to_stride; i++) to[d * to_stride + i] = 0;
}

template <class T, class S>
static void write_rows(const T *from, int64_t from_stride, int64_t rows, int64_t width, S *to, int64_t stride) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < width; d++) narrowed<T, S>(from[i * from_stride + d], to + i * stride + d);
}

// What all heads share. Strides are in elements: of the batch, head and row, and of the column for masks.
struct Problem {
    int64_t batch, heads, shared, rows, columns, width, width_v, causal, safe, threads;
    int64_t q[3], k[3], v[3], y[3], dy[3], dq[3], dk[3], dv[3], added[4], shown[4];
    const int64_t *row_offsets, *column_offsets;  // null: sequences of one length. else `rows` and `columns` are all
    const int64_t *key;                           // null: nothing is dropped
    int64_t least;                                // draws below are dropped
    double scale, kept_scale, fill;
};

// One head of one sequence.
struct Head {
    int64_t b, h, first_row, rows, first_column, columns, draws, sums;  // the places of its draws and logsumexp
};

static int64_t count_before(const Problem &p, int64_t b) {  // scores of all heads of earlier sequences
    int64_t sum = 0;
    for (int64_t i = 0; i < b; i++)
        sum += (p.row_offsets[i + 1] - p.row_offsets[i]) * (p.column_offsets[i + 1] - p.column_offsets[i]);
    return sum * p.heads;
}

static Head head_of(const Problem &p, int64_t b, int64_t h) {
    if (p.row_offsets == nullptr)
        return {b, h, 0, p.rows, 0, p.columns, (b * p.heads + h) * p.rows * p.columns, (b * p.heads + h) * p.rows};
    const int64_t row = p.row_offsets[b], column = p.column_offsets[b];
    const int64_t rows = p.row_offsets[b + 1] - row, columns = p.column_offsets[b + 1] - column;
    return {0, h, row, rows, column, columns, count_before(p, b) + h * rows * columns, h * p.rows + row};
}

static int64_t most_columns(const Problem &p) {
    if (p.row_offsets == nullptr) return p.columns;
    int64_t most = 0;
    for (int64_t b = 0; b < p.batch; b++) most = std::max(most, p.column_offsets[b + 1] - p.column_offsets[b]);
    return most;
}

template <class S> static inline S *place(S *x, const int64_t *strides, int64_t b, int64_t h, int64_t row) {
    return x == nullptr ? nullptr : x + b * strides[0] + h * strides[1] + row * strides[2];
}

// Runs f(memory, item, state) for all items; a thread that is done takes the next. Memory and state are the thread's.
template <class State, class F> static void for_items(int64_t threads, int64_t items, size_t bytes, const F &f) {
    struct Freed { char *data; ~Freed() { std::free(data); } };
    std::atomic<int64_t> next{0};
    threads = std::min(threads, items);
    parallel_for(threads, threads, [&](int64_t, int64_t) {
        Freed memory{static_cast<char *>(std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096))};
        if (memory.data == nullptr) std::abort();
        State state;
        for (int64_t item; (item = next++) < items;) f(memory.data, item, state);
    });
}

struct Arena {
    char *at;
    template <class T> T *take(int64_t count) {
        T *result = reinterpret_cast<T *>(at);
        at += (count * sizeof(T) + 63) / 64 * 64;
        return result;
    }
};

// Masked scores of rows [first, first + count) in the columns [0, seen), columns behind them filled with -inf.
template <class S, class T>
static void masked_scores(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t seen, const T *q, int64_t width,
                          const T *keys, int64_t stride, const S *added, const uint8_t *shown, T *s) {
    const T nothing = -std::numeric_limits<T>::infinity(), fill = T(p.fill);
    const int64_t n = padded<T>(seen);
    product<T, false>(count, n, p.width, q, width, 1, keys, stride, s, stride);
    for (int64_t r = 0; r < count; r++) {
        T *row = s + r * stride;
        if (added != nullptr) {
            const S *a = place(added, p.added, at.b, at.h, first + r);
            if (p.added[3] == 1) for (int64_t j = 0; j < seen; j++) row[j] += widened<S, T>(a[j]);
            else for (int64_t j = 0; j < seen; j++) row[j] += widened<S, T>(a[j * p.added[3]]);
        }
        if (shown != nullptr) {
            const uint8_t *a = place(shown, p.shown, at.b, at.h, first + r);
            for (int64_t j = 0; j < seen; j++) row[j] = a[j * p.shown[3]] ? row[j] : fill;
        }
        const int64_t end = p.causal ? std::min(seen, first + r + 1) : seen;
        for (int64_t j = end; j < n; j++) row[j] = nothing;
    }
}

// Turns a row of scores into probabilities; gives its logsumexp. Where all are -inf, they and it are 0 if `safe`, else NaN.
template <class T> static T softmax(T *row, int64_t n, bool safe) {
    if (n == 0) return 0;
    Vec<T> top = load<T>(row);
    for (int64_t j = LANES<T>; j < n; j += LANES<T>) {
        const Vec<T> x = load<T>(row + j);
        top = x > top ? x : top;
    }
    T most = most_of<T>(top);
    if (most == -std::numeric_limits<T>::infinity() && safe) most = 0;
    Vec<T> sums = {};
    for (int64_t j = 0; j < n; j += LANES<T>) {
        const Vec<T> e = exponential<T>(load<T>(row + j) - most);
        store<T>(row + j, e);
        sums += e;
    }
    const T sum = sum_of<T>(sums);
    if (sum == 0) return 0;
    const T factor = 1 / sum;
    for (int64_t j = 0; j < n; j += LANES<T>) store<T>(row + j, load<T>(row + j) * factor);
    return most + logarithm(sum);
}

// Whether masks hide a column from all rows [first, first + count), for LANES columns from `column` on.
template <class S, class T>
static bool are_hidden(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t column, const S *added, const uint8_t *shown) {
    typename Lanes<T>::ivec hidden = ~typename Lanes<T>::ivec{};
    for (int64_t r = first; r < first + count; r++) {
        if (added != nullptr) {
            const S *a = place(added, p.added, at.b, at.h, r) + column;
            T lanes[LANES<T>];
            for (int i = 0; i < LANES<T>; i++) lanes[i] = widened<S, T>(a[i]);
            hidden &= load<T>(lanes) <= T(HIDES);
            if (p.added[2] == 0) break;  // all rows have the same
        } else {
            const uint8_t *a = place(shown, p.shown, at.b, at.h, r) + column;
            typename Lanes<T>::ivec lanes;
            for (int i = 0; i < LANES<T>; i++) lanes[i] = a[i];
            hidden &= lanes == 0;
            if (p.shown[2] == 0) break;
        }
    }
    bool all = true;
    for (int i = 0; i < LANES<T>; i++) all &= hidden[i] != 0;
    return all;
}

// Whether each row of a block sees one of the first columns: else a softmax of nothing but hidden scores needs them all.
template <class S, class T>
static bool each_sees(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t seen, const S *added, const uint8_t *shown) {
    for (int64_t r = first; r < first + count; r++) {
        const int64_t end = p.causal ? std::min(seen, r + 1) : seen;
        int64_t j = 0;
        if (added != nullptr)
            for (const S *a = place(added, p.added, at.b, at.h, r); j < end && widened<S, T>(a[j]) <= T(HIDES);) j++;
        else
            for (const uint8_t *a = place(shown, p.shown, at.b, at.h, r); j < end && !a[j];) j++;
        if (j == end) return false;
    }
    return true;
}

// The columns that a block of rows sees: those behind them are later ones, or masked. What is masked has the probability
// 0, as exp(-1e30) has, however the scores are.
template <class S, class T>
static int64_t seen_by(const Problem &p, const Head &at, int64_t first, int64_t count, const S *added, const uint8_t *shown) {
    const int64_t all = p.causal ? std::min(at.columns, first + count) : at.columns;
    const bool by_added = added != nullptr && shown == nullptr && p.added[3] == 1;
    const bool by_shown = shown != nullptr && added == nullptr && p.shown[3] == 1 && p.fill <= HIDES;
    if (!by_added && !by_shown) return all;
    int64_t seen = all;
    while (seen > LANES<T> && are_hidden<S, T>(p, at, first, count, seen - LANES<T>, added, shown)) seen -= LANES<T>;
    return seen == all || each_sees<S, T>(p, at, first, count, seen, added, shown) ? seen : all;
}

// The draws of a row of scores, which count on from row to row and head to head.
static inline const int16_t *draws_of(const Problem &p, const Head &at, int64_t row, int64_t count, int16_t *bits) {
    const uint64_t first = uint64_t(at.draws + row * at.columns);
    draw(bits, count + 3, first / 4, p.key);
    return bits + first % 4;
}

template <class S, class T>
static void forward_of_head(const Problem &p, const Head &at, const S *q, const S *k, const S *v, const S *added,
                            const uint8_t *shown, S *y, T *logsumexp, bool new_keys, int64_t stride, char *memory) {
    const int64_t width = padded<T>(p.width_v), group = at.h / (p.heads / p.shared);
    Arena arena{memory};
    T *keys = arena.take<T>(p.width * stride), *values = arena.take<T>(stride * width);
    T *rows = arena.take<T>(BLOCK * p.width), *s = arena.take<T>(BLOCK * stride), *out = arena.take<T>(BLOCK * width);
    int16_t *bits = arena.take<int16_t>(stride + 64);
    if (new_keys) {
        copy_transposed<S, T>(place(k, p.k, at.b, group, at.first_column), p.k[2], at.columns, p.width, keys, stride);
        copy_rows<S, T>(place(v, p.v, at.b, group, at.first_column), p.v[2], at.columns, p.width_v, T(1), values, width);
    }
    for (int64_t first = 0; first < at.rows; first += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, at.rows - first), seen = seen_by<S, T>(p, at, first, count, added, shown);
        copy_rows<S, T>(place(q, p.q, at.b, at.h, at.first_row + first), p.q[2], count, p.width, T(p.scale), rows, p.width);
        masked_scores<S, T>(p, at, first, count, seen, rows, p.width, keys, stride, added, shown, s);
        for (int64_t r = 0; r < count; r++) {
            T *row = s + r * stride;
            logsumexp[at.sums + first + r] = softmax<T>(row, padded<T>(seen), p.safe);
            if (p.key != nullptr) {
                const int16_t *own = draws_of(p, at, first + r, seen, bits);
                for (int64_t j = 0; j < seen; j += LANES<T>)
                    store<T>(row + j, load<T>(row + j) * factor<T>(own + j, int16_t(p.least), T(p.kept_scale)));
            }
        }
        product<T, false>(count, width, seen, s, stride, 1, values, width, out, width);
        write_rows<T, S>(out, width, count, p.width_v, place(y, p.y, at.b, at.h, at.first_row + first), p.y[2]);
    }
}

template <class S, class T>
static void forward(const Problem &p, const S *q, const S *k, const S *v, const S *added, const uint8_t *shown, S *y, T *logsumexp) {
    const int64_t stride = padded<T>(most_columns(p)), width = padded<T>(p.width_v);
    const size_t bytes = (p.width * stride + stride * width + BLOCK * (p.width + stride + width)) * sizeof(T) + (stride + 64) * 2 + 6 * 64;
    struct Last { int64_t b = -1, group = -1; };
    for_items<Last>(p.threads, p.batch * p.heads, bytes, [&](char *memory, int64_t item, Last &last) {
        const int64_t b = item / p.heads, h = item % p.heads, group = h / (p.heads / p.shared);
        const bool new_keys = last.b != b || last.group != group;
        last = {b, group};
        forward_of_head<S, T>(p, head_of(p, b, h), q, k, v, added, shown, y, logsumexp, new_keys, stride, memory);
    });
}

// The gradient of the scores of one row, over what dy @ v^T gave; the probabilities become those after dropout.
template <class T>
static void scores_backward(const Problem &p, const Head &at, int64_t row, int64_t seen, T *s, T *ds, int16_t *bits, const uint8_t *shown) {
    const int64_t n = padded<T>(seen);
    Vec<T> sums = {};
    for (int64_t j = seen; j < n; j++) ds[j] = 0;
    if (p.key != nullptr) {
        const int16_t *own = draws_of(p, at, row, seen, bits), least = int16_t(p.least);
        const T kept = T(p.kept_scale);
        for (int64_t j = 0; j < n; j += LANES<T>) {
            const Vec<T> d = load<T>(ds + j) * factor<T>(own + j, least, kept);
            store<T>(ds + j, d);
            sums += d * load<T>(s + j);
        }
        const T mean = sum_of<T>(sums);
        for (int64_t j = 0; j < n; j += LANES<T>) {
            const Vec<T> probability = load<T>(s + j);
            store<T>(ds + j, probability * (load<T>(ds + j) - mean));
            store<T>(s + j, probability * factor<T>(own + j, least, kept));
        }
    } else {
        for (int64_t j = 0; j < n; j += LANES<T>) sums += load<T>(ds + j) * load<T>(s + j);
        const T mean = sum_of<T>(sums);
        for (int64_t j = 0; j < n; j += LANES<T>) store<T>(ds + j, load<T>(s + j) * (load<T>(ds + j) - mean));
    }
    if (shown != nullptr)  // a hidden score is a constant, though its probability may not be 0
        for (int64_t j = 0; j < seen; j++) ds[j] = shown[j * p.shown[3]] ? ds[j] : T(0);
}

// Gradients of one head of k and v, and of the heads of q that share it.
template <class S, class T>
static void backward_of_group(const Problem &p, int64_t b, int64_t g, const S *dy, const S *q, const S *k, const S *v, const S *added,
                              const uint8_t *shown, S *dq, S *dk, S *dv, T *dscores, int64_t stride, char *memory) {
    const int64_t wide = padded<T>(p.width), wide_v = padded<T>(p.width_v), each = p.heads / p.shared;
    Arena arena{memory};
    T *keys_t = arena.take<T>(p.width * stride), *values_t = arena.take<T>(p.width_v * stride);
    T *keys = arena.take<T>(stride * wide), *sum_k = arena.take<T>(stride * wide), *sum_v = arena.take<T>(stride * wide_v);
    T *rows = arena.take<T>(BLOCK * wide), *d_rows = arena.take<T>(BLOCK * wide_v);
    T *s = arena.take<T>(BLOCK * stride), *ds = arena.take<T>(BLOCK * stride), *out = arena.take<T>(BLOCK * wide);
    int16_t *bits = arena.take<int16_t>(stride + 64);
    Head at = head_of(p, b, g * each);
    const S *k_head = place(k, p.k, at.b, g, at.first_column), *v_head = place(v, p.v, at.b, g, at.first_column);
    copy_transposed<S, T>(k_head, p.k[2], at.columns, p.width, keys_t, stride);
    copy_transposed<S, T>(v_head, p.v[2], at.columns, p.width_v, values_t, stride);
    copy_rows<S, T>(k_head, p.k[2], at.columns, p.width, T(p.scale), keys, wide);
    std::fill(sum_k, sum_k + at.columns * wide, T(0));
    std::fill(sum_v, sum_v + at.columns * wide_v, T(0));
    for (int64_t h = g * each; h < (g + 1) * each; h++) {
        at = head_of(p, b, h);
        for (int64_t first = 0; first < at.rows; first += BLOCK) {
            const int64_t count = std::min<int64_t>(BLOCK, at.rows - first), seen = seen_by<S, T>(p, at, first, count, added, shown), row = at.first_row + first;
            copy_rows<S, T>(place(q, p.q, at.b, h, row), p.q[2], count, p.width, T(p.scale), rows, wide);
            copy_rows<S, T>(place(dy, p.dy, at.b, h, row), p.dy[2], count, p.width_v, T(1), d_rows, wide_v);
            masked_scores<S, T>(p, at, first, count, seen, rows, wide, keys_t, stride, added, shown, s);
            product<T, false>(count, padded<T>(seen), p.width_v, d_rows, wide_v, 1, values_t, stride, ds, stride);
            for (int64_t r = 0; r < count; r++) {
                T *d_row = ds + r * stride;
                softmax<T>(s + r * stride, padded<T>(seen), p.safe);
                const uint8_t *own = place(shown, p.shown, at.b, h, first + r);
                scores_backward<T>(p, at, first + r, seen, s + r * stride, d_row, bits, own);
                if (dscores != nullptr) {
                    T *target = dscores + at.draws + (first + r) * at.columns;
                    std::copy(d_row, d_row + seen, target);
                    std::fill(target + seen, target + at.columns, T(0));
                }
            }
            product<T, false>(count, wide, seen, ds, stride, 1, keys, wide, out, wide);
            write_rows<T, S>(out, wide, count, p.width, place(dq, p.dq, at.b, h, row), p.dq[2]);
            product<T, true>(seen, wide, count, ds, 1, stride, rows, wide, sum_k, wide);
            product<T, true>(seen, wide_v, count, s, 1, stride, d_rows, wide_v, sum_v, wide_v);
        }
    }
    write_rows<T, S>(sum_k, wide, at.columns, p.width, place(dk, p.dk, at.b, g, at.first_column), p.dk[2]);
    write_rows<T, S>(sum_v, wide_v, at.columns, p.width_v, place(dv, p.dv, at.b, g, at.first_column), p.dv[2]);
}

template <class S, class T>
static void backward(const Problem &p, const S *dy, const S *q, const S *k, const S *v, const S *added, const uint8_t *shown,
                     S *dq, S *dk, S *dv, T *dscores) {
    const int64_t stride = padded<T>(most_columns(p)), wide = padded<T>(p.width), wide_v = padded<T>(p.width_v);
    const size_t bytes = ((p.width + p.width_v + 2 * BLOCK + 2 * wide + wide_v) * stride + BLOCK * (2 * wide + wide_v)) * sizeof(T) +
                         (stride + 64) * 2 + 12 * 64;
    struct None {};
    for_items<None>(p.threads, p.batch * p.shared, bytes, [&](char *memory, int64_t item, None &) {
        backward_of_group<S, T>(p, item / p.shared, item % p.shared, dy, q, k, v, added, shown, dq, dk, dv, dscores, stride, memory);
    });
}

// Behind this file stands one FUNCTIONS: a library has those of one element type.
#define FUNCTIONS(name, S, T)                                                                                              \
    extern "C" void forward_##name(const Problem *p, const S *q, const S *k, const S *v, const S *added,                  \
                                   const uint8_t *shown, S *y, T *logsumexp) {                                             \
        forward<S, T>(*p, q, k, v, added, shown, y, logsumexp);                                                            \
    }                                                                                                                      \
    extern "C" void backward_##name(const Problem *p, const S *dy, const S *q, const S *k, const S *v, const S *added,    \
                                    const uint8_t *shown, S *dq, S *dk, S *dv, T *dscores) {                   \
        backward<S, T>(*p, dy, q, k, v, added, shown, dq, dk, dv, dscores);                                             \
    }
