// The training API on the C++ face of onnxruntime's C API: the same artifacts and steps as onnxtrain.api in Python.
//
//   Training training(environment, folder, "checkpoint");
//   const float loss = training.train_step({{"image", image}, {"labels", labels}});
//   training.optimizer_step();
//   training.lazy_reset_grad();
//
// Parameters, gradients and moments are in memory of this class. The graphs read and update them in place: a graph's
// output `X.out` is bound to the memory of its input `X`.

#pragma once

#include <onnxruntime_cxx_api.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "safetensors.h"

using Shape = std::vector<int64_t>;
using Inputs = std::map<std::string, Ort::Value>;

inline int64_t count_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// A tensor that uses the caller's memory.
template <typename T>
Ort::Value tensor_on(T* data, const Shape& shape) {
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  return Ort::Value::CreateTensor<T>(memory, data, static_cast<size_t>(count_of(shape)), shape.data(), shape.size());
}

// One of the artifacts, with what it says about itself.
struct Graph {
  Graph(Ort::Env& environment, const std::string& path) : session(environment, path.c_str(), options()), binding(session) {
    Ort::AllocatorWithDefaultOptions allocator;
    const auto text = session.GetModelMetadata().LookupCustomMetadataMapAllocated("onnxtrain", allocator);
    if (!text) throw std::runtime_error(path + " was not made by onnxtrain");
    facts = nlohmann::json::parse(text.get());
    for (size_t index = 0; index < session.GetInputCount(); ++index) {
      inputs.emplace_back(session.GetInputNameAllocated(index, allocator).get());
    }
  }

  static Ort::SessionOptions options() {
    Ort::SessionOptions result;
    result.SetIntraOpNumThreads(1);
    result.AddConfigEntry("session.disable_prepacking", "1");  // a packed copy of a weight would not follow its updates
    return result;
  }

  std::vector<std::string> names(const char* kind) const { return facts.value(kind, std::vector<std::string>{}); }

  Ort::Session session;
  Ort::IoBinding binding;
  nlohmann::json facts;
  std::vector<std::string> inputs;
};

// A training of float32 parameters, which is what PyTorch's modules have unless they are told otherwise.
class Training {
 public:
  Training(Ort::Env& environment, const std::string& folder, const std::string& checkpoint)
      : training_(environment, folder + "/training_model.onnx"),
        evaluation_(environment, folder + "/eval_model.onnx"),
        optimizer_(environment, folder + "/optimizer_model.onnx"),
        state_(safetensors::read(folder + "/" + checkpoint)),
        entry_(nlohmann::json::parse(state_.metadata.at("onnxtrain").get<std::string>())) {
    steps_ = entry_.value("step", int64_t{0});
    draws_ = entry_.value("draws", int64_t{0});
    seed_ = entry_.value("seed", int64_t{0});
    for (const auto& name : training_.names("trainable")) reset_due_ = reset_due_ && !state_.tensors.count(gradient(name));
    if (entry_.value("learning_rate", nlohmann::json()).is_number()) learning_rate = entry_["learning_rate"];
    bind(training_);
    bind(evaluation_);
    bind(optimizer_);
  }

  // Computes the loss, and adds its gradients to those since the last reset.
  float train_step(const Inputs& inputs) {
    int64_t seed = seed_ + draws_;
    const auto reset = tensor_on(&reset_due_, {1}), random_seed = tensor_on(&seed, {1});
    training_.binding.BindInput("lazy_reset_grad", reset);
    if (training_.facts.at("draws")) training_.binding.BindInput("random_seed", random_seed);
    const auto loss = run(training_, inputs, training_.names("outputs").at(0));
    reset_due_ = false;
    ++draws_;
    return *loss.GetTensorData<float>();
  }

  // Changes the parameters along the gradients.
  void optimizer_step() {
    Inputs inputs;
    inputs.emplace("learning_rate", tensor_on(&learning_rate, {1}));
    inputs.emplace("step", tensor_on(&steps_, {1}));
    run(optimizer_, inputs, "");
    ++steps_;
  }

  // Makes the next training step start the gradients anew.
  void lazy_reset_grad() { reset_due_ = true; }

  // An output of the eval graph; all of the user's inputs are needed.
  Ort::Value evaluate(const Inputs& inputs, const std::string& output) { return run(evaluation_, inputs, output); }

  // Writes all of the state as a checkpoint that Python reads too.
  void save(const std::string& path) const {
    safetensors::File content = state_;
    for (const auto& name : training_.names("trainable")) {
      if (reset_due_) content.tensors.erase(gradient(name));  // they will not be read
    }
    auto entry = entry_;
    entry["step"] = steps_;
    entry["draws"] = draws_;
    entry["learning_rate"] = learning_rate;
    content.metadata["onnxtrain"] = entry.dump();
    safetensors::write(path, content);
  }

  // What a training step and an evaluation take, in the order of the model's and the loss's inputs.
  std::vector<std::string> input_names() const { return training_.names("inputs"); }

  float learning_rate = 1e-3F;

 private:
  static std::string gradient(const std::string& name) { return "onnxtrain:gradient/" + name; }

  // The position in the checkpoint of each input of a graph that is not the user's.
  std::map<std::string, std::string> places(const Graph& graph) const {
    std::map<std::string, std::string> found;
    for (const char* kind : {"trainable", "frozen", "buffers"}) {
      for (const auto& name : graph.names(kind)) found[name] = name;
    }
    for (const auto& name : graph.names("trainable")) {
      found[name + "_grad"] = found[name + "_grad.accumulation.buffer"] = gradient(name);
      for (const auto& state : graph.names("state")) {
        found[name + "." + state] = "onnxtrain:optimizer/" + state + "/" + name;
      }
    }
    return found;
  }

  // Binds the memory of parameters, gradients and moments; zeros where the checkpoint has none yet.
  void bind(Graph& graph) {
    const auto known = places(graph);
    std::set<std::string> in_chunks;
    for (const auto& name : graph.names("in_chunks")) {
      in_chunks.insert({name, name + "_grad"});
      for (const auto& state : graph.names("state")) in_chunks.insert(name + "." + state);
    }
    std::map<std::string, Ort::Value> values;
    for (const auto& name : graph.inputs) {
      const auto place = known.find(name);
      if (place == known.end()) continue;
      const auto& parameter = state_.tensors.at(parameter_of(place->second));
      auto& tensor = state_.tensors[place->second];
      if (tensor.data.empty()) tensor = {parameter.dtype, parameter.shape, std::vector<std::byte>(parameter.data.size())};
      if (tensor.dtype != "F32") throw std::runtime_error(name + " is " + tensor.dtype + "; this example takes F32");
      const int64_t size = count_of(tensor.shape), chunks = chunks_of(size);
      const Shape shape = in_chunks.count(name) ? Shape{chunks, size / chunks} : tensor.shape;
      auto value = tensor_on(reinterpret_cast<float*>(tensor.data.data()), shape);
      graph.binding.BindInput(name.c_str(), value);
      values.emplace(name, std::move(value));
    }
    for (const auto& [output, name] : graph.facts.at("updates").items()) {
      graph.binding.BindOutput(output.c_str(), values.at(name.get<std::string>()));
    }
  }

  // "w" of "w", "onnxtrain:gradient/w" and "onnxtrain:optimizer/<state>/w".
  static std::string parameter_of(const std::string& place) {
    for (const std::string start : {"onnxtrain:gradient/", "onnxtrain:optimizer/"}) {
      if (place.rfind(start, 0) != 0) continue;
      return place.substr(start == "onnxtrain:gradient/" ? start.size() : place.find('/', start.size()) + 1);
    }
    return place;
  }

  // Into how many equal chunks of about 32,768 elements so many are cut: they stay in the cache while they are updated.
  static int64_t chunks_of(int64_t size) {
    int64_t best = 1;
    const auto distance = [size](int64_t n) { return std::abs(std::log(static_cast<double>(size) / n / 32768)); };
    for (int64_t n = 1; n <= size / 8192; ++n) {
      if (size % n == 0 && distance(n) < distance(best)) best = n;
    }
    return best;
  }

  // Runs a graph, updates what is bound in place, and gives one output, if a name is given.
  static Ort::Value run(Graph& graph, const Inputs& inputs, const std::string& output) {
    for (const auto& [name, value] : inputs) graph.binding.BindInput(name.c_str(), value);
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    if (!output.empty()) graph.binding.BindOutput(output.c_str(), memory);
    graph.session.Run(Ort::RunOptions(), graph.binding);
    if (output.empty()) return Ort::Value(nullptr);
    const auto names = graph.binding.GetOutputNames();
    auto values = graph.binding.GetOutputValues();
    for (size_t index = 0; index < names.size(); ++index) {
      if (names[index] == output) return std::move(values[index]);
    }
    throw std::runtime_error("the graph has no output " + output);
  }

  Graph training_, evaluation_, optimizer_;
  safetensors::File state_;
  nlohmann::json entry_;
  int64_t steps_ = 0, draws_ = 0, seed_ = 0;
  bool reset_due_ = true;
};
