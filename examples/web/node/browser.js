// How scripts start headless Chromium.

import { chromium } from "playwright-core";

const LAUNCH = [
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
// WebGPU without a GPU: a software adapter, right and slow.
const SOFTWARE_GPU = [
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--enable-features=Vulkan",
  "--ignore-gpu-blocklist",
];

// Milliseconds that any one thing may take: seconds on a machine that is free, minutes on one that compiles beside it.
const PATIENCE = 300_000;

/** Starts the browser at a path, with WebGPU where the backend is "webgpu", and opens a page. */
export async function open(executablePath, backend, options = {}) {
  const browser = await chromium.launch({
    executablePath,
    timeout: PATIENCE,
    args: [...LAUNCH, ...(backend === "webgpu" ? SOFTWARE_GPU : ["--disable-gpu"])],
  });
  const page = await browser.newPage(options);
  page.setDefaultTimeout(PATIENCE);
  return { browser, page };
}

/** The promise, or an error that names what was waited for in vain. */
export function within(promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${what}: nothing for ${PATIENCE / 1000} seconds.`)), PATIENCE);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
