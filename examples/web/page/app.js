// The page: passes drawings to the worker, and shows what it says.

import { LossChart } from "./chart.js";
import { SIZE, rasterize } from "./digits.js";
import { Pad } from "./pad.js";

const find = (id) => document.getElementById(id);
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const chart = new LossChart(find("chart"), find("scale"));
const pad = new Pad(find("pad"), drawn);
const percent = (share) => `${(100 * share).toFixed(share === 1 ? 0 : 1)} %`;

let ready = false;
let training = false;
let examples = []; // {strokes, label, item}
let guesses = 0; // asked so far: only the last answer counts

// Drawing

const keys = Array.from({ length: 10 }, (_, digit) => {
  const key = document.createElement("button");
  key.type = "button";
  key.innerHTML = `<span class="bar"></span><span class="digit">${digit}</span>`;
  key.setAttribute("aria-label", `It is a ${digit}`);
  key.addEventListener("click", () => keep(digit));
  find("keys").append(key);
  return key;
});

function drawn(strokes) {
  guesses += 1;
  const some = strokes.some((stroke) => stroke.length);
  find("undo").disabled = find("clear").disabled = !some;
  for (const key of keys) key.disabled = !some || !ready;
  if (some && ready) worker.postMessage({ type: "guess", strokes, id: guesses });
  else showGuess(null);
}

function showGuess(probabilities) {
  const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
  keys.forEach((key, digit) => {
    key.style.setProperty("--share", probabilities?.[digit] ?? 0);
    key.classList.toggle("best", digit === best);
  });
  const reads = probabilities && `It reads a <strong>${best}</strong>, ${percent(probabilities[best])} sure`;
  find("reading").innerHTML = reads ?? (ready ? "Ready when you are" : "Getting ready…");
}

function keep(label) {
  const strokes = pad.strokes.filter((stroke) => stroke.length);
  if (!strokes.length || !ready) return;
  const example = { strokes, label, item: thumbnail(strokes, label) };
  example.item.querySelector("button").addEventListener("click", () => remove(example));
  examples.push(example);
  find("gallery").append(example.item);
  pad.clear();
  changed();
}

function remove(example) {
  examples = examples.filter((other) => other !== example);
  const next = example.item.nextElementSibling ?? example.item.previousElementSibling;
  example.item.remove();
  (next?.querySelector("button") ?? find("pad")).focus({ preventScroll: true });
  changed();
}

function changed() {
  find("empty").hidden = examples.length > 0;
  worker.postMessage({ type: "examples", list: examples.map(({ strokes, label }) => ({ strokes, label })) });
  if (!examples.length) pause();
  showButtons();
}

function thumbnail(strokes, label) {
  const item = document.createElement("li");
  item.innerHTML = `<button type="button" title="Remove"><canvas width="${SIZE}" height="${SIZE}"></canvas></button>
    <span class="label">${label}</span>`;
  item.querySelector("button").setAttribute("aria-label", `Remove this ${label}`);
  const context = item.querySelector("canvas").getContext("2d");
  const image = context.createImageData(SIZE, SIZE);
  rasterize(strokes).forEach((ink, index) => image.data.set([79, 70, 229, 255 * ink], 4 * index));
  context.putImageData(image, 0, 0);
  return item;
}

// Learning

function showButtons() {
  find("train").disabled = !ready || !examples.length;
  find("train").textContent = training ? "Pause" : "Train";
  find("train").classList.toggle("running", training);
  find("reset").disabled = find("download").disabled = find("backend").disabled = !ready || training;
}

function pause() {
  worker.postMessage({ type: "pause" });
}

find("train").addEventListener("click", () => {
  if (training) return pause();
  training = true;
  worker.postMessage({ type: "train" });
  showButtons();
});

find("reset").addEventListener("click", () => {
  worker.postMessage({ type: "reset" });
  chart.clear();
  find("loss").textContent = "–";
  find("speed").textContent = "";
});

find("download").addEventListener("click", () => worker.postMessage({ type: "model" }));
find("undo").addEventListener("click", () => pad.undo());
find("clear").addEventListener("click", () => pad.clear());
find("backend").addEventListener("change", open);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
  if (/^[0-9]$/.test(event.key)) keep(Number(event.key));
  else if (event.key === "Backspace") pad.undo();
  else if (event.key === "Escape") pad.clear();
});

function open() {
  ready = false;
  showButtons();
  showGuess(null);
  worker.postMessage({ type: "open", backend: find("backend").value });
}

const handlers = {
  ready() {
    ready = true;
    document.body.dataset.ready = find("backend").value;
    showButtons();
    drawn(pad.strokes);
  },
  guess({ id, probabilities }) {
    if (id === guesses) showGuess(probabilities);
  },
  step({ loss, milliseconds }) {
    chart.add(loss);
    find("loss").textContent = chart.last.toFixed(3);
    find("speed").textContent = `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms a step`;
  },
  report({ test, reads, step }) {
    find("test").textContent = percent(test);
    find("steps").textContent = step;
    if (reads.length !== examples.length) return; // a newer list is on its way
    const right = examples.map(({ label }, index) => label === reads[index]);
    find("own").textContent = right.length ? `${right.filter(Boolean).length} of ${right.length}` : "–";
    examples.forEach(({ item, label }, index) => {
      item.className = right[index] ? "right" : "wrong";
      item.querySelector(".label").textContent = right[index] ? label : `${label}, not ${reads[index]}`;
    });
  },
  paused() {
    training = false;
    showButtons();
    drawn(pad.strokes); // it may read it otherwise now
  },
  model({ bytes }) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
    link.download = "my-digits.onnx";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  },
  error({ text }) {
    find("problem").textContent = `It stopped: ${text} Reload the page to try again.`;
    find("problem").hidden = false;
  },
};

worker.addEventListener("message", ({ data }) => handlers[data.type](data));
worker.addEventListener("error", (event) => handlers.error({ text: event.message ?? "the worker did not start." }));

const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
if (adapter) find("backend").querySelector("[value=webgpu]").disabled = false;
else find("backend").querySelector("[value=webgpu]").textContent = "GPU (no WebGPU here)";
if (adapter && location.hash === "#webgpu") find("backend").value = "webgpu";
showButtons();
open();
