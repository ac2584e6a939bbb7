// The loss curve: each step as a faint line, their running mean as a strong one.

const WIDTH = 600;
const HEIGHT = 220;
const MEMORY = 0.9; // of the running mean
const POINTS = 300; // drawn at most

export class LossChart {
  /**
   * @param {SVGElement} svg - with the paths .each, .mean and .area.
   * @param {HTMLElement} scale - says what the height stands for.
   */
  constructor(svg, scale) {
    this.svg = svg;
    this.scale = scale;
    this.part = (name) => svg.querySelector(`.${name}`);
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.clear();
  }

  clear() {
    this.each = [];
    this.mean = [];
    this.sum = 0;
    this.paint();
  }

  add(loss) {
    this.each.push(loss);
    this.sum = MEMORY * this.sum + (1 - MEMORY) * loss;
    this.mean.push(this.sum / (1 - MEMORY ** this.each.length)); // else the first steps would count for too little
    this.waiting ??= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.waiting = undefined;
    const top = Math.max(0.1, ...thinned(this.each)) * 1.08;
    const line = (values) => {
      const shown = thinned(values);
      const x = (index) => (shown.length > 1 ? (index / (shown.length - 1)) * WIDTH : 0);
      return shown.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${(HEIGHT * (1 - v / top)).toFixed(1)}`).join("");
    };
    const mean = line(this.mean);
    this.part("each").setAttribute("d", line(this.each));
    this.part("mean").setAttribute("d", mean);
    this.part("area").setAttribute("d", mean && `${mean}L${WIDTH},${HEIGHT}L0,${HEIGHT}Z`);
    const last = this.mean.at(-1);
    const text = last === undefined ? "No step yet." : `Loss ${last.toFixed(3)} after ${this.each.length} steps.`;
    this.svg.setAttribute("aria-label", text);
    this.scale.textContent = last === undefined ? "" : `loss, 0 to ${top.toFixed(1)}`;
  }

  /** The running mean after the last step. */
  get last() {
    return this.mean.at(-1);
  }
}

/** At most POINTS of the values, evenly, the last one among them. */
function thinned(values) {
  const stride = Math.ceil(values.length / POINTS);
  return stride < 2 ? values : values.filter((_, index) => (values.length - 1 - index) % stride === 0);
}
