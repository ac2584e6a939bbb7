// Trains artifacts on digits, and prints one line of JSON: the losses, and the accuracy on digits that it has not seen.
//
//   train FOLDER [STEPS [CHECKPOINT]]
//
// FOLDER holds the artifacts, untrained.safetensors and digits.bin (examples/web/artifacts.py says what they are).
// CHECKPOINT is written at the end.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "training.h"

namespace {

constexpr int64_t kTraining = 1400, kBatch = 50, kPixels = 64, kClasses = 10;

struct Digits {
  std::vector<float> pixels;
  std::vector<int64_t> labels;
};

Digits read_digits(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Digits digits;
  for (size_t record = 0; record + kPixels < bytes.size(); record += kPixels + 1) {
    for (int64_t pixel = 0; pixel < kPixels; ++pixel) digits.pixels.push_back(static_cast<float>(bytes[record + pixel]) / 16);
    digits.labels.push_back(bytes[record + kPixels]);
  }
  return digits;
}

// The digits from `begin` on, as the graphs take them: images, then labels.
Inputs batch(const Training& training, Digits& digits, int64_t begin, int64_t count) {
  const auto names = training.input_names();
  Inputs inputs;
  inputs.emplace(names.at(0), tensor_on(digits.pixels.data() + begin * kPixels, {count, 1, 8, 8}));
  inputs.emplace(names.at(1), tensor_on(digits.labels.data() + begin, {count}));
  return inputs;
}

double accuracy(Training& training, Digits& digits) {
  const int64_t count = static_cast<int64_t>(digits.labels.size()) - kTraining;
  const auto logits = training.evaluate(batch(training, digits, kTraining, count), "logits");
  const float* row = logits.GetTensorData<float>();
  int64_t right = 0;
  for (int64_t index = 0; index < count; ++index, row += kClasses) {
    right += std::max_element(row, row + kClasses) - row == digits.labels[kTraining + index];
  }
  return static_cast<double>(right) / count;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2 || argc > 4) {
    std::cerr << "usage: train FOLDER [STEPS [CHECKPOINT]]\n";
    return 2;
  }
  const std::string folder = argv[1];
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 100;
  Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "onnxtrain");
  Training training(environment, folder, "untrained.safetensors");
  Digits digits = read_digits(folder + "/digits.bin");
  std::vector<float> losses;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t begin = step * kBatch % kTraining;
    losses.push_back(training.train_step(batch(training, digits, begin, std::min(kBatch, kTraining - begin))));
    training.optimizer_step();
    training.lazy_reset_grad();
  }
  if (argc > 3) training.save(argv[3]);
  std::cout << nlohmann::json{{"losses", losses}, {"accuracy", accuracy(training, digits)}} << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
