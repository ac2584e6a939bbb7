// Attention whose scores are computed for a block of rows that stays in the cache; Dao 2023,
// https://arxiv.org/abs/2307.08691, with complete rows instead of the running maximum.
//
//     s = scale * q @ k^T + added, `fill` where masked      p = softmax(s)      y = drop(p) @ v
//     dv = drop(p)^T @ dy      dp = drop(dy @ v^T)      ds = p * (dp - p . dp)      dq = scale * ds @ k      dk = scale * ds^T @ q
//
// Backward recomputes p from q and k. The scores of a block are stored transposed, [column, row]: the lanes of a vector are
// rows, so the sums of softmax need no reduction across lanes, and the GEMMs read k and v without a transposition.
//
// The last axis of q, k, v, y and their gradients is contiguous; all other strides are arbitrary. Sequences of equal length
// form a batch; sequences of different lengths are concatenated, with offsets.

constexpr int BLOCK = 32;        // rows of q that are processed together
constexpr double HIDES = -1e30;  // a score masks its element if this or less is added to it or replaces it

// GEMMs: c[m, n] (+)= a[m, k] @ b[k, n]. n is a multiple of the lanes; element [i, l] of a is at i * am + l * ak.

template <class T, int M, int N, bool ADD>
static inline void tile(int64_t depth, const T *a, int64_t am, int64_t ak, const T *b, int64_t bk, T *c, int64_t cm) {
    Vec<T> sums[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) sums[i][j] = ADD ? load<T>(c + i * cm + j * LANES<T>) : Vec<T>{};
    add_matmul(depth, a, am, ak, b, bk, sums);
#pragma GCC unroll 16
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
static void matmul(int64_t m, int64_t n, int64_t k, const T *a, int64_t am, int64_t ak, const T *b, int64_t bk, T *c, int64_t cm) {
    // A single row is bound by the latency of its sums: up to two tiles of four rows first, if fewer single rows remain.
    int64_t fours = 0, i = 0;
    for (int64_t count = 1; count <= 2 && 4 * count <= m; count++)
        if ((m - 4 * count) % TILE_ROWS < (m - 4 * fours) % TILE_ROWS) fours = count;
    for (; i < 4 * fours; i += 4) row_of_tiles<T, 4, ADD>(n, k, a + i * am, am, ak, b, bk, c + i * cm, cm);
    for (; i + TILE_ROWS <= m; i += TILE_ROWS) row_of_tiles<T, TILE_ROWS, ADD>(n, k, a + i * am, am, ak, b, bk, c + i * cm, cm);
    for (; i < m; i++) row_of_tiles<T, 1, ADD>(n, k, a + i * am, am, ak, b, bk, c + i * cm, cm);
}

// Tensors. Inputs are copied to contiguous scratch memory in the type of the sums, with rows zero-padded to full vectors.

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

// Loads `count` elements as a vector padded with zeros, and stores them.
template <class S, class T, class N> static inline Vec<T> read(const S *from, N count) {
    if constexpr (std::is_same_v<S, T>) return load_first<T>(from, count);
    T lanes[LANES<T>] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = widened<S, T>(from[i]);
    return load<T>(lanes);
}
template <class T, class S, class N> static inline void write(S *to, N count, Vec<T> x) {
    if constexpr (std::is_same_v<S, T>) return store_first<T>(to, count, x);
    T lanes[LANES<T>];
    store<T>(lanes, x);
    for (int64_t i = 0; i < count; i++) narrowed<T, S>(lanes[i], to + i);
}

// to[j, i] = from[i, j]; both have room for full tiles.
template <class T> static void transpose(int64_t rows, int64_t columns, const T *from, int64_t from_stride, T *to, int64_t to_stride) {
    for (int64_t i = 0; i < rows; i += LANES<T>)
        for (int64_t j = 0; j < columns; j += LANES<T>)
            transpose_tile<T>(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
}

// The arguments that all heads share. Strides are in elements: of batch, head and row, and for masks of the column.
struct Problem {
    int64_t batch, heads, shared, rows, columns, width, width_v, causal, safe, threads;
    int64_t q[3], k[3], v[3], y[3], dy[3], dq[3], dk[3], dv[3], added[4], visible[4];
    const int64_t *row_offsets, *column_offsets;  // null: sequences of equal length; else `rows` and `columns` are totals
    const int64_t *key;                           // null: nothing is dropped
    int64_t least;                                // elements with smaller random bits are dropped
    double scale, kept_scale, fill;
};

// One head of one sequence.
struct Head {
    int64_t b, h, first_row, rows, first_column, columns, random_bits, sums;  // the offsets of its random bits and logsumexp
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

// A later head of the same sequence.
static Head later(const Problem &p, Head at, int64_t count) {
    at.h += count;
    at.random_bits += count * at.rows * at.columns;
    at.sums += count * p.rows;
    return at;
}

static int64_t longest_columns(const Problem &p) {
    if (p.row_offsets == nullptr) return p.columns;
    int64_t largest = 0;
    for (int64_t b = 0; b < p.batch; b++) largest = std::max(largest, p.column_offsets[b + 1] - p.column_offsets[b]);
    return largest;
}

template <class S> static inline S *address(S *x, const int64_t *strides, int64_t b, int64_t h, int64_t row) {
    return x == nullptr ? nullptr : x + b * strides[0] + h * strides[1] + row * strides[2];
}

// Copies rows of consecutive heads, beginning at x, in memory order; to[head, lines, padded width].
template <class S, class T>
static void copy_rows(const S *x, const int64_t *strides, int64_t heads, int64_t rows, int64_t width, T factor, T *to, int64_t lines) {
    const int64_t wide = padded<T>(width);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++)
            each_vector<T>(0, width, [&](int64_t d, auto n) {
                store<T>(to + (h * lines + i) * wide + d, read<S, T>(x + h * strides[1] + i * strides[2] + d, n) * factor);
            });
}

// The inverse of copy_rows.
template <class T, class S>
static void write_rows(const T *from, int64_t lines, int64_t heads, int64_t rows, int64_t width, T factor, S *x, const int64_t *strides) {
    const int64_t wide = padded<T>(width);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++)
            each_vector<T>(0, width, [&](int64_t d, auto n) {
                write<T, S>(x + h * strides[1] + i * strides[2] + d, n, load<T>(from + (h * lines + i) * wide + d) * factor);
            });
}

// Runs f(memory, item) for all items; a free thread takes the next one. The memory belongs to the thread.
template <class F> static void for_items(int64_t threads, int64_t items, size_t bytes, const F &f) {
    struct FreeOnExit { char *data; ~FreeOnExit() { std::free(data); } };
    std::atomic<int64_t> next{0};
    threads = std::min(threads, items);
    parallel_for(threads, threads, [&](int64_t, int64_t) {
        FreeOnExit memory{static_cast<char *>(std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096))};
        if (memory.data == nullptr) std::abort();
        for (int64_t item; (item = next++) < items;) f(memory.data, item);
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

// f(column, row, the mask of LANES rows of a block from this one on) for all columns.
template <class S, class T, class F>
static inline void each_of_mask(const S *mask, const int64_t *strides, int64_t count, int64_t seen, const F &f) {
    const int64_t by_row = strides[2], by_column = strides[3];
    if (by_row == 0) {
        for (int64_t j = 0; j < seen; j++)
            for (int64_t r = 0; r < count; r += LANES<T>) f(j, r, Vec<T>{} + widened<S, T>(mask[j * by_column]));
        return;
    }
    T tile[LANES<T> * LANES<T>] = {};
    for (int64_t r = 0; r < count; r += LANES<T>)
        for (int64_t j = 0; j < seen; j += LANES<T>) {
            const int64_t rows = std::min<int64_t>(LANES<T>, count - r), columns = std::min<int64_t>(LANES<T>, seen - j);
            const S *from = mask + r * by_row + j * by_column;
            for (int64_t i = 0; i < rows; i++)
                if (by_column == 1)
                    each_vector<T>(0, columns, [&](int64_t, auto n) { store<T>(tile + i * LANES<T>, read<S, T>(from + i * by_row, n)); });
                else
                    for (int64_t c = 0; c < columns; c++) tile[i * LANES<T> + c] = widened<S, T>(from[i * by_row + c * by_column]);
            transpose_tile<T>(tile, LANES<T>, tile, LANES<T>);
            for (int64_t c = 0; c < columns; c++) f(j + c, r, load<T>(tile + c * LANES<T>));
        }
}

// Masks the scores s[column, row] of a block, of the columns [0, seen).
template <class S, class T>
static void mask_scores(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t seen, const S *added, const uint8_t *visible, T *s) {
    if (added != nullptr)
        each_of_mask<S, T>(address(added, p.added, at.b, at.h, first), p.added, count, seen, [&](int64_t j, int64_t r, Vec<T> x) {
            store<T>(s + j * BLOCK + r, load<T>(s + j * BLOCK + r) + x);
        });
    if (visible != nullptr)
        each_of_mask<uint8_t, T>(address(visible, p.visible, at.b, at.h, first), p.visible, count, seen, [&](int64_t j, int64_t r, Vec<T> x) {
            store<T>(s + j * BLOCK + r, x != T(0) ? load<T>(s + j * BLOCK + r) : Vec<T>{} + T(p.fill));
        });
    if (p.causal)
        for (int64_t j = first + 1; j < seen; j++) std::fill(s + j * BLOCK, s + j * BLOCK + (j - first), -std::numeric_limits<T>::infinity());
}

// The maximum score of each of LANES rows. If all are -inf and `safe`, it is 0: then all probabilities are 0, not NaN.
template <class T> static Vec<T> maximum_of_rows(int64_t seen, const T *s, bool safe) {
    const Vec<T> nothing = Vec<T>{} - std::numeric_limits<T>::infinity();
    Vec<T> tops[4] = {nothing, nothing, nothing, nothing};
    int64_t j = 0;
    for (; j + 4 <= seen; j += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) tops[i] = maximum<T>(load<T>(s + (j + i) * BLOCK), tops[i]);
    for (; j < seen; j++) tops[0] = maximum<T>(load<T>(s + j * BLOCK), tops[0]);
    const Vec<T> top = maximum<T>(maximum<T>(tops[0], tops[1]), maximum<T>(tops[2], tops[3]));
    return safe ? (top == nothing ? Vec<T>{} : top) : top;
}

// Whether the masks hide LANES columns, from `column` on, from all rows [first, first + count).
template <class S, class T>
static bool are_hidden(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t column, const S *added, const uint8_t *visible) {
    typename Lanes<T>::ivec hidden = ~typename Lanes<T>::ivec{};
    for (int64_t r = first; r < first + count; r++) {
        if (added != nullptr) {
            const S *a = address(added, p.added, at.b, at.h, r) + column;
            T lanes[LANES<T>];
            for (int i = 0; i < LANES<T>; i++) lanes[i] = widened<S, T>(a[i]);
            hidden &= load<T>(lanes) <= T(HIDES);
            if (p.added[2] == 0) break;  // all rows have the same mask
        } else {
            const uint8_t *a = address(visible, p.visible, at.b, at.h, r) + column;
            typename Lanes<T>::ivec lanes;
            for (int i = 0; i < LANES<T>; i++) lanes[i] = a[i];
            hidden &= lanes == 0;
            if (p.visible[2] == 0) break;
        }
    }
    bool all = true;
    for (int i = 0; i < LANES<T>; i++) all &= hidden[i] != 0;
    return all;
}

// Whether each row of a block sees one of the first columns: a softmax of hidden scores only needs all columns.
template <class S, class T>
static bool each_row_sees(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t seen, const S *added, const uint8_t *visible) {
    for (int64_t r = first; r < first + count; r++) {
        const int64_t end = p.causal ? std::min(seen, r + 1) : seen;
        int64_t j = 0;
        if (added != nullptr)
            for (const S *a = address(added, p.added, at.b, at.h, r); j < end && widened<S, T>(a[j]) <= T(HIDES);) j++;
        else
            for (const uint8_t *a = address(visible, p.visible, at.b, at.h, r); j < end && !a[j];) j++;
        if (j == end) return false;
    }
    return true;
}

// The number of columns that a block of rows sees; those after them are masked, by causality or a mask. A masked column has
// the probability 0 whatever its score, because exp(-1e30) is 0.
template <class S, class T>
static int64_t columns_seen_by(const Problem &p, const Head &at, int64_t first, int64_t count, const S *added, const uint8_t *visible) {
    const int64_t all = p.causal ? std::min(at.columns, first + count) : at.columns;
    const bool by_added = added != nullptr && visible == nullptr && p.added[3] == 1;
    const bool by_shown = visible != nullptr && added == nullptr && p.visible[3] == 1 && p.fill <= HIDES;
    if (!by_added && !by_shown) return all;
    int64_t seen = all;
    while (seen > LANES<T> && are_hidden<S, T>(p, at, first, count, seen - LANES<T>, added, visible)) seen -= LANES<T>;
    return seen == all || each_row_sees<S, T>(p, at, first, count, seen, added, visible) ? seen : all;
}

// The random bits of a block: 32 bits for two neighbouring columns, [column / 2, row].
static void write_random_bits(const Problem &p, const Head &at, int64_t first, int64_t count, int64_t seen, int32_t *random_bits) {
    typedef uint32_t halves_t __attribute__((vector_size(32)));
    for (int64_t r = 0; r < count; r += 8) {
        const words_t element = (EIGHT + uint64_t(first + r)) * uint64_t(at.columns) + uint64_t(at.random_bits);
        const words_t shift = element % 4 * 16;  // a row may begin within a word
        const bool word_aligned = (at.random_bits | at.columns) % 4 == 0;
        words_t z = state_of(element / 4, p.key), word = mix(z, p.key);
        for (int64_t j = 0; j < seen; j += 4) {
            const words_t next = mix(z += GAMMA, p.key), four = word_aligned ? word : word >> shift | next << 16 << (48 - shift);
            const halves_t low = __builtin_convertvector(four, halves_t), high = __builtin_convertvector(four >> 32, halves_t);
            std::memcpy(random_bits + j / 2 * BLOCK + r, &low, sizeof low);
            std::memcpy(random_bits + (j / 2 + 1) * BLOCK + r, &high, sizeof high);
            word = next;
        }
    }
}

// f(column, mask of the LANES rows that are kept) for all columns. Without random bits all are kept.
template <class T, class F> static inline void each_column(int64_t seen, const int32_t *random_bits, int64_t least, const F &f) {
    typedef typename Lanes<T>::ivec mask;
    int64_t j = 0;
    if (random_bits == nullptr) {
        for (; j < seen; j++) f(j, ~mask{});
        return;
    }
    const int32_t low = int32_t(least) * 65536;
    typename Lanes<T>::pairs two;
    for (; j < seen; j += 2) {
        std::memcpy(&two, random_bits + j / 2 * BLOCK, sizeof two);
        f(j, __builtin_convertvector(two << 16 >= low, mask));
        if (j + 1 < seen) f(j + 1, __builtin_convertvector(two >= low, mask));  // the lower half does not change the result
    }
}

// Replaces the scores of LANES rows by their probabilities after dropout, up to a factor, which it returns.
template <class T> static Vec<T> probabilities(const Problem &p, int64_t seen, T *s, const int32_t *random_bits, T *logsumexp) {
    const Vec<T> top = maximum_of_rows<T>(seen, s, p.safe);
    Vec<T> sum = {};
    each_column<T>(seen, random_bits, p.least, [&](int64_t j, typename Lanes<T>::ivec kept) {
        const Vec<T> e = exponential<T>(load<T>(s + j * BLOCK) - top);
        sum += e;
        store<T>(s + j * BLOCK, kept ? e : Vec<T>{});
    });
    store<T>(logsumexp, sum == T(0) ? Vec<T>{} : top + logarithm_above_one<T>(sum));
    return sum == T(0) ? Vec<T>{} : T(p.kept_scale) / sum;
}

// Consecutive heads of k and v, and the heads of q that share them, are processed together: their rows are adjacent, and
// memory is best accessed sequentially. One by one, heads of width 32 took 1.2 (forward) to 1.5 times as long.
constexpr int64_t ROW_BYTES = 1024, SCRATCH_BYTES = 512 << 10;  // longer rows gain nothing; the scratch fits into the L2 cache

struct Part {
    int64_t b, first, count;
};

struct Split {
    int64_t largest, parts;  // heads of k and v in a part; parts of a sequence
    Split(const Problem &p, int64_t row_bytes, int64_t scratch_bytes) {
        const int64_t fits = std::min(ROW_BYTES / row_bytes, SCRATCH_BYTES / scratch_bytes), enough = p.batch * p.shared / (4 * p.threads);
        const int64_t wanted = std::max<int64_t>(std::min(fits, enough), 1), count = (p.shared + wanted - 1) / wanted;
        largest = (p.shared + count - 1) / count;
        parts = (p.shared + largest - 1) / largest;
    }
    Part part(const Problem &p, int64_t item) const {
        const int64_t first = item % parts * largest;
        return {item / parts, first, std::min(largest, p.shared - first)};
    }
};

template <class S, class T>
static void forward_of_part(const Problem &p, const Part &part, const S *q, const S *k, const S *v, const S *added,
                            const uint8_t *visible, S *y, T *logsumexp, int64_t lines, char *memory) {
    const int64_t wide = padded<T>(p.width), wide_v = padded<T>(p.width_v);
    const int64_t each = p.heads / p.shared, heads = part.count * each, h0 = part.first * each;
    Arena arena{memory};
    T *keys = arena.take<T>(part.count * lines * wide), *values = arena.take<T>(part.count * lines * wide_v), *s = arena.take<T>(lines * BLOCK);
    T *rows = arena.take<T>(heads * BLOCK * wide), *out = arena.take<T>(heads * BLOCK * wide_v);
    T *transposed = arena.take<T>(BLOCK * std::max(wide, wide_v)), *sums = arena.take<T>(BLOCK);
    int32_t *random_bits = arena.take<int32_t>((lines / 2 + 2) * BLOCK);
    const Head start = head_of(p, part.b, h0);
    copy_rows<S, T>(address(k, p.k, start.b, part.first, start.first_column), p.k, part.count, start.columns, p.width, T(p.scale), keys, lines);
    copy_rows<S, T>(address(v, p.v, start.b, part.first, start.first_column), p.v, part.count, start.columns, p.width_v, T(1), values, lines);
    if (start.rows % LANES<T> != 0) std::fill(rows, rows + heads * BLOCK * wide, T(0));  // the padding of the last rows to full vectors
    for (int64_t first = 0; first < start.rows; first += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, start.rows - first), n = padded<T>(count);
        copy_rows<S, T>(address(q, p.q, start.b, h0, start.first_row + first), p.q, heads, count, p.width, T(1), rows, BLOCK);
        for (int64_t h = 0; h < heads; h++) {
            const Head at = later(p, start, h);
            const int64_t seen = columns_seen_by<S, T>(p, at, first, count, added, visible);
            const T *own_keys = keys + h / each * lines * wide, *own_values = values + h / each * lines * wide_v;
            transpose<T>(n, wide, rows + h * BLOCK * wide, wide, transposed, BLOCK);
            matmul<T, false>(seen, n, p.width, own_keys, wide, 1, transposed, BLOCK, s, BLOCK);
            mask_scores<S, T>(p, at, first, count, seen, added, visible, s);
            if (p.key != nullptr) write_random_bits(p, at, first, count, seen, random_bits);
            Vec<T> factors[BLOCK / LANES<T>];
            for (int64_t r = 0; r < count; r += LANES<T>)
                factors[r / LANES<T>] = probabilities<T>(p, seen, s + r, p.key != nullptr ? random_bits + r : nullptr, sums + r);
            std::copy(sums, sums + count, logsumexp + at.sums + first);
            matmul<T, false>(p.width_v, n, seen, own_values, 1, wide_v, s, BLOCK, transposed, BLOCK);
            for (int64_t d = 0; d < p.width_v; d++)
                for (int64_t r = 0; r < n; r += LANES<T>) store<T>(transposed + d * BLOCK + r, load<T>(transposed + d * BLOCK + r) * factors[r / LANES<T>]);
            transpose<T>(wide_v, n, transposed, BLOCK, out + h * BLOCK * wide_v, wide_v);
        }
        write_rows<T, S>(out, BLOCK, heads, count, p.width_v, T(1), address(y, p.y, start.b, h0, start.first_row + first), p.y);
    }
}

template <class S, class T>
static void forward(const Problem &p, const S *q, const S *k, const S *v, const S *added, const uint8_t *visible, S *y, T *logsumexp) {
    const int64_t lines = padded<T>(longest_columns(p)), wide = padded<T>(p.width), wide_v = padded<T>(p.width_v);
    const int64_t head_scratch = lines * (wide + wide_v) + p.heads / p.shared * BLOCK * (wide + wide_v);
    const Split split(p, p.width * sizeof(S), head_scratch * sizeof(T));
    const size_t bytes = (split.largest * head_scratch + lines * BLOCK + BLOCK * (std::max(wide, wide_v) + 1)) * sizeof(T) + (lines / 2 + 2) * BLOCK * 4 + 8 * 64;
    for_items(p.threads, p.batch * split.parts, bytes, [&](char *memory, int64_t item) {
        forward_of_part<S, T>(p, split.part(p, item), q, k, v, added, visible, y, logsumexp, lines, memory);
    });
}

// Replaces the scores of LANES rows by their probabilities after dropout, and ds, which holds dy @ v^T, by their gradients.
template <class T> static void scores_backward(const Problem &p, int64_t seen, T *s, T *ds, const int32_t *random_bits) {
    const Vec<T> top = maximum_of_rows<T>(seen, s, p.safe);
    Vec<T> sum = {}, dot = {};
    each_column<T>(seen, random_bits, p.least, [&](int64_t j, typename Lanes<T>::ivec kept) {
        const Vec<T> e = exponential<T>(load<T>(s + j * BLOCK) - top), d = kept ? load<T>(ds + j * BLOCK) : Vec<T>{};
        sum += e;
        dot += e * d;
        store<T>(ds + j * BLOCK, d);
        store<T>(s + j * BLOCK, kept ? e : -e);  // the sign marks dropped elements
    });
    const Vec<T> factor = sum == T(0) ? Vec<T>{} : 1 / sum, mean = dot * factor, kept_factor = factor * T(p.kept_scale);
    for (int64_t j = 0; j < seen; j++) {
        const Vec<T> probability = load<T>(s + j * BLOCK) * kept_factor, size = absolute<T>(probability);
        store<T>(ds + j * BLOCK, size * (load<T>(ds + j * BLOCK) - mean));
        store<T>(s + j * BLOCK, (size + probability) / 2);
    }
}

// Writes ds[column, row] of a block row by row; columns that are not seen get 0.
template <class T> static void write_scores(const Head &at, int64_t count, int64_t seen, const T *ds, T *to) {
    T tile[LANES<T> * LANES<T>];
    for (int64_t r = 0; r < count; r += LANES<T>)
        for (int64_t j = 0; j < seen; j += LANES<T>) {
            transpose_tile<T>(ds + j * BLOCK + r, BLOCK, tile, LANES<T>);
            const int64_t rows = std::min<int64_t>(LANES<T>, count - r), columns = std::min<int64_t>(LANES<T>, seen - j);
            for (int64_t i = 0; i < rows; i++)
                each_vector<T>(0, columns, [&](int64_t, auto n) { store_first<T>(to + (r + i) * at.columns + j, n, load<T>(tile + i * LANES<T>)); });
        }
    for (int64_t r = 0; r < count; r++) std::fill(to + r * at.columns + seen, to + (r + 1) * at.columns, T(0));
}

// sums[columns, wide] (+)= x[seen, count] @ rows[count, wide].
template <class T>
static void add_to_sums(bool fresh, int64_t columns, int64_t seen, int64_t wide, int64_t count, const T *x, const T *rows, T *sums) {
    if (!fresh) return matmul<T, true>(seen, wide, count, x, BLOCK, 1, rows, wide, sums, wide);
    matmul<T, false>(seen, wide, count, x, BLOCK, 1, rows, wide, sums, wide);
    std::fill(sums + seen * wide, sums + columns * wide, T(0));
}

// The gradients of some heads of k and v, and of the heads of q that share them.
template <class S, class T>
static void backward_of_part(const Problem &p, const Part &part, const S *dy, const S *q, const S *k, const S *v, const S *added,
                             const uint8_t *visible, S *dq, S *dk, S *dv, T *dscores, int64_t lines, char *memory) {
    const int64_t wide = padded<T>(p.width), wide_v = padded<T>(p.width_v);
    const int64_t each = p.heads / p.shared, heads = part.count * each, h0 = part.first * each;
    Arena arena{memory};
    T *keys = arena.take<T>(part.count * lines * wide), *values = arena.take<T>(part.count * lines * wide_v);
    T *sum_k = arena.take<T>(part.count * lines * wide), *sum_v = arena.take<T>(part.count * lines * wide_v);
    T *rows = arena.take<T>(heads * BLOCK * wide), *d_rows = arena.take<T>(heads * BLOCK * wide_v);
    T *transposed = arena.take<T>(BLOCK * std::max(wide, wide_v)), *out = arena.take<T>(heads * BLOCK * wide);
    T *s = arena.take<T>(lines * BLOCK), *ds = arena.take<T>(lines * BLOCK);
    int32_t *random_bits = arena.take<int32_t>((lines / 2 + 2) * BLOCK);
    const Head start = head_of(p, part.b, h0);
    copy_rows<S, T>(address(k, p.k, start.b, part.first, start.first_column), p.k, part.count, start.columns, p.width, T(p.scale), keys, lines);
    copy_rows<S, T>(address(v, p.v, start.b, part.first, start.first_column), p.v, part.count, start.columns, p.width_v, T(1), values, lines);
    if (start.rows % LANES<T> != 0) {  // the padding of the last rows to full vectors
        std::fill(rows, rows + heads * BLOCK * wide, T(0));
        std::fill(d_rows, d_rows + heads * BLOCK * wide_v, T(0));
    }
    if (start.rows == 0) {
        std::fill(sum_k, sum_k + part.count * lines * wide, T(0));
        std::fill(sum_v, sum_v + part.count * lines * wide_v, T(0));
    }
    const int64_t last = (start.rows - 1) / BLOCK * BLOCK;
    for (int64_t first = last; start.rows > 0 && first >= 0; first -= BLOCK) {  // the last rows see most columns: they initialize the sums
        const int64_t count = std::min<int64_t>(BLOCK, start.rows - first), n = padded<T>(count), row = start.first_row + first;
        copy_rows<S, T>(address(q, p.q, start.b, h0, row), p.q, heads, count, p.width, T(1), rows, BLOCK);
        copy_rows<S, T>(address(dy, p.dy, start.b, h0, row), p.dy, heads, count, p.width_v, T(1), d_rows, BLOCK);
        for (int64_t h = 0; h < heads; h++) {
            const Head at = later(p, start, h);
            const int64_t seen = columns_seen_by<S, T>(p, at, first, count, added, visible);
            const T *own_keys = keys + h / each * lines * wide, *own_values = values + h / each * lines * wide_v;
            const T *own_rows = rows + h * BLOCK * wide, *own_d_rows = d_rows + h * BLOCK * wide_v;
            transpose<T>(n, wide, own_rows, wide, transposed, BLOCK);
            matmul<T, false>(seen, n, p.width, own_keys, wide, 1, transposed, BLOCK, s, BLOCK);
            mask_scores<S, T>(p, at, first, count, seen, added, visible, s);
            transpose<T>(n, wide_v, own_d_rows, wide_v, transposed, BLOCK);
            matmul<T, false>(seen, n, p.width_v, own_values, wide_v, 1, transposed, BLOCK, ds, BLOCK);
            if (p.key != nullptr) write_random_bits(p, at, first, count, seen, random_bits);
            for (int64_t r = 0; r < count; r += LANES<T>) scores_backward<T>(p, seen, s + r, ds + r, p.key != nullptr ? random_bits + r : nullptr);
            if (visible != nullptr)  // a hidden score is a constant, though its probability may not be 0
                each_of_mask<uint8_t, T>(address(visible, p.visible, at.b, at.h, first), p.visible, count, seen, [&](int64_t j, int64_t r, Vec<T> x) {
                    store<T>(ds + j * BLOCK + r, x != T(0) ? load<T>(ds + j * BLOCK + r) : Vec<T>{});
                });
            if (dscores != nullptr) write_scores<T>(at, count, seen, ds, dscores + at.random_bits + first * at.columns);
            matmul<T, false>(p.width, n, seen, own_keys, 1, wide, ds, BLOCK, transposed, BLOCK);
            transpose<T>(wide, n, transposed, BLOCK, out + h * BLOCK * wide, wide);
            const bool fresh = first == last && h % each == 0;
            add_to_sums<T>(fresh, at.columns, seen, wide, count, ds, own_rows, sum_k + h / each * lines * wide);
            add_to_sums<T>(fresh, at.columns, seen, wide_v, count, s, own_d_rows, sum_v + h / each * lines * wide_v);
        }
        write_rows<T, S>(out, BLOCK, heads, count, p.width, T(1), address(dq, p.dq, start.b, h0, row), p.dq);
    }
    write_rows<T, S>(sum_k, lines, part.count, start.columns, p.width, T(p.scale), address(dk, p.dk, start.b, part.first, start.first_column), p.dk);
    write_rows<T, S>(sum_v, lines, part.count, start.columns, p.width_v, T(1), address(dv, p.dv, start.b, part.first, start.first_column), p.dv);
}

template <class S, class T>
static void backward(const Problem &p, const S *dy, const S *q, const S *k, const S *v, const S *added, const uint8_t *visible,
                     S *dq, S *dk, S *dv, T *dscores) {
    const int64_t lines = padded<T>(longest_columns(p)), wide = padded<T>(p.width), wide_v = padded<T>(p.width_v);
    const int64_t head_scratch = lines * 2 * (wide + wide_v) + p.heads / p.shared * BLOCK * (2 * wide + wide_v);
    const Split split(p, p.width * sizeof(S), head_scratch * sizeof(T));
    const size_t bytes = (split.largest * head_scratch + 2 * lines * BLOCK + BLOCK * std::max(wide, wide_v)) * sizeof(T) + (lines / 2 + 2) * BLOCK * 4 + 11 * 64;
    for_items(p.threads, p.batch * split.parts, bytes, [&](char *memory, int64_t item) {
        backward_of_part<S, T>(p, split.part(p, item), dy, q, k, v, added, visible, dq, dk, dv, dscores, lines, memory);
    });
}

// One FUNCTIONS(...) is appended to this file: each library has one element type.
#define FUNCTIONS(name, S, T)                                                                                              \
    extern "C" void forward_##name(const Problem *p, const S *q, const S *k, const S *v, const S *added,                  \
                                   const uint8_t *visible, S *y, T *logsumexp) {                                             \
        forward<S, T>(*p, q, k, v, added, visible, y, logsumexp);                                                            \
    }                                                                                                                      \
    extern "C" void backward_##name(const Problem *p, const S *dy, const S *q, const S *k, const S *v, const S *added,    \
                                    const uint8_t *visible, S *dq, S *dk, S *dv, T *dscores) {                   \
        backward<S, T>(*p, dy, q, k, v, added, visible, dq, dk, dv, dscores);                                             \
    }
