#include "plugin_host.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abi/nv_infer.h"
#include "blob.h"
#include "dim_exprs.h"

using looptrt::host::Blob;
using looptrt::host::DimExprBuilder;
using looptrt::host::StoredField;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::InterfaceInfo;
using nvinfer1::IPluginCreatorV3One;
using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

struct LooptrtHostLibrary {
  std::vector<IPluginCreatorV3One*> creators;
};

struct LooptrtHostPlugin {
  std::unique_ptr<IPluginV3> object;
  nvinfer1::IPluginV3OneCore* core;
  nvinfer1::IPluginV3OneBuild* build;
  nvinfer1::IPluginV3OneRuntime* runtime;
};

namespace {

constexpr int32_t kOk = 0;
constexpr int32_t kFailed = 1;
constexpr int64_t kUnknown = -1;

// ---- the logger

class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, char const* text) noexcept override {
    static constexpr char const* kNames[] = {"INTERNAL_ERROR", "ERROR", "WARNING", "INFO",
                                             "VERBOSE"};
    std::lock_guard const lock(mutex_);
    messages_ += kNames[static_cast<int32_t>(severity)];
    messages_ += ' ';
    messages_ += text;
    messages_ += '\n';
  }

  std::string take() {
    std::lock_guard const lock(mutex_);
    return std::exchange(messages_, {});
  }

 private:
  std::mutex mutex_;
  std::string messages_;
};

class LoggerFinder final : public nvinfer1::ILoggerFinder {
 public:
  nvinfer1::ILogger* findLogger() override;
};

// A plugin library may log as long as the process lives.
Logger& logger() {
  static auto* const instance = new Logger;
  return *instance;
}

nvinfer1::ILogger* LoggerFinder::findLogger() { return &logger(); }

__attribute__((format(printf, 1, 2))) void logError(char const* format, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  logger().log(nvinfer1::ILogger::Severity::kERROR, (std::string("host: ") + text).c_str());
}

bool isInterface(nvinfer1::IVersionedInterface const& object, char const* kind) {
  InterfaceInfo const info = object.getInterfaceInfo();
  bool const is_same = std::strcmp(info.kind, kind) == 0 && info.major == 1;
  if (!is_same) logError("expected a %s version 1, got %s %d", kind, info.kind, info.major);
  return is_same;
}

// ---- plugins

template <typename Capability>
Capability* capability(IPluginV3& plugin, PluginCapabilityType type, char const* kind) {
  nvinfer1::IPluginCapability* const found = plugin.getCapabilityInterface(type);
  if (found == nullptr) logError("no capability %s", kind);
  return found != nullptr && isInterface(*found, kind) ? static_cast<Capability*>(found) : nullptr;
}

LooptrtHostPlugin* hosted(IPluginV3* object) {
  if (object == nullptr) return nullptr;
  auto plugin = std::make_unique<LooptrtHostPlugin>();
  plugin->object.reset(object);
  if (!isInterface(*object, "PLUGIN")) return nullptr;
  plugin->core = capability<nvinfer1::IPluginV3OneCore>(*object, PluginCapabilityType::kCORE,
                                                        "PLUGIN_V3ONE_CORE");
  plugin->build = capability<nvinfer1::IPluginV3OneBuild>(*object, PluginCapabilityType::kBUILD,
                                                          "PLUGIN_V3ONE_BUILD");
  plugin->runtime = capability<nvinfer1::IPluginV3OneRuntime>(
      *object, PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME");
  bool const is_whole =
      plugin->core != nullptr && plugin->build != nullptr && plugin->runtime != nullptr;
  return is_whole ? plugin.release() : nullptr;
}

IPluginCreatorV3One* findCreator(LooptrtHostLibrary const& library, char const* name,
                                 char const* version, char const* name_space) {
  for (IPluginCreatorV3One* creator : library.creators) {
    if (std::strcmp(creator->getPluginName(), name) == 0 &&
        std::strcmp(creator->getPluginVersion(), version) == 0 &&
        std::strcmp(creator->getPluginNamespace(), name_space) == 0) {
      return creator;
    }
  }
  logError("no creator of %s version %s in namespace '%s'", name, version, name_space);
  return nullptr;
}

// The plugin gets memory that is overwritten as soon as it is made: it must have copied.
LooptrtHostPlugin* create(LooptrtHostLibrary const& library, Blob blob, TensorRTPhase phase) {
  IPluginCreatorV3One* const creator =
      findCreator(library, blob.name.c_str(), blob.version.c_str(), blob.name_space.c_str());
  if (creator == nullptr) return nullptr;
  std::vector<PluginField> fields;
  for (StoredField& field : blob.fields) {
    fields.emplace_back(field.name.c_str(), field.data.empty() ? nullptr : field.data.data(),
                        field.type, field.length);
  }
  PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
  LooptrtHostPlugin* const plugin =
      hosted(creator->createPlugin(blob.name.c_str(), &collection, phase));
  for (StoredField& field : blob.fields) {
    std::fill(field.data.begin(), field.data.end(), 0xFF);
    std::fill(field.name.begin(), field.name.end(), '?');
  }
  return plugin;
}

// ---- descriptions of tensors

nvinfer1::Dims dimsOf(int32_t rank, int64_t const* sizes) {
  nvinfer1::Dims dims{};
  dims.nbDims = rank;
  for (int32_t i = 0; i < rank && i < nvinfer1::Dims::MAX_DIMS; ++i) dims.d[i] = sizes[i];
  return dims;
}

PluginTensorDesc stepDesc(LooptrtHostTensor const& tensor) {
  PluginTensorDesc desc{};
  desc.dims = dimsOf(tensor.rank, tensor.dims);
  desc.type = static_cast<nvinfer1::DataType>(tensor.type);
  desc.format = static_cast<nvinfer1::TensorFormat>(tensor.format);
  desc.scale = 1.0F;
  return desc;
}

DynamicPluginTensorDesc buildDesc(LooptrtHostTensor const& tensor) {
  DynamicPluginTensorDesc desc{};
  desc.desc = stepDesc(tensor);
  desc.min = dimsOf(tensor.rank, tensor.min);
  desc.opt = dimsOf(tensor.rank, tensor.opt);
  desc.max = dimsOf(tensor.rank, tensor.max);
  return desc;
}

std::vector<PluginTensorDesc> stepDescs(LooptrtHostTensor const* tensors, int32_t count) {
  std::vector<PluginTensorDesc> descs;
  for (int32_t i = 0; i < count; ++i) descs.push_back(stepDesc(tensors[i]));
  return descs;
}

std::vector<DynamicPluginTensorDesc> buildDescs(LooptrtHostTensor const* tensors, int32_t count) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (int32_t i = 0; i < count; ++i) descs.push_back(buildDesc(tensors[i]));
  return descs;
}

// The values of all symbols where every input is at its min, opt or max.
struct Symbols {
  std::vector<int64_t> min, opt, max;
};

std::vector<DimsExprs> inputExprs(LooptrtHostTensor const* in, int32_t num_inputs,
                                  DimExprBuilder& builder, Symbols& symbols) {
  std::vector<DimsExprs> exprs(static_cast<size_t>(num_inputs));
  for (int32_t i = 0; i < num_inputs; ++i) {
    exprs[i].nbDims = in[i].rank;
    for (int32_t j = 0; j < in[i].rank; ++j) {
      if (in[i].dims[j] != kUnknown) {
        exprs[i].d[j] = builder.constant(in[i].dims[j]);
        continue;
      }
      exprs[i].d[j] = builder.symbol(symbols.opt.size());
      symbols.min.push_back(in[i].min[j]);
      symbols.opt.push_back(in[i].opt[j]);
      symbols.max.push_back(in[i].max[j]);
    }
  }
  return exprs;
}

bool evaluate(nvinfer1::IDimensionExpr const* made, Symbols const& symbols, LooptrtHostTensor& out,
              int32_t dim) {
  if (made == nullptr) {
    logError("output dimension %d: none", dim);
    return false;
  }
  auto const& expr = static_cast<looptrt::host::DimExpr const&>(*made);
  auto const min = expr.evaluate(symbols.min), opt = expr.evaluate(symbols.opt),
             max = expr.evaluate(symbols.max);
  if (!min || !opt || !max) {
    logError("output dimension %d: a division by zero", dim);
    return false;
  }
  out.dims[dim] = expr.isConstant() ? expr.getConstantValue() : kUnknown;
  out.min[dim] = *min;
  out.opt[dim] = *opt;
  out.max[dim] = *max;
  return true;
}

bool haveRanks(LooptrtHostTensor const* tensors, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (tensors[i].rank < 0 || tensors[i].rank > nvinfer1::Dims::MAX_DIMS) {
      logError("tensor %d: expected at most %d dimensions, got %d", i, nvinfer1::Dims::MAX_DIMS,
               tensors[i].rank);
      return false;
    }
  }
  return true;
}

}  // namespace

// ---- the C API

char const* looptrt_host_take_messages() {
  thread_local std::string text;
  text = logger().take();
  return text.c_str();
}

int32_t looptrt_host_dimension_operation(int32_t operation, int64_t first, int64_t second,
                                         int64_t* result) {
  DimExprBuilder builder;
  auto const op = static_cast<nvinfer1::DimensionOperation>(operation);
  auto const* const made = builder.operation(op, *builder.symbol(0), *builder.constant(second));
  std::optional<int64_t> const value = made->evaluate({first});
  if (value) *result = *value;
  return value ? kOk : kFailed;
}

LooptrtHostLibrary* looptrt_host_open(char const* path) {
  void* const handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    logError("%s", dlerror());
    return nullptr;
  }
  auto const getCreators =
      reinterpret_cast<nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&)>(
          dlsym(handle, "getCreators"));
  auto const setLoggerFinder =
      reinterpret_cast<void (*)(nvinfer1::ILoggerFinder*)>(dlsym(handle, "setLoggerFinder"));
  if (getCreators == nullptr || setLoggerFinder == nullptr) {
    logError("%s: expected the exports getCreators and setLoggerFinder", path);
    return nullptr;
  }
  static auto* const finder = new LoggerFinder;
  setLoggerFinder(finder);
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const creators = getCreators(count);
  auto library = std::make_unique<LooptrtHostLibrary>();
  for (int32_t i = 0; i < count; ++i) {
    if (!isInterface(*creators[i], "PLUGIN CREATOR_V3ONE")) return nullptr;
    library->creators.push_back(static_cast<IPluginCreatorV3One*>(creators[i]));
  }
  return library.release();
}

int32_t looptrt_host_num_creators(LooptrtHostLibrary const* library) {
  return static_cast<int32_t>(library->creators.size());
}

int32_t looptrt_host_creator(LooptrtHostLibrary const* library, int32_t index, char const** name,
                             char const** version, char const** name_space, int32_t* num_fields) {
  IPluginCreatorV3One* const creator = library->creators.at(static_cast<size_t>(index));
  PluginFieldCollection const* const fields = creator->getFieldNames();
  if (fields == nullptr) {
    logError("%s: no field names", creator->getPluginName());
    return kFailed;
  }
  *name = creator->getPluginName();
  *version = creator->getPluginVersion();
  *name_space = creator->getPluginNamespace();
  *num_fields = fields->nbFields;
  return kOk;
}

int32_t looptrt_host_creator_field(LooptrtHostLibrary const* library, int32_t index, int32_t field,
                                   char const** name, int32_t* type) {
  PluginFieldCollection const* const fields =
      library->creators.at(static_cast<size_t>(index))->getFieldNames();
  if (fields == nullptr || field < 0 || field >= fields->nbFields) return kFailed;
  *name = fields->fields[field].name;
  *type = static_cast<int32_t>(fields->fields[field].type);
  return kOk;
}

LooptrtHostPlugin* looptrt_host_create(LooptrtHostLibrary const* library, char const* name,
                                       char const* version, char const* name_space,
                                       LooptrtHostField const* fields, int32_t num_fields) {
  std::vector<PluginField> given;
  for (int32_t i = 0; i < num_fields; ++i) {
    given.emplace_back(fields[i].name, fields[i].data,
                       static_cast<nvinfer1::PluginFieldType>(fields[i].type), fields[i].length);
  }
  auto stored = looptrt::host::storeFields({num_fields, given.data()});
  if (!stored) {
    logError("%s: a field without name or of no known type", name);
    return nullptr;
  }
  return create(*library, {name, version, name_space, std::move(*stored)}, TensorRTPhase::kBUILD);
}

int64_t looptrt_host_serialize(LooptrtHostPlugin* plugin, uint8_t* bytes, int64_t capacity) {
  PluginFieldCollection const* const fields = plugin->runtime->getFieldsToSerialize();
  char const* const name = plugin->core->getPluginName();
  auto stored = fields == nullptr ? std::nullopt : looptrt::host::storeFields(*fields);
  bool const is_whole =
      stored && std::none_of(stored->begin(), stored->end(),
                             [](auto const& field) { return field.data.empty(); });
  if (!is_whole) {
    logError("%s: fields that cannot be serialised", name);
    return -1;
  }
  Blob const blob{name, plugin->core->getPluginVersion(), plugin->core->getPluginNamespace(),
                  std::move(*stored)};
  std::vector<uint8_t> const content = blob.write();
  auto const size = static_cast<int64_t>(content.size());
  if (size <= capacity) std::memcpy(bytes, content.data(), content.size());
  return size;
}

LooptrtHostPlugin* looptrt_host_restore(LooptrtHostLibrary const* library, uint8_t const* bytes,
                                        int64_t size) {
  auto blob = Blob::read(bytes, size);
  if (!blob) {
    logError("%lld bytes that are no serialised plugin", static_cast<long long>(size));
    return nullptr;
  }
  return create(*library, std::move(*blob), TensorRTPhase::kRUNTIME);
}

LooptrtHostPlugin* looptrt_host_clone(LooptrtHostPlugin* plugin) {
  return hosted(plugin->object->clone());
}

LooptrtHostPlugin* looptrt_host_attach(LooptrtHostPlugin* plugin) {
  return hosted(plugin->runtime->attachToContext(nullptr));
}

void looptrt_host_destroy(LooptrtHostPlugin* plugin) { delete plugin; }

void looptrt_host_identity(LooptrtHostPlugin const* plugin, char const** name, char const** version,
                           char const** name_space) {
  *name = plugin->core->getPluginName();
  *version = plugin->core->getPluginVersion();
  *name_space = plugin->core->getPluginNamespace();
}

int32_t looptrt_host_num_outputs(LooptrtHostPlugin const* plugin) {
  return plugin->build->getNbOutputs();
}

int32_t looptrt_host_output_types(LooptrtHostPlugin const* plugin, LooptrtHostTensor const* in,
                                  int32_t num_inputs, LooptrtHostTensor* out, int32_t num_outputs) {
  std::vector<nvinfer1::DataType> in_types, out_types(static_cast<size_t>(num_outputs));
  for (int32_t i = 0; i < num_inputs; ++i) {
    in_types.push_back(static_cast<nvinfer1::DataType>(in[i].type));
  }
  int32_t const code =
      plugin->build->getOutputDataTypes(out_types.data(), num_outputs, in_types.data(), num_inputs);
  for (int32_t i = 0; i < num_outputs && code == kOk; ++i) {
    out[i].type = static_cast<int32_t>(out_types[i]);
  }
  return code;
}

int32_t looptrt_host_output_shapes(LooptrtHostPlugin* plugin, LooptrtHostTensor const* in,
                                   int32_t num_inputs, LooptrtHostTensor* out,
                                   int32_t num_outputs) {
  if (!haveRanks(in, num_inputs)) return kFailed;
  DimExprBuilder builder;
  Symbols symbols;
  std::vector<DimsExprs> const in_exprs = inputExprs(in, num_inputs, builder, symbols);
  std::vector<DimsExprs> out_exprs(static_cast<size_t>(num_outputs));
  int32_t const code = plugin->build->getOutputShapes(in_exprs.data(), num_inputs, nullptr, 0,
                                                      out_exprs.data(), num_outputs, builder);
  if (code != kOk) return code;
  for (int32_t i = 0; i < num_outputs; ++i) {
    out[i].rank = out_exprs[i].nbDims;
    if (!haveRanks(&out[i], 1)) return kFailed;
    for (int32_t j = 0; j < out[i].rank; ++j) {
      if (!evaluate(out_exprs[i].d[j], symbols, out[i], j)) return kFailed;
    }
  }
  return kOk;
}

int32_t looptrt_host_supports(LooptrtHostPlugin* plugin, int32_t pos,
                              LooptrtHostTensor const* in_out, int32_t num_inputs,
                              int32_t num_outputs) {
  auto const descs = buildDescs(in_out, num_inputs + num_outputs);
  return plugin->build->supportsFormatCombination(pos, descs.data(), num_inputs, num_outputs);
}

int32_t looptrt_host_configure(LooptrtHostPlugin* plugin, LooptrtHostTensor const* in,
                               int32_t num_inputs, LooptrtHostTensor const* out,
                               int32_t num_outputs) {
  auto const in_descs = buildDescs(in, num_inputs), out_descs = buildDescs(out, num_outputs);
  return plugin->build->configurePlugin(in_descs.data(), num_inputs, out_descs.data(), num_outputs);
}

int64_t looptrt_host_workspace_bytes(LooptrtHostPlugin const* plugin, LooptrtHostTensor const* in,
                                     int32_t num_inputs, LooptrtHostTensor const* out,
                                     int32_t num_outputs) {
  auto const in_descs = buildDescs(in, num_inputs), out_descs = buildDescs(out, num_outputs);
  return static_cast<int64_t>(
      plugin->build->getWorkspaceSize(in_descs.data(), num_inputs, out_descs.data(), num_outputs));
}

int32_t looptrt_host_on_shape_change(LooptrtHostPlugin* plugin, LooptrtHostTensor const* in,
                                     int32_t num_inputs, LooptrtHostTensor const* out,
                                     int32_t num_outputs) {
  auto const in_descs = stepDescs(in, num_inputs), out_descs = stepDescs(out, num_outputs);
  return plugin->runtime->onShapeChange(in_descs.data(), num_inputs, out_descs.data(), num_outputs);
}

int32_t looptrt_host_enqueue(LooptrtHostPlugin* plugin, LooptrtHostTensor const* in,
                             int32_t num_inputs, LooptrtHostTensor const* out, int32_t num_outputs,
                             void const* const* inputs, void* const* outputs, void* workspace,
                             void* stream) {
  auto const in_descs = stepDescs(in, num_inputs), out_descs = stepDescs(out, num_outputs);
  return plugin->runtime->enqueue(in_descs.data(), out_descs.data(), inputs, outputs, workspace,
                                  static_cast<cudaStream_t>(stream));
}
