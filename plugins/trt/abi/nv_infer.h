// What this library uses of TensorRT's plugin interface, declared for machines without its SDK.
//
// TensorRT calls these objects through their virtual tables and passes these structs by address,
// so what counts is the order of virtual functions and the layout of data: they are those of the
// v_1_0 interfaces in TensorRT 10.x, 11.x and TensorRT-RTX 1.x. abi/check_abi.cpp compares every
// one with an SDK's headers. Functions of ours that TensorRT never calls are not declared.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// check_abi.cpp has these declarations beside the SDK's, under another name.
#ifndef LOOPTRT_NVINFER_NAMESPACE
#define LOOPTRT_NVINFER_NAMESPACE nvinfer1
#endif

namespace LOOPTRT_NVINFER_NAMESPACE {

using AsciiChar = char;

// ---- plain data

enum class DataType : int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kUINT8 = 5,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8,
};

enum class TensorFormat : int32_t { kLINEAR = 0 };

enum class DimensionOperation : int32_t {
  kSUM = 0,
  kPROD = 1,
  kMAX = 2,
  kMIN = 3,
  kSUB = 4,
  kEQUAL = 5,
  kLESS = 6,
  kFLOOR_DIV = 7,
  kCEIL_DIV = 8,
};

enum class PluginFieldType : int32_t {
  kFLOAT16 = 0,
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT8 = 3,
  kINT16 = 4,
  kINT32 = 5,
  kCHAR = 6,
  kDIMS = 7,
  kUNKNOWN = 8,
  kBF16 = 9,
  kINT64 = 10,
};

enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };

struct Dims64 {
  static constexpr int32_t MAX_DIMS = 8;
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

struct PluginField {
  AsciiChar const* name = nullptr;
  void const* data = nullptr;
  PluginFieldType type = PluginFieldType::kUNKNOWN;
  int32_t length = 0;

  PluginField() = default;
  PluginField(AsciiChar const* name, void const* data, PluginFieldType type,
              int32_t length) noexcept
      : name(name), data(data), type(type), length(length) {}
};

struct PluginFieldCollection {
  int32_t nbFields = 0;
  PluginField const* fields = nullptr;
};

struct InterfaceInfo {
  char const* kind;
  int32_t major, minor;
};

// ---- sizes while a network is built: objects of TensorRT behind a pointer of theirs

class IDimensionExpr;

namespace apiv {

class VDimensionExpr {
 public:
  virtual ~VDimensionExpr() noexcept = default;
  virtual bool isConstant() const = 0;
  virtual int64_t getConstantValue() const = 0;
};

class VExprBuilder {
 public:
  virtual ~VExprBuilder() noexcept = default;
  virtual IDimensionExpr const* constant(int64_t value) = 0;
  virtual IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                          IDimensionExpr const& second) = 0;
};

}  // namespace apiv

class IDimensionExpr {
 public:
  bool isConstant() const noexcept { return mImpl->isConstant(); }
  int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

 protected:
  virtual ~IDimensionExpr() noexcept = default;
  apiv::VDimensionExpr* mImpl = nullptr;
};

class IExprBuilder {
 public:
  IDimensionExpr const* constant(int64_t value) noexcept { return mImpl->constant(value); }
  IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                  IDimensionExpr const& second) noexcept {
    return mImpl->operation(op, first, second);
  }

 protected:
  virtual ~IExprBuilder() noexcept = default;
  apiv::VExprBuilder* mImpl = nullptr;
};

struct DimsExprs {
  int32_t nbDims;
  IDimensionExpr const* d[Dims::MAX_DIMS];
};

// ---- interfaces that a plugin implements

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

class IPluginResourceContext;

namespace v_1_0 {

class IPluginCapability : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual AsciiChar const* getPluginName() const noexcept = 0;
  virtual AsciiChar const* getPluginVersion() const noexcept = 0;
  virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  static constexpr int32_t kDEFAULT_FORMAT_COMBINATION_LIMIT = 100;

  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                  DynamicPluginTensorDesc const* out,
                                  int32_t nbOutputs) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs,
                                     DataType const* inputTypes,
                                     int32_t nbInputs) const noexcept = 0;
  virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs,
                                  DimsExprs const* shapeInputs, int32_t nbShapeInputs,
                                  DimsExprs* outputs, int32_t nbOutputs,
                                  IExprBuilder& exprBuilder) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut,
                                         int32_t nbInputs, int32_t nbOutputs) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t,
                                  DynamicPluginTensorDesc const*, int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual char const* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return kDEFAULT_FORMAT_COMBINATION_LIMIT; }
  virtual char const* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN_V3ONE_RUNTIME", 1, 0};
  }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(PluginTensorDesc const* in, int32_t nbInputs,
                                PluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
  virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
                          void const* const* inputs, void* const* outputs, void* workspace,
                          cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN CREATOR_V3ONE", 1, 0};
  }
  virtual IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* fc,
                                  TensorRTPhase phase) noexcept = 0;
  virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
  virtual AsciiChar const* getPluginName() const noexcept = 0;
  virtual AsciiChar const* getPluginVersion() const noexcept = 0;
  virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

// ---- interfaces that TensorRT implements, in the form of TensorRT 11 (see logger.cpp)

class ILogger : public IVersionedInterface {
 public:
  enum class Severity : int32_t {
    kINTERNAL_ERROR = 0,
    kERROR = 1,
    kWARNING = 2,
    kINFO = 3,
    kVERBOSE = 4,
  };
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
  virtual void log(Severity severity, AsciiChar const* msg) noexcept = 0;
};

class ILoggerFinder : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
  virtual ILogger* findLogger() = 0;

 protected:
  ~ILoggerFinder() override = default;
};

}  // namespace v_1_0

using v_1_0::ILogger;
using v_1_0::ILoggerFinder;
using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginV3;
using v_1_0::IPluginV3OneBuild;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;

}  // namespace LOOPTRT_NVINFER_NAMESPACE
