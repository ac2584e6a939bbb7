// Trains on the digits in their order: so runs in Python, in Node and in browsers can be compared, step by step.

import { asBatch } from "./digits.js";

const BATCH = 50;

/**
 * Trains without end; each turn is one step.
 *
 * @param {import("./training.js").Training} training
 * @param {Example[]} examples
 * @yields {number} the loss of the step.
 */
export async function* trainInOrder(training, examples) {
  for (let step = 0; ; step++) {
    const start = (step * BATCH) % examples.length;
    const loss = await training.trainStep(asBatch(training, examples.slice(start, start + BATCH)));
    await training.optimizerStep();
    training.lazyResetGrad();
    yield loss;
  }
}
