// scikit-learn's digits, and how a drawing becomes an image like them.

export const SIZE = 8; // pixels of an image's side
const CELLS = 32; // each pixel counts the ink in 4 x 4 cells of a finer grid
const TRAINING_DIGITS = 1400; // the other records of the file are for testing

/** @returns {{training: Example[], test: Example[]}} of pixels from 0 to 1 and a label. */
export function readDigits(buffer) {
  const record = SIZE * SIZE + 1;
  const examples = Array.from({ length: buffer.byteLength / record }, (_, index) => {
    const bytes = new Uint8Array(buffer, index * record, record);
    return { pixels: Float32Array.from(bytes.subarray(0, -1), (value) => value / 16), label: bytes.at(-1) };
  });
  return { training: examples.slice(0, TRAINING_DIGITS), test: examples.slice(TRAINING_DIGITS) };
}

/** The model's inputs for some examples. */
export function asBatch(training, examples) {
  const images = new Float32Array(examples.length * SIZE * SIZE);
  examples.forEach(({ pixels }, index) => images.set(pixels, index * SIZE * SIZE));
  const labels = BigInt64Array.from(examples, ({ label }) => BigInt(label));
  return {
    image: training.tensor("float32", images, [examples.length, 1, SIZE, SIZE]),
    labels: training.tensor("int64", labels, [examples.length]),
  };
}

/** The most likely digit of each example, and its probability for each of the ten. */
export async function guess(training, examples) {
  const { logits } = await training.evaluate(asBatch(training, examples), ["logits"]);
  const scores = await logits.getData();
  return examples.map((_, index) => {
    const own = scores.subarray(index * 10, index * 10 + 10);
    const top = Math.max(...own);
    const powers = Array.from(own, (score) => Math.exp(score - top));
    const sum = powers.reduce((a, b) => a + b);
    return { digit: own.indexOf(top), probabilities: powers.map((power) => power / sum) };
  });
}

/** The share of examples that are read right. */
export async function accuracy(training, examples) {
  const guesses = await guess(training, examples);
  return guesses.filter(({ digit }, index) => digit === examples[index].label).length / examples.length;
}

/**
 * Draws strokes as scikit-learn's digits were made: as large as the image, in the middle, ink counted in 4 x 4 cells.
 *
 * @param {number[][][]} strokes - lists of points [x, y], on any scale.
 * @param {number} width - of the pen, in cells of a grid of 32.
 * @returns {Float32Array} 64 pixels from 0 to 1, row by row.
 */
export function rasterize(strokes, width = 4.4) {
  const points = strokes.flat();
  const [left, right] = extent(points.map(([x]) => x));
  const [top, bottom] = extent(points.map(([, y]) => y));
  const room = CELLS - width;
  const scale = Math.min(room / Math.max(bottom - top, 1e-6), (0.8 * room) / Math.max(right - left, 1e-6), 1e4);
  const place = ([x, y]) => [
    CELLS / 2 + (x - (left + right) / 2) * scale,
    CELLS / 2 + (y - (top + bottom) / 2) * scale,
  ];
  const lines = strokes.flatMap((stroke) => {
    const placed = stroke.map(place);
    return placed.length === 1 ? [[placed[0], placed[0]]] : placed.slice(1).map((point, i) => [placed[i], point]);
  });
  const pixels = new Float32Array(SIZE * SIZE);
  for (let row = 0; row < CELLS; row++) {
    for (let column = 0; column < CELLS; column++) {
      const inked = lines.some((line) => distance(column + 0.5, row + 0.5, line) <= width / 2);
      if (inked) pixels[(row >> 2) * SIZE + (column >> 2)] += 1 / 16;
    }
  }
  return pixels;
}

/** The same strokes a little turned, slanted and stretched, with another pen: as if drawn again. */
export function redrawn(strokes, random) {
  const between = (low, high) => low + (high - low) * random();
  const [turn, slant, stretch] = [between(-0.12, 0.12), between(-0.2, 0.2), between(0.85, 1.15)];
  const [cos, sin] = [Math.cos(turn), Math.sin(turn)];
  const moved = ([x, y]) => [stretch * (x * cos - y * sin) + slant * y, x * sin + y * cos];
  return rasterize(strokes.map((stroke) => stroke.map(moved)), between(3.6, 5.4));
}

function extent(values) {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}

function distance(x, y, [[ax, ay], [bx, by]]) {
  const length = (bx - ax) ** 2 + (by - ay) ** 2;
  const along = length && Math.max(0, Math.min(1, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length));
  return Math.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay));
}
