// A checkpoint file: 8 bytes with the length of a JSON header, the header, the tensors. Little-endian machines only.
// https://huggingface.co/docs/safetensors

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace safetensors {

struct Tensor {
  std::string dtype;  // "F32", "I64", …
  std::vector<int64_t> shape;
  std::vector<std::byte> data;
};

struct File {
  std::map<std::string, Tensor> tensors;
  nlohmann::json metadata;  // text by text
};

inline File read(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error(path + " cannot be read");
  const auto size = static_cast<uint64_t>(file.tellg());
  const auto damaged = [&path](const char* what) { return std::runtime_error(path + " is not a safetensors file: " + what); };
  uint64_t length = 0;
  file.seekg(0).read(reinterpret_cast<char*>(&length), sizeof length);
  if (!file || size < sizeof length || length > size - sizeof length) throw damaged("its header is cut off");
  std::string text(length, '\0');
  file.read(text.data(), static_cast<std::streamsize>(length));
  const auto header = nlohmann::json::parse(text);
  const uint64_t begin = sizeof length + length;
  File result;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      result.metadata = entry;
      continue;
    }
    const uint64_t from = entry.at("data_offsets").at(0), to = entry.at("data_offsets").at(1);
    if (from > to || to > size - begin) throw damaged("a tensor is outside the file");
    Tensor tensor{entry.at("dtype"), entry.at("shape"), std::vector<std::byte>(to - from)};
    file.seekg(static_cast<std::streamoff>(begin + from));
    file.read(reinterpret_cast<char*>(tensor.data.data()), static_cast<std::streamsize>(to - from));
    if (!file) throw damaged("a tensor is cut off");
    result.tensors.emplace(name, std::move(tensor));
  }
  return result;
}

// The file appears whole or not at all: it is written beside `path`, then renamed. The widest types go first, so that
// each tensor is aligned to its width.
inline void write(const std::string& path, const File& content) {
  nlohmann::json header;
  header["__metadata__"] = content.metadata;
  header["__metadata__"].erase("onnxtrain.crc32");  // of the file that was read
  std::vector<const Tensor*> order;
  uint64_t offset = 0;
  for (const bool wide : {true, false}) {
    for (const auto& [name, tensor] : content.tensors) {
      if ((tensor.dtype.find("64") != std::string::npos) != wide) continue;
      const uint64_t end = offset + tensor.data.size();
      header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
      order.push_back(&tensor);
      offset = end;
    }
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  const std::string partial = path + ".partial";
  {
    std::ofstream file(partial, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length) << text;
    for (const Tensor* tensor : order) {
      file.write(reinterpret_cast<const char*>(tensor->data.data()), static_cast<std::streamsize>(tensor->data.size()));
    }
    if (!file.flush()) throw std::runtime_error(partial + " cannot be written");
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) throw std::runtime_error(path + " cannot be written");
}

}  // namespace safetensors
