// The gradient of a convolution's weight, of images in channels_last memory format: x[n, h, w, c], dy[n, e, f, o].
//     dw[o, c, k, l] = sum over n, e, f of dy[n, e, f, o] * x[n, e*stride - pad + k*dilation, f*stride - pad + l*dilation, c]
// A tile of dw, a few channels by two vectors of outputs, stays in registers over a block of positions. The part of x that
// the block reads is copied into one panel for the channels of each tile, with zeros for the padding; an offset within the
// window reads a part of the panel.

constexpr int64_t POSITIONS = 256;            // of a block: the panels of x and dy of a tile fit into the L1 cache
constexpr int64_t SHARED = int64_t(1) << 17;  // elements of dw from which on threads share one dw instead of adding several

// In the order in which Python passes them.
struct Axis { int64_t size, out, window, stride, pad, dilation; };
struct Sizes { int64_t images, channels, outs; Axis rows, columns; };

// A unit is some rows of dy of one image, a block some units. `read_rows` and `read_columns` are the part of x that the
// positions of a unit read, `offsets` the number of positions of a window.
struct Blocks : Sizes {
    int64_t unit_rows, units, units_per_image, read_rows, read_columns, channel_tiles, out_tiles, offsets, x_panel, dy_panel;

    explicit Blocks(const Sizes &s) : Sizes(s) {
        unit_rows = std::max<int64_t>(1, std::min(rows.out, POSITIONS / columns.out));
        units = std::max<int64_t>(1, POSITIONS / (unit_rows * columns.out));
        units_per_image = divided(rows.out, unit_rows);
        read_rows = (unit_rows - 1) * rows.stride + (rows.window - 1) * rows.dilation + 1;
        read_columns = (columns.out - 1) * columns.stride + (columns.window - 1) * columns.dilation + 1;
        channel_tiles = divided(channels, TALL);
        out_tiles = divided(outs, WIDE);
        offsets = rows.window * columns.window;
        x_panel = units * read_rows * read_columns * TALL;
        dy_panel = units * unit_rows * columns.out * WIDE;
    }

    // Tiles of nearly equal height: 32 channels are 6 + 5 + 5 + 6 + 5 + 5, not 5 * 6 + 2.
    int64_t channel(int64_t tile) const { return channels * tile / channel_tiles; }
    int64_t height(int64_t tile) const { return channel(tile + 1) - channel(tile); }
    int64_t tile_of(int64_t c) const { return ((c + 1) * channel_tiles - 1) / channels; }
    int64_t image(int64_t unit) const { return unit / units_per_image; }
    int64_t first_row(int64_t unit) const { return unit % units_per_image * unit_rows; }
    int64_t rows_of(int64_t unit) const { return std::min(unit_rows, rows.out - first_row(unit)); }
    int64_t sums() const { return channel_tiles * offsets * TALL * WIDE; }  // of one tile of outputs
};

static void pack_x(const Blocks &b, const float *x, int64_t first, int64_t count, float *panels) {
    const Axis &w = b.columns;
    const int64_t left = std::min(w.pad, b.read_columns), right = std::max(left, std::min(b.read_columns, w.size + w.pad));
    for (int64_t u = 0; u < count; u++)
        for (int64_t r = 0; r < b.read_rows; r++) {
            const int64_t row = b.first_row(first + u) * b.rows.stride - b.rows.pad + r;
            const bool inside = row >= 0 && row < b.rows.size;
            const float *from = x + (b.image(first + u) * b.rows.size + row) * w.size * b.channels;
            for (int64_t tile = 0; tile < b.channel_tiles; tile++) {
                const int64_t n = b.height(tile);
                float *to = panels + tile * b.x_panel + (u * b.read_rows + r) * b.read_columns * n;
                const int64_t begin = inside ? left : b.read_columns, end = inside ? right : b.read_columns;
                std::fill(to, to + begin * n, 0.0f);
                std::fill(to + end * n, to + b.read_columns * n, 0.0f);
                if (begin < end)
                    with_constant(n, [&](auto height) {
                        copy_pieces<height>(from + (begin - w.pad) * b.channels + b.channel(tile), b.channels, to + begin * n, end - begin);
                    });
            }
        }
}

static void pack_dy(const Blocks &b, const float *dy, int64_t first, int64_t count, int64_t tile, float *panel) {
    const int64_t n = std::min<int64_t>(WIDE, b.outs - tile * WIDE), unit_positions = b.unit_rows * b.columns.out;
    for (int64_t u = 0; u < count; u++) {
        const int64_t positions = b.rows_of(first + u) * b.columns.out;
        const float *from = dy + (b.image(first + u) * b.rows.out + b.first_row(first + u)) * b.columns.out * b.outs + tile * WIDE;
        float *to = panel + u * unit_positions * WIDE;
        if (n == WIDE) {
            copy_pieces<WIDE>(from, b.outs, to, positions);
            continue;
        }
        for (int64_t p = 0; p < positions; p++, from += b.outs, to += WIDE) std::fill(std::copy(from, from + n, to), to + WIDE, 0.0f);
    }
}

// Adds the contribution of the positions of a block at one offset of the window to sums[HEIGHT][WIDE].
template <int HEIGHT>
static __attribute__((noinline)) void add_block(const Blocks &b, int64_t first, int64_t count, const float *x, const float *dy, float *sums) {
    Vec<float> tile[HEIGHT][ACROSS];
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) tile[i][j] = load<float>(sums + i * WIDE + j * LANES<float>);
    for (int64_t u = 0; u < count; u++) {
        const float *from = x + u * b.read_rows * b.read_columns * HEIGHT, *with = dy + u * b.unit_rows * b.columns.out * WIDE;
        for (int64_t r = 0; r < b.rows_of(first + u); r++)
            add_matmul(b.columns.out, from + r * b.rows.stride * b.read_columns * HEIGHT, 1, b.columns.stride * HEIGHT,
                       with + r * b.columns.out * WIDE, WIDE, tile);
    }
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) store<float>(sums + i * WIDE + j * LANES<float>, tile[i][j]);
}

// Adds the units [unit, end) to the sums of the tiles of outputs [first_tile, last_tile).
static void add_units(const Blocks &b, const float *x, const float *dy, int64_t unit, int64_t end, int64_t first_tile, int64_t last_tile, float *sums) {
    float *panels = scratch<float>(b.channel_tiles * b.x_panel), *dy_panel = scratch<float>(b.dy_panel);
    for (; unit < end; unit += b.units) {
        const int64_t count = std::min(b.units, end - unit);
        pack_x(b, x, unit, count, panels);
        float *sum = sums;
        for (int64_t out = first_tile; out < last_tile; out++) {
            pack_dy(b, dy, unit, count, out, dy_panel);
            for (int64_t tile = 0; tile < b.channel_tiles; tile++)
                with_constant(b.height(tile), [&](auto height) {
                    for (int64_t offset = 0; offset < b.offsets; offset++, sum += TALL * WIDE) {
                        const int64_t row = offset / b.columns.window * b.rows.dilation, column = offset % b.columns.window * b.columns.dilation;
                        const float *window_x = panels + tile * b.x_panel + (row * b.read_columns + column) * height;
                        add_block<height>(b, unit, count, window_x, dy_panel, sum);
                    }
                });
        }
    }
    std::free(panels);
    std::free(dy_panel);
}

// Writes the contiguous dw[o, c, k, l] from the sums of `parts` threads.
static void write_result(const Blocks &b, const float *sums, int64_t parts, int64_t threads, float *dw) {
    parallel_for(b.channels * b.outs < 4096 ? 1 : threads, b.outs, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; o++)
            for (int64_t c = 0; c < b.channels; c++) {
                const int64_t tile = b.tile_of(c), at = (o / WIDE * b.channel_tiles + tile) * b.offsets * TALL + c - b.channel(tile);
                for (int64_t offset = 0; offset < b.offsets; offset++) {
                    float sum = 0;
                    for (int64_t t = 0; t < parts; t++) sum += sums[t * b.out_tiles * b.sums() + (at + offset * TALL) * WIDE + o % WIDE];
                    dw[(o * b.channels + c) * b.offsets + offset] = sum;
                }
            }
    });
}

extern "C" {

// sizes: the members of Sizes, none of them 0.
void weight_gradient(const float *x, const float *dy, float *dw, const int64_t *sizes, int64_t threads) {
    Sizes passed;
    std::memcpy(&passed, sizes, sizeof passed);
    const Blocks b(passed);
    const int64_t units = b.images * b.units_per_image, dw_elements = b.out_tiles * b.sums();
    const bool shared = dw_elements >= SHARED && b.out_tiles >= threads;
    const int64_t parts = shared ? 1 : std::min(threads, units);
    float *sums = static_cast<float *>(std::calloc(size_t(parts * dw_elements), sizeof(float)));
    if (sums == nullptr) std::abort();
    if (shared)
        parallel_for(threads, b.out_tiles, [&](int64_t begin, int64_t end) { add_units(b, x, dy, 0, units, begin, end, sums + begin * b.sums()); });
    else
        parallel_for(parts, parts, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) add_units(b, x, dy, units * t / parts, units * (t + 1) / parts, 0, b.out_tiles, sums + t * dw_elements);
        });
    write_result(b, sums, parts, threads, dw);
    std::free(sums);
}

}
