// The gradient of a convolution's weight, of pictures that lie channels-last: x[n, h, w, c], dy[n, e, f, o].
//     dw[o, c, k, l] = sum over n, e, f of dy[n, e, f, o] * x[n, e*stride - pad + k*dilation, f*stride - pad + l*dilation, c]
// A tile of dw, a few channels by two vectors of outputs, stays in registers over a block of positions. Of the block x lies
// in panels, one for the channels of a tile, with the zeros of the padding: what a window's place meets is a part of it.

constexpr int64_t POSITIONS = 256;        // of a block: panels of x and dy of a tile fit into the first-level cache
constexpr int64_t SHARED = int64_t(1) << 17;  // elements of dw from which threads share it, instead of adding theirs

// In the order in which they come from Python.
struct Axis { int64_t size, out, window, stride, pad, dilation; };
struct Sizes { int64_t images, channels, outs; Axis rows, columns; };

// A unit is some rows of dy in an image. A block is some units.
struct Blocks : Sizes {
    int64_t unit_rows, units, of_image, met_rows, met_columns, channel_tiles, out_tiles, places, x_panel, dy_panel;

    explicit Blocks(const Sizes &s) : Sizes(s) {
        unit_rows = std::max<int64_t>(1, std::min(rows.out, POSITIONS / columns.out));
        units = std::max<int64_t>(1, POSITIONS / (unit_rows * columns.out));
        of_image = divided(rows.out, unit_rows);
        met_rows = (unit_rows - 1) * rows.stride + (rows.window - 1) * rows.dilation + 1;
        met_columns = (columns.out - 1) * columns.stride + (columns.window - 1) * columns.dilation + 1;
        channel_tiles = divided(channels, TALL);
        out_tiles = divided(outs, WIDE);
        places = rows.window * columns.window;
        x_panel = units * met_rows * met_columns * TALL;
        dy_panel = units * unit_rows * columns.out * WIDE;
    }

    // Tiles of nearly the same height: 32 channels are 6 + 5 + 5 + 6 + 5 + 5, not 5 * 6 + 2.
    int64_t channel(int64_t tile) const { return channels * tile / channel_tiles; }
    int64_t height(int64_t tile) const { return channel(tile + 1) - channel(tile); }
    int64_t tile_of(int64_t c) const { return ((c + 1) * channel_tiles - 1) / channels; }
    int64_t image(int64_t unit) const { return unit / of_image; }
    int64_t first_row(int64_t unit) const { return unit % of_image * unit_rows; }
    int64_t rows_of(int64_t unit) const { return std::min(unit_rows, rows.out - first_row(unit)); }
    int64_t sums() const { return channel_tiles * places * TALL * WIDE; }  // for one tile of outputs
};

static void pack_x(const Blocks &b, const float *x, int64_t first, int64_t count, float *panels) {
    const Axis &w = b.columns;
    const int64_t left = std::min(w.pad, b.met_columns), right = std::max(left, std::min(b.met_columns, w.size + w.pad));
    for (int64_t u = 0; u < count; u++)
        for (int64_t r = 0; r < b.met_rows; r++) {
            const int64_t row = b.first_row(first + u) * b.rows.stride - b.rows.pad + r;
            const bool inside = row >= 0 && row < b.rows.size;
            const float *from = x + (b.image(first + u) * b.rows.size + row) * w.size * b.channels;
            for (int64_t tile = 0; tile < b.channel_tiles; tile++) {
                const int64_t n = b.height(tile);
                float *to = panels + tile * b.x_panel + (u * b.met_rows + r) * b.met_columns * n;
                const int64_t begin = inside ? left : b.met_columns, end = inside ? right : b.met_columns;
                std::fill(to, to + begin * n, 0.0f);
                std::fill(to + end * n, to + b.met_columns * n, 0.0f);
                if (begin < end)
                    with_constant(n, [&](auto height) {
                        copy_pieces<height>(from + (begin - w.pad) * b.channels + b.channel(tile), b.channels, to + begin * n, end - begin);
                    });
            }
        }
}

static void pack_dy(const Blocks &b, const float *dy, int64_t first, int64_t count, int64_t tile, float *panel) {
    const int64_t n = std::min<int64_t>(WIDE, b.outs - tile * WIDE), of_unit = b.unit_rows * b.columns.out;
    for (int64_t u = 0; u < count; u++) {
        const int64_t positions = b.rows_of(first + u) * b.columns.out;
        const float *from = dy + (b.image(first + u) * b.rows.out + b.first_row(first + u)) * b.columns.out * b.outs + tile * WIDE;
        float *to = panel + u * of_unit * WIDE;
        if (n == WIDE) {
            copy_pieces<WIDE>(from, b.outs, to, positions);
            continue;
        }
        for (int64_t p = 0; p < positions; p++, from += b.outs, to += WIDE) std::fill(std::copy(from, from + n, to), to + WIDE, 0.0f);
    }
}

// sums[HEIGHT][WIDE] += what the positions of a block add at one place of the window.
template <int HEIGHT>
static __attribute__((noinline)) void add_block(const Blocks &b, int64_t first, int64_t count, const float *x, const float *dy, float *sums) {
    Vec<float> tile[HEIGHT][ACROSS];
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) tile[i][j] = load<float>(sums + i * WIDE + j * LANES<float>);
    for (int64_t u = 0; u < count; u++) {
        const float *from = x + u * b.met_rows * b.met_columns * HEIGHT, *with = dy + u * b.unit_rows * b.columns.out * WIDE;
        for (int64_t r = 0; r < b.rows_of(first + u); r++)
            add_product<float, HEIGHT, ACROSS>(b.columns.out, from + r * b.rows.stride * b.met_columns * HEIGHT, 1,
                                               b.columns.stride * HEIGHT, with + r * b.columns.out * WIDE, WIDE, tile);
    }
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++) store<float>(sums + i * WIDE + j * LANES<float>, tile[i][j]);
}

// The sums of some units, of some tiles of outputs.
static void add_units(const Blocks &b, const float *x, const float *dy, int64_t unit, int64_t end, int64_t first_tile, int64_t last_tile, float *sums) {
    float *panels = scratch<float>(b.channel_tiles * b.x_panel), *dy_panel = scratch<float>(b.dy_panel);
    for (; unit < end; unit += b.units) {
        const int64_t count = std::min(b.units, end - unit);
        pack_x(b, x, unit, count, panels);
        float *into = sums;
        for (int64_t out = first_tile; out < last_tile; out++) {
            pack_dy(b, dy, unit, count, out, dy_panel);
            for (int64_t tile = 0; tile < b.channel_tiles; tile++)
                with_constant(b.height(tile), [&](auto height) {
                    for (int64_t place = 0; place < b.places; place++, into += TALL * WIDE) {
                        const int64_t row = place / b.columns.window * b.rows.dilation, column = place % b.columns.window * b.columns.dilation;
                        const float *met = panels + tile * b.x_panel + (row * b.met_columns + column) * height;
                        add_block<height>(b, unit, count, met, dy_panel, into);
                    }
                });
        }
    }
    std::free(panels);
    std::free(dy_panel);
}

// dw[o, c, k, l] in order, from the sums of `parts` threads.
static void write(const Blocks &b, const float *sums, int64_t parts, int64_t threads, float *dw) {
    parallel_for(b.channels * b.outs < 4096 ? 1 : threads, b.outs, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; o++)
            for (int64_t c = 0; c < b.channels; c++) {
                const int64_t tile = b.tile_of(c), at = (o / WIDE * b.channel_tiles + tile) * b.places * TALL + c - b.channel(tile);
                for (int64_t place = 0; place < b.places; place++) {
                    float sum = 0;
                    for (int64_t t = 0; t < parts; t++) sum += sums[t * b.out_tiles * b.sums() + (at + place * TALL) * WIDE + o % WIDE];
                    dw[(o * b.channels + c) * b.places + place] = sum;
                }
            }
    });
}

extern "C" {

// sizes: those of Sizes. No size is 0.
void weight_gradient(const float *x, const float *dy, float *dw, const int64_t *sizes, int64_t threads) {
    Sizes given;
    std::memcpy(&given, sizes, sizeof given);
    const Blocks b(given);
    const int64_t units = b.images * b.of_image, all = b.out_tiles * b.sums();
    const bool shared = all >= SHARED && b.out_tiles >= threads;
    const int64_t parts = shared ? 1 : std::min(threads, units);
    float *sums = static_cast<float *>(std::calloc(size_t(parts * all), sizeof(float)));
    if (sums == nullptr) std::abort();
    if (shared)
        parallel_for(threads, b.out_tiles, [&](int64_t begin, int64_t end) { add_units(b, x, dy, 0, units, begin, end, sums + begin * b.sums()); });
    else
        parallel_for(parts, parts, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) add_units(b, x, dy, units * t / parts, units * (t + 1) / parts, 0, b.out_tiles, sums + t * all);
        });
    write(b, sums, parts, threads, dw);
    std::free(sums);
}

}
