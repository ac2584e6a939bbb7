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

/** Starts the browser at a path; with WebGPU where the backend is "webgpu". */
export function launch(executablePath, backend) {
  return chromium.launch({
    executablePath,
    args: [...LAUNCH, ...(backend === "webgpu" ? SOFTWARE_GPU : ["--disable-gpu"])],
  });
}
