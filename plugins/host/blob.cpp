#include "blob.h"

#include <cstring>
#include <utility>

namespace looptrt::host {

using nvinfer1::PluginFieldType;

namespace {

class Reader {
 public:
  Reader(uint8_t const* bytes, int64_t size) : next_(bytes), left_(size) {}

  bool isDone() const { return left_ == 0; }

  bool take(void* to, int64_t size) {
    if (size < 0 || size > left_) return false;
    if (size != 0) std::memcpy(to, next_, static_cast<size_t>(size));
    next_ += size;
    left_ -= size;
    return true;
  }

  bool number(int32_t& value) { return take(&value, sizeof value); }

  bool text(std::string& value) {
    int32_t size = 0;
    if (!number(size) || size < 0 || size > left_) return false;
    value.resize(static_cast<size_t>(size));
    return take(value.data(), size);
  }

 private:
  uint8_t const* next_;
  int64_t left_;
};

void put(std::vector<uint8_t>& bytes, void const* from, size_t size) {
  auto const* first = static_cast<uint8_t const*>(from);
  bytes.insert(bytes.end(), first, first + size);
}

void putNumber(std::vector<uint8_t>& bytes, int32_t value) { put(bytes, &value, sizeof value); }

void putText(std::vector<uint8_t>& bytes, std::string const& value) {
  putNumber(bytes, static_cast<int32_t>(value.size()));
  put(bytes, value.data(), value.size());
}

bool readField(Reader& reader, StoredField& field) {
  int32_t type = 0;
  if (!reader.text(field.name) || !reader.number(type) || !reader.number(field.length)) {
    return false;
  }
  field.type = static_cast<PluginFieldType>(type);
  int64_t const size = fieldValueBytes(field.type) * field.length;
  if (size <= 0 || size > 1 << 20) return false;
  field.data.resize(static_cast<size_t>(size));
  return reader.take(field.data.data(), size);
}

}  // namespace

int64_t fieldValueBytes(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kINT8:
    case PluginFieldType::kCHAR:
      return 1;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kBF16:
    case PluginFieldType::kINT16:
      return 2;
    case PluginFieldType::kFLOAT32:
    case PluginFieldType::kINT32:
      return 4;
    case PluginFieldType::kFLOAT64:
    case PluginFieldType::kINT64:
      return 8;
    case PluginFieldType::kDIMS:
      return sizeof(nvinfer1::Dims);
    case PluginFieldType::kUNKNOWN:
      return 0;
  }
  return 0;
}

std::optional<std::vector<StoredField>> storeFields(nvinfer1::PluginFieldCollection const& fields) {
  std::vector<StoredField> stored;
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    nvinfer1::PluginField const& field = fields.fields[i];
    int64_t const size = fieldValueBytes(field.type) * field.length;
    if (field.name == nullptr || size < 0 || (size == 0 && field.data != nullptr)) {
      return std::nullopt;
    }
    auto const* first = static_cast<uint8_t const*>(field.data);
    std::vector<uint8_t> data;
    if (first != nullptr) data.assign(first, first + size);
    stored.push_back({field.name, field.type, field.length, std::move(data)});
  }
  return stored;
}

std::vector<uint8_t> Blob::write() const {
  std::vector<uint8_t> bytes;
  for (std::string const* text : {&name, &version, &name_space}) putText(bytes, *text);
  putNumber(bytes, static_cast<int32_t>(fields.size()));
  for (StoredField const& field : fields) {
    putText(bytes, field.name);
    putNumber(bytes, static_cast<int32_t>(field.type));
    putNumber(bytes, field.length);
    put(bytes, field.data.data(), field.data.size());
  }
  return bytes;
}

std::optional<Blob> Blob::read(uint8_t const* bytes, int64_t size) {
  Reader reader(bytes, size);
  Blob blob;
  int32_t num_fields = 0;
  bool const is_named =
      reader.text(blob.name) && reader.text(blob.version) && reader.text(blob.name_space);
  if (!is_named || !reader.number(num_fields)) return std::nullopt;
  for (int32_t i = 0; i < num_fields; ++i) {
    StoredField field{};
    if (!readField(reader, field)) return std::nullopt;
    blob.fields.push_back(std::move(field));
  }
  if (!reader.isDone()) return std::nullopt;
  return blob;
}

}  // namespace looptrt::host
