// The TensorRT side of an operator: one class for all of them, driven by the schema.
//
// Owns what every plugin does alike: attributes from fields and back, formats, output shapes,
// checks of shapes and dtypes. Leaves the launch to one function an operator (adapters.cpp).
// Invariant: nothing is kept from one step to the next, so no step can run with another's shapes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "looptrt/dtype.h"
#include "nv_infer.h"
#include "op_schema.h"

namespace looptrt::trt {

union AttributeValue {
  int32_t i;
  float f;
};

// One call of an operator whose operands were checked against the schema. Indices are those of the
// generated header: call.size(size::kT), call.input(in::kX).
class Call {
 public:
  int64_t size(int index) const { return sizes_[index]; }
  int32_t size32(int index) const { return static_cast<int32_t>(sizes_[index]); }
  int32_t attribute(int index) const { return attributes_[index].i; }
  float attributeF(int index) const { return attributes_[index].f; }
  DType dtype() const { return dtype_; }
  DType tableDtype() const { return table_dtype_; }

  template <typename T = void>
  T const* input(int index) const {
    return static_cast<T const*>(inputs_[index]);
  }
  void* output(int index) const { return outputs_[index]; }
  void* workspace() const { return workspace_; }
  cudaStream_t stream() const { return stream_; }

 private:
  friend class Plugin;

  AttributeValue const* attributes_ = nullptr;
  int64_t sizes_[kMaxSizes] = {};
  DType dtype_ = DType::kFloat32, table_dtype_ = DType::kFloat32;
  void const* const* inputs_ = nullptr;
  void* const* outputs_ = nullptr;
  void* workspace_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// What is particular to an operator.
struct Adapter {
  OpSchema const& op;
  cudaError_t (*launch)(Call const& call);
  size_t (*workspaceBytes)(Call const& call);  // null for none; call has sizes and dtypes only
};

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  // A plugin with the attributes of `fields`; null, and an error logged, if one is missing, of
  // another type or out of range.
  static Plugin* create(Adapter const& adapter,
                        nvinfer1::PluginFieldCollection const* fields) noexcept;

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override;
  Plugin* clone() noexcept override;

  char const* getPluginName() const noexcept override;
  char const* getPluginVersion() const noexcept override;
  char const* getPluginNamespace() const noexcept override;

  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t num_inputs,
                          nvinfer1::DynamicPluginTensorDesc const* out,
                          int32_t num_outputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* out, int32_t num_outputs,
                             nvinfer1::DataType const* in,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* in, int32_t num_inputs,
                          nvinfer1::DimsExprs const* shape_in, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* out, int32_t num_outputs,
                          nvinfer1::IExprBuilder& build) noexcept override;
  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* in_out,
                                 int32_t num_inputs, int32_t num_outputs) noexcept override;
  int32_t getNbOutputs() const noexcept override;
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t num_inputs,
                          nvinfer1::DynamicPluginTensorDesc const* out,
                          int32_t num_outputs) const noexcept override;

  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t num_inputs,
                        nvinfer1::PluginTensorDesc const* out,
                        int32_t num_outputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  Plugin* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  explicit Plugin(Adapter const& adapter) : adapter_(adapter), op_(adapter.op) {}
  Plugin(Plugin const& other) = default;  // fields_ is filled anew each time it is asked for

  bool readAttributes(nvinfer1::PluginFieldCollection const& fields);
  bool deriveSizes();
  bool checkCounts(int32_t num_inputs, int32_t num_outputs) const;
  bool bindTypes(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
                 Call& call) const;
  bool bindShapes(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
                  Call& call) const;
  bool bindStep(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
                Call& call) const;

  Adapter const& adapter_;
  OpSchema const& op_;
  AttributeValue attributes_[kMaxAttributes] = {};
  int64_t derived_[kMaxSizes] = {};  // 0 where the operands decide
  nvinfer1::PluginField fields_[kMaxAttributes] = {};
  nvinfer1::PluginFieldCollection collection_ = {};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(Adapter const& adapter);

  Plugin* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                       nvinfer1::TensorRTPhase phase) noexcept override;
  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
  char const* getPluginName() const noexcept override;
  char const* getPluginVersion() const noexcept override;
  char const* getPluginNamespace() const noexcept override;

 private:
  Adapter const& adapter_;
  nvinfer1::PluginField fields_[kMaxAttributes] = {};
  nvinfer1::PluginFieldCollection collection_ = {};
};

extern Adapter const kAdapters[];  // one for each operator, schema::kNumOps

}  // namespace looptrt::trt
