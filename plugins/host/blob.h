// What a plan holds of a plugin: whose it is and its fields, as bytes and back.
//
// Owns the form of the bytes and the memory of fields. Invariant: reading never leaves the bytes
// given, whatever is in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "abi/nv_infer.h"

namespace looptrt::host {

// Bytes of one value of a field; 0 for a type that has no fixed size.
int64_t fieldValueBytes(nvinfer1::PluginFieldType type);

// A field with memory of its own; without data where its maker gave none.
struct StoredField {
  std::string name;
  nvinfer1::PluginFieldType type;
  int32_t length;
  std::vector<uint8_t> data;
};

// Copies of a collection's fields; none if one has no name, or data of unknown size.
std::optional<std::vector<StoredField>> storeFields(nvinfer1::PluginFieldCollection const& fields);

struct Blob {
  std::string name, version, name_space;
  std::vector<StoredField> fields;

  std::vector<uint8_t> write() const;
  // None unless the bytes are exactly what `write` makes.
  static std::optional<Blob> read(uint8_t const* bytes, int64_t size);
};

}  // namespace looptrt::host
