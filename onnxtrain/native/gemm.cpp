// y[m, n] = a[m, k] @ b + bias[n], with b[k, n], or b[n, k] transposed. Each thread takes the next block of y as soon as it
// is free, so a thread that is slowed down by another program or a slower core delays the result as little as possible.
//     for up to DEPTH of k: panels of b, [k][WIDE], fill half of the L2 cache
//         for ROWS of a, which fill the rest of L2, and each panel, which fills most of the L1 cache: tiles of y

constexpr int64_t DEPTH = 384, ROWS = 96, COLUMNS = 128;
constexpr int64_t COPY_STRIDE = DEPTH + 16;  // floats between copied rows of a
constexpr int64_t ALIASING = 512;            // floats: rows at a multiple of this distance map to few sets of the L1 cache

struct Gemm {
    const float *a, *b, *bias;
    float *y;
    int64_t m, n, k, a_stride, b_stride;
    bool transposed;
};

static void pack(const Gemm &p, int64_t depth, int64_t count, int64_t column, int64_t width, float *panel) {
    if (!p.transposed) {
        const float *from = p.b + depth * p.b_stride + column;
        if (width == WIDE) return copy_pieces<WIDE>(from, p.b_stride, panel, count);
        for (int64_t l = 0; l < count; l++, from += p.b_stride, panel += WIDE) std::fill(std::copy(from, from + width, panel), panel + WIDE, 0.0f);
        return;
    }
    const float *from = p.b + column * p.b_stride + depth;
    int64_t l = 0;
    if (width == WIDE)
        for (; l + LANES<float> <= count; l += LANES<float>)
            for (int j = 0; j < WIDE; j += LANES<float>) transpose_tile<float>(from + j * p.b_stride + l, p.b_stride, panel + l * WIDE + j, WIDE);
    for (; l < count; l++)
        for (int64_t j = 0; j < WIDE; j++) panel[l * WIDE + j] = j < width ? from[j * p.b_stride + l] : 0;
}

// f(row, vector, number of elements) for each vector of a tile of `width` columns.
template <int HEIGHT, class F> static inline void each_vector_of_tile(int64_t width, const F &f) {
    if (width == WIDE) {
#pragma GCC unroll 16
        for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
            for (int j = 0; j < ACROSS; j++) f(i, j, std::integral_constant<int64_t, LANES<float>>());
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++)
            f(i, j, std::max<int64_t>(0, std::min<int64_t>(LANES<float>, width - j * LANES<float>)));
}

// y[HEIGHT][width] = a @ panel + start(row, vector, number of elements).
template <int HEIGHT, class F>
static __attribute__((noinline)) void multiply(int64_t count, const float *a, int64_t a_stride, const float *panel, float *y, int64_t y_stride, int64_t width, const F &start) {
    Vec<float> tile[HEIGHT][ACROSS];
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) tile[i][j] = Vec<float>{};
        __builtin_prefetch(y + i * y_stride, 1);
        __builtin_prefetch(y + i * y_stride + width - 1, 1);
    }
    add_matmul(count, a, a_stride, 1, panel, WIDE, tile);
    each_vector_of_tile<HEIGHT>(width, [&](int i, int j, auto n) {
        store_first<float>(y + i * y_stride + j * LANES<float>, n, tile[i][j] + start(i, j, n));
    });
}

// The block of y of the rows [row, last_row) and the columns [column, last).
static void compute_block(const Gemm &p, int64_t row, int64_t last_row, int64_t column, int64_t last, float *panels, float *copied) {
    const int64_t step = divided(divided(p.k, divided(p.k, DEPTH)), LANES<float>) * LANES<float>;
    for (int64_t depth = 0; depth < p.k; depth += step) {
        const int64_t count = std::min(step, p.k - depth);
        for (int64_t c = column; c < last; c += WIDE) pack(p, depth, count, c, std::min<int64_t>(WIDE, last - c), panels + (c - column) * count);
        for (int64_t r = row; r < last_row; r += ROWS) {
            const int64_t rows = std::min(ROWS, last_row - r);
            const float *a = p.a + r * p.a_stride + depth;
            int64_t stride = p.a_stride;
            if (stride % ALIASING == 0) {
                for (int64_t i = 0; i < rows; i++) std::memcpy(copied + i * COPY_STRIDE, a + i * stride, size_t(count) * sizeof(float));
                a = copied, stride = COPY_STRIDE;
            }
            for (int64_t c = column; c < last; c += WIDE)
                for (int64_t i = 0; i < rows; i += TALL)
                    with_constant(std::min<int64_t>(TALL, rows - i), [&](auto height) {
                        float *y = p.y + (r + i) * p.n + c;
                        const auto run = [&](const auto &start) {
                            multiply<height>(count, a + i * stride, stride, panels + (c - column) * count, y, p.n, std::min<int64_t>(WIDE, last - c), start);
                        };
                        if (depth > 0)
                            run([&](int t, int j, auto n) { return load_first<float>(y + t * p.n + j * LANES<float>, n); });
                        else if (p.bias)
                            run([&](int, int j, auto n) { return load_first<float>(p.bias + c + j * LANES<float>, n); });
                        else
                            run([](int, int, auto) { return Vec<float>{}; });
                    });
        }
    }
}

extern "C" {

// a_stride and b_stride are the distances of rows in floats, those of b as it is stored. y is contiguous. bias may be null.
// k is not 0.
void gemm(const float *a, const float *b, const float *bias, float *y, int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride, int64_t transposed, int64_t threads) {
    const Gemm p{a, b, bias, y, m, n, k, a_stride, b_stride, bool(transposed)};
    const bool few_blocks = divided(n, COLUMNS) * divided(m, ROWS) < 2 * threads;  // then narrower blocks
    const int64_t columns = std::min(COLUMNS, divided(divided(n, few_blocks ? 2 * threads : 1), WIDE) * WIDE), across = divided(n, columns);
    const int64_t parts = std::min(divided(2 * threads, across), divided(m, ROWS)), rows = divided(divided(m, parts), TALL) * TALL;
    std::atomic<int64_t> next{0};
    parallel_team(m * n * k < 65536 ? 1 : std::min(threads, across * parts), [&](int64_t, int64_t) {
        float *panels = scratch<float>(DEPTH * COLUMNS), *copied = scratch<float>(ROWS * COPY_STRIDE);
        for (int64_t i; (i = next.fetch_add(1)) < across * parts;) {
            const int64_t row = i / across * rows, column = i % across * columns;
            compute_block(p, row, std::min(m, row + rows), column, std::min(n, column + columns), panels, copied);
        }
        std::free(panels);
        std::free(copied);
    });
}

}
