// Trains on the digits in their order: so runs in Python, in Node and in browsers can be compared, step by step.

import { asBatch } from "./digits.js";

const BATCH = 50;

/**
 * @param {import("./training.js").Training} training
 * @param {Example[]} examples
 * @param {number} steps
 * @param {(step: number) => void} [afterStep]
 * @returns {Promise<number[]>} the loss of each step.
 */
export async function trainInOrder(training, examples, steps, afterStep = () => {}) {
  const losses = [];
  for (let step = 0; step < steps; step++) {
    const start = (step * BATCH) % examples.length;
    losses.push(await training.trainStep(asBatch(training, examples.slice(start, start + BATCH))));
    await training.optimizerStep();
    training.lazyResetGrad();
    afterStep(step);
  }
  return losses;
}
