// The drawing pad: strokes by mouse, finger or pen, and by the arrow keys.

const KEY_STEP = 1 / 24; // of the pad's side
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Calls `onChange(strokes)` whenever what is drawn has changed. Points run from 0 to 1. */
export class Pad {
  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.onChange = onChange;
    this.strokes = [];
    this.drawing = null; // the pointer that draws
    this.pen = null; // where the keyboard's pen is, once it is used
    this.penDown = false;
    canvas.addEventListener("pointerdown", (event) => this.start(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => this.stop(event));
    // A stroke is not a gesture: Chromium would take it for the start of a fling, and the next tap for its end.
    canvas.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.liftPen());
    new ResizeObserver(() => this.paint()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  clear() {
    this.strokes = [];
    this.penDown = false;
    this.changed();
  }

  undo() {
    this.strokes.pop();
    this.penDown = false;
    this.changed();
  }

  point({ clientX, clientY }) {
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    return [(clientX - left) / width, (clientY - top) / height];
  }

  start(event) {
    if (this.drawing !== null || event.button) return;
    this.drawing = event.pointerId;
    this.canvas.setPointerCapture(event.pointerId);
    this.pen = null;
    this.strokes.push([this.point(event)]);
    this.changed();
  }

  move(event) {
    if (event.pointerId !== this.drawing) return;
    const events = event.getCoalescedEvents?.() ?? [];
    this.strokes.at(-1).push(...(events.length ? events : [event]).map((one) => this.point(one)));
    this.changed();
  }

  stop(event) {
    if (event.pointerId === this.drawing) this.drawing = null;
  }

  key(event) {
    const move = MOVES[event.key];
    if (!move && event.key !== " ") return;
    event.preventDefault();
    this.pen ??= [0.5, 0.2];
    if (move) this.pen = this.pen.map((at, axis) => Math.min(0.95, Math.max(0.05, at + move[axis] * KEY_STEP)));
    else if ((this.penDown = !this.penDown)) this.strokes.push([]);
    if (this.penDown) this.strokes.at(-1).push([...this.pen]);
    this.changed();
  }

  liftPen() {
    this.pen = null;
    this.penDown = false;
    this.paint();
  }

  changed() {
    this.paint();
    this.onChange(this.strokes);
  }

  paint() {
    const { canvas } = this;
    const side = Math.round(canvas.clientWidth * devicePixelRatio);
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    context.clearRect(0, 0, side, side);
    context.lineCap = context.lineJoin = "round";
    context.lineWidth = side * 0.06;
    context.strokeStyle = style.color;
    for (const stroke of this.strokes) {
      context.beginPath();
      stroke.forEach(([x, y], index) => context[index ? "lineTo" : "moveTo"](x * side, y * side));
      if (stroke.length === 1) context.lineTo(stroke[0][0] * side, stroke[0][1] * side);
      context.stroke();
    }
    if (!this.pen) return;
    context.beginPath();
    context.arc(this.pen[0] * side, this.pen[1] * side, side * 0.03, 0, 2 * Math.PI);
    context.lineWidth = side * 0.008;
    context.strokeStyle = context.fillStyle = style.accentColor;
    context[this.penDown ? "fill" : "stroke"]();
  }
}
