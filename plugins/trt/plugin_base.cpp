#include "plugin_base.h"

#include <cstring>
#include <limits>
#include <new>

#include "logger.h"
#include "looptrt/trt_schema.h"

namespace looptrt::trt {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kOk = 0;
constexpr int32_t kFailed = 1;
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kUnknown = -1;  // a size before its first operand was seen

TensorSchema const& tensorAt(OpSchema const& op, int pos) {
  return pos < op.num_inputs ? op.inputs[pos] : op.outputs[pos - op.num_inputs];
}

DType toDType(DataType type) {
  return type == DataType::kFLOAT  ? DType::kFloat32
         : type == DataType::kBF16 ? DType::kBFloat16
                                   : DType::kFloat16;
}

int firstTable(OpSchema const& op) {
  for (int i = 0; i < op.num_inputs; ++i) {
    if (op.inputs[i].kind == Kind::kTable) return i;
  }
  return 0;
}

// Whether the tensor at `pos`, inputs first, may have its type, given those of earlier ones.
template <typename TypeAt>
bool typeFits(OpSchema const& op, int pos, TypeAt typeAt) {
  DataType const type = typeAt(pos), model = typeAt(0);
  switch (tensorAt(op, pos).kind) {
    case Kind::kInt32:
      return type == DataType::kINT32;
    case Kind::kInt64:
      return type == DataType::kINT64;
    case Kind::kTable:
      return pos == firstTable(op) ? type == model || type == DataType::kFLOAT
                                   : type == typeAt(firstTable(op));
    case Kind::kFloat:
      return pos == 0
                 ? type == DataType::kFLOAT || type == DataType::kBF16 || type == DataType::kHALF
                 : type == model;
  }
  return false;
}

PluginField fieldOf(AttributeSchema const& attribute, void const* data) {
  bool const is_int = attribute.type == AttributeType::kInt;
  auto const type = is_int ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
  return PluginField(attribute.name, data, type, 1);
}

}  // namespace

// ---- attributes

Plugin* Plugin::create(Adapter const& adapter, PluginFieldCollection const* fields) noexcept {
  auto* plugin = new (std::nothrow) Plugin(adapter);
  if (plugin == nullptr) {
    logError(adapter.op, "out of memory");
    return nullptr;
  }
  if (fields == nullptr) {
    logError(adapter.op, "no attributes");
  } else if (plugin->readAttributes(*fields) && plugin->deriveSizes()) {
    return plugin;
  }
  delete plugin;
  return nullptr;
}

bool Plugin::readAttributes(PluginFieldCollection const& fields) {
  for (int i = 0; i < op_.num_attributes; ++i) {
    PluginField const expected = fieldOf(op_.attributes[i], nullptr);
    PluginField const* field = nullptr;
    for (int32_t j = 0; j < fields.nbFields && field == nullptr; ++j) {
      char const* const name = fields.fields[j].name;
      if (name != nullptr && std::strcmp(name, expected.name) == 0) field = &fields.fields[j];
    }
    if (field == nullptr) {
      logError(op_, "attribute %s: missing", expected.name);
      return false;
    }
    if (field->type != expected.type || field->length != 1 || field->data == nullptr) {
      logError(op_, "attribute %s: expected one value of field type %d, got %d of type %d",
               expected.name, static_cast<int>(expected.type), field->length,
               static_cast<int>(field->type));
      return false;
    }
    std::memcpy(&attributes_[i], field->data, sizeof attributes_[i]);
  }
  return true;
}

bool Plugin::deriveSizes() {
  auto const attribute = [this](char const* name) -> int64_t {
    for (int i = 0; i < op_.num_attributes; ++i) {
      if (std::strcmp(op_.attributes[i].name, name) == 0) return attributes_[i].i;
    }
    return 0;
  };
  int64_t const heads = attribute("num_heads"), kv_heads = attribute("num_kv_heads"),
                head_dim = attribute("head_dim");
  for (int i = 0; i < op_.num_sizes; ++i) {
    SizeSchema const& size = op_.sizes[i];
    derived_[i] = kUnknown;
    if (size.by == 0) continue;
    // Beyond these bounds no width is a 32-bit number, and within them none overflows here.
    bool const is_small = heads > 0 && kv_heads > 0 && head_dim > 0 && heads < 1 << 20 &&
                          kv_heads < 1 << 20 && head_dim < 1 << 20;
    int64_t const width =
        is_small ? (size.heads * heads + size.kv_heads * kv_heads + size.plus) * head_dim / size.by
                 : 0;
    if (width < 1 || width > kMaxSize) {
      logError(op_, "no layout with num_heads %lld, num_kv_heads %lld, head_dim %lld",
               static_cast<long long>(heads), static_cast<long long>(kv_heads),
               static_cast<long long>(head_dim));
      return false;
    }
    derived_[i] = width;
  }
  return true;
}

PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept {
  for (int i = 0; i < op_.num_attributes; ++i) {
    fields_[i] = fieldOf(op_.attributes[i], &attributes_[i]);
  }
  collection_.nbFields = op_.num_attributes;
  collection_.fields = fields_;
  return &collection_;
}

// ---- identity

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

Plugin* Plugin::clone() noexcept {
  auto* copy = new (std::nothrow) Plugin(*this);
  if (copy == nullptr) logError(op_, "out of memory");
  return copy;
}

Plugin* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

char const* Plugin::getPluginName() const noexcept { return op_.name; }
char const* Plugin::getPluginVersion() const noexcept { return op_.version; }
char const* Plugin::getPluginNamespace() const noexcept { return schema::kNamespace; }
int32_t Plugin::getNbOutputs() const noexcept { return op_.num_outputs; }

// ---- shapes and types

bool Plugin::checkCounts(int32_t num_inputs, int32_t num_outputs) const {
  if (num_inputs == op_.num_inputs && num_outputs == op_.num_outputs) return true;
  logError(op_, "expected %d inputs and %d outputs, got %d and %d", op_.num_inputs, op_.num_outputs,
           num_inputs, num_outputs);
  return false;
}

bool Plugin::bindTypes(PluginTensorDesc const* in, PluginTensorDesc const* out, Call& call) const {
  auto const at = [&](int pos) -> PluginTensorDesc const& {
    return pos < op_.num_inputs ? in[pos] : out[pos - op_.num_inputs];
  };
  for (int pos = 0; pos < op_.num_inputs + op_.num_outputs; ++pos) {
    bool const is_linear = at(pos).format == nvinfer1::TensorFormat::kLINEAR;
    if (!is_linear || !typeFits(op_, pos, [&](int other) { return at(other).type; })) {
      logError(op_, "%s: wrong data type %d or format %d", tensorAt(op_, pos).name,
               static_cast<int>(at(pos).type), static_cast<int>(at(pos).format));
      return false;
    }
  }
  call.dtype_ = toDType(in[0].type);
  call.table_dtype_ = toDType(in[firstTable(op_)].type);
  return true;
}

bool Plugin::bindShapes(PluginTensorDesc const* in, PluginTensorDesc const* out, Call& call) const {
  std::memcpy(call.sizes_, derived_, sizeof derived_);
  for (int pos = 0; pos < op_.num_inputs + op_.num_outputs; ++pos) {
    TensorSchema const& tensor = tensorAt(op_, pos);
    Dims const& dims = (pos < op_.num_inputs ? in[pos] : out[pos - op_.num_inputs]).dims;
    if (dims.nbDims != tensor.rank) {
      logError(op_, "%s: expected %d dimensions, got %d", tensor.name, tensor.rank, dims.nbDims);
      return false;
    }
    for (int i = 0; i < tensor.rank; ++i) {
      DimSchema const& dim = tensor.dims[i];
      int64_t const got = dims.d[i];
      if (got == kUnknown) continue;  // decided by a later step
      int64_t expected = dim.plus;
      if (dim.times != 0) {
        int64_t& size = call.sizes_[dim.size];
        if (size == kUnknown) size = (got - dim.plus) / dim.times;
        expected += dim.times * size;
      }
      if (got != expected || got < dim.plus || got > kMaxSize) {
        logError(op_, "%s: dimension %d: expected %lld, got %lld", tensor.name, i,
                 static_cast<long long>(expected), static_cast<long long>(got));
        return false;
      }
    }
  }
  return true;
}

bool Plugin::bindStep(PluginTensorDesc const* in, PluginTensorDesc const* out, Call& call) const {
  if (!bindTypes(in, out, call) || !bindShapes(in, out, call)) return false;
  for (int i = 0; i < op_.num_sizes; ++i) {
    if (call.sizes_[i] == kUnknown) {
      logError(op_, "size %s is not known", op_.sizes[i].name);
      return false;
    }
  }
  call.attributes_ = attributes_;
  return true;
}

bool Plugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* in_out,
                                       int32_t num_inputs, int32_t num_outputs) noexcept {
  if (!checkCounts(num_inputs, num_outputs)) return false;
  return in_out[pos].desc.format == nvinfer1::TensorFormat::kLINEAR &&
         typeFits(op_, pos, [&](int other) { return in_out[other].desc.type; });
}

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t num_inputs,
                                DynamicPluginTensorDesc const* out, int32_t num_outputs) noexcept {
  if (!checkCounts(num_inputs, num_outputs)) return kFailed;
  PluginTensorDesc in_now[kMaxInputs], out_now[kMaxOutputs];
  for (int i = 0; i < num_inputs; ++i) in_now[i] = in[i].desc;
  for (int i = 0; i < num_outputs; ++i) out_now[i] = out[i].desc;
  Call call;
  return bindTypes(in_now, out_now, call) && bindShapes(in_now, out_now, call) ? kOk : kFailed;
}

int32_t Plugin::getOutputDataTypes(DataType* out, int32_t num_outputs, DataType const* in,
                                   int32_t num_inputs) const noexcept {
  if (!checkCounts(num_inputs, num_outputs)) return kFailed;
  for (int i = 0; i < num_outputs; ++i) out[i] = in[0];  // every result has the model dtype
  return kOk;
}

int32_t Plugin::getOutputShapes(DimsExprs const* in, int32_t num_inputs, DimsExprs const*, int32_t,
                                DimsExprs* out, int32_t num_outputs,
                                nvinfer1::IExprBuilder& build) noexcept {
  if (!checkCounts(num_inputs, num_outputs)) return kFailed;
  IDimensionExpr const* sizes[kMaxSizes] = {};
  for (int i = 0; i < op_.num_sizes; ++i) {
    if (derived_[i] != kUnknown) sizes[i] = build.constant(derived_[i]);
  }
  for (int pos = 0; pos < num_inputs; ++pos) {
    TensorSchema const& tensor = op_.inputs[pos];
    if (in[pos].nbDims != tensor.rank) {
      logError(op_, "%s: expected %d dimensions, got %d", tensor.name, tensor.rank, in[pos].nbDims);
      return kFailed;
    }
    for (int i = 0; i < tensor.rank; ++i) {
      DimSchema const& dim = tensor.dims[i];
      if (dim.times == 0 || sizes[dim.size] != nullptr) continue;
      IDimensionExpr const* size = in[pos].d[i];
      if (dim.plus != 0) {
        size = build.operation(DimensionOperation::kSUB, *size, *build.constant(dim.plus));
      }
      if (dim.times != 1) {
        size = build.operation(DimensionOperation::kFLOOR_DIV, *size, *build.constant(dim.times));
      }
      sizes[dim.size] = size;
    }
  }
  for (int pos = 0; pos < num_outputs; ++pos) {
    out[pos].nbDims = op_.outputs[pos].rank;
    for (int i = 0; i < op_.outputs[pos].rank; ++i) {
      out[pos].d[i] = sizes[op_.outputs[pos].dims[i].size];
    }
  }
  return kOk;
}

size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t num_inputs,
                                DynamicPluginTensorDesc const*,
                                int32_t num_outputs) const noexcept {
  if (adapter_.workspaceBytes == nullptr || !checkCounts(num_inputs, num_outputs)) return 0;
  Call call;
  call.attributes_ = attributes_;
  call.dtype_ = toDType(in[0].desc.type);
  std::memcpy(call.sizes_, derived_, sizeof derived_);
  for (int pos = 0; pos < num_inputs; ++pos) {
    for (int i = 0; i < op_.inputs[pos].rank; ++i) {
      DimSchema const& dim = op_.inputs[pos].dims[i];
      if (dim.times == 0 || derived_[dim.size] != kUnknown) continue;
      int64_t const most = (in[pos].max.d[i] - dim.plus) / dim.times;
      if (most > call.sizes_[dim.size]) call.sizes_[dim.size] = most;
    }
  }
  return adapter_.workspaceBytes(call);
}

// ---- a step

int32_t Plugin::onShapeChange(PluginTensorDesc const* in, int32_t num_inputs,
                              PluginTensorDesc const* out, int32_t num_outputs) noexcept {
  Call call;
  return checkCounts(num_inputs, num_outputs) && bindStep(in, out, call) ? kOk : kFailed;
}

int32_t Plugin::enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out,
                        void const* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) noexcept {
  Call call;
  if (!bindStep(in, out, call)) return cudaErrorInvalidValue;
  call.inputs_ = inputs;
  call.outputs_ = outputs;
  call.workspace_ = workspace;
  call.stream_ = stream;
  cudaError_t const error = adapter_.launch(call);
  if (error != cudaSuccess) {
    logError(op_, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
  }
  return error;
}

// ---- the creator

Creator::Creator(Adapter const& adapter) : adapter_(adapter) {
  for (int i = 0; i < adapter.op.num_attributes; ++i) {
    fields_[i] = fieldOf(adapter.op.attributes[i], nullptr);
  }
  collection_.nbFields = adapter.op.num_attributes;
  collection_.fields = fields_;
}

Plugin* Creator::createPlugin(char const*, PluginFieldCollection const* fields,
                              nvinfer1::TensorRTPhase) noexcept {
  return Plugin::create(adapter_, fields);
}

PluginFieldCollection const* Creator::getFieldNames() noexcept { return &collection_; }
char const* Creator::getPluginName() const noexcept { return adapter_.op.name; }
char const* Creator::getPluginVersion() const noexcept { return adapter_.op.version; }
char const* Creator::getPluginNamespace() const noexcept { return schema::kNamespace; }

}  // namespace looptrt::trt
