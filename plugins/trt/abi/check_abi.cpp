// Compares our declarations of TensorRT's plugin interfaces with an SDK's headers.
//
// Built and run by CMake where LOOPTRT_TENSORRT_INCLUDE names those. Data is compared by the
// compiler; places in virtual tables when the program runs, since C++ has no constant for them:
// a pointer to a virtual function holds its place (Itanium ABI). That signatures agree is shown by
// plugin_base.cpp, whose overrides compile against either header.
#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdio>
#include <cstring>

#define LOOPTRT_NVINFER_NAMESPACE looptrt_abi
#include "nv_infer.h"

namespace ours = looptrt_abi;
namespace theirs = nvinfer1;

#define SAME_SIZE(type)                                      \
  static_assert(sizeof(ours::type) == sizeof(theirs::type)); \
  static_assert(alignof(ours::type) == alignof(theirs::type))
#define SAME_OFFSET(type, member) \
  static_assert(offsetof(ours::type, member) == offsetof(theirs::type, member))
#define SAME_VALUE(name) \
  static_assert(static_cast<int>(ours::name) == static_cast<int>(theirs::name))

SAME_SIZE(DataType);
SAME_VALUE(DataType::kFLOAT);
SAME_VALUE(DataType::kHALF);
SAME_VALUE(DataType::kINT8);
SAME_VALUE(DataType::kINT32);
SAME_VALUE(DataType::kBOOL);
SAME_VALUE(DataType::kUINT8);
SAME_VALUE(DataType::kFP8);
SAME_VALUE(DataType::kBF16);
SAME_VALUE(DataType::kINT64);
SAME_SIZE(TensorFormat);
SAME_VALUE(TensorFormat::kLINEAR);
SAME_SIZE(DimensionOperation);
SAME_VALUE(DimensionOperation::kSUM);
SAME_VALUE(DimensionOperation::kPROD);
SAME_VALUE(DimensionOperation::kMAX);
SAME_VALUE(DimensionOperation::kMIN);
SAME_VALUE(DimensionOperation::kSUB);
SAME_VALUE(DimensionOperation::kEQUAL);
SAME_VALUE(DimensionOperation::kLESS);
SAME_VALUE(DimensionOperation::kFLOOR_DIV);
SAME_VALUE(DimensionOperation::kCEIL_DIV);
SAME_SIZE(PluginFieldType);
SAME_VALUE(PluginFieldType::kFLOAT16);
SAME_VALUE(PluginFieldType::kFLOAT32);
SAME_VALUE(PluginFieldType::kFLOAT64);
SAME_VALUE(PluginFieldType::kINT8);
SAME_VALUE(PluginFieldType::kINT16);
SAME_VALUE(PluginFieldType::kINT32);
SAME_VALUE(PluginFieldType::kCHAR);
SAME_VALUE(PluginFieldType::kDIMS);
SAME_VALUE(PluginFieldType::kUNKNOWN);
SAME_VALUE(PluginFieldType::kBF16);
SAME_VALUE(PluginFieldType::kINT64);
SAME_SIZE(PluginCapabilityType);
SAME_VALUE(PluginCapabilityType::kCORE);
SAME_VALUE(PluginCapabilityType::kBUILD);
SAME_VALUE(PluginCapabilityType::kRUNTIME);
SAME_SIZE(TensorRTPhase);
SAME_VALUE(TensorRTPhase::kBUILD);
SAME_VALUE(TensorRTPhase::kRUNTIME);
SAME_SIZE(APILanguage);
SAME_VALUE(APILanguage::kCPP);
SAME_VALUE(APILanguage::kPYTHON);
SAME_SIZE(ILogger::Severity);
SAME_VALUE(ILogger::Severity::kINTERNAL_ERROR);
SAME_VALUE(ILogger::Severity::kERROR);
SAME_VALUE(ILogger::Severity::kWARNING);
SAME_VALUE(ILogger::Severity::kINFO);
SAME_VALUE(ILogger::Severity::kVERBOSE);

SAME_SIZE(Dims);
SAME_VALUE(Dims::MAX_DIMS);
SAME_OFFSET(Dims, nbDims);
SAME_OFFSET(Dims, d);
SAME_SIZE(PluginTensorDesc);
SAME_OFFSET(PluginTensorDesc, dims);
SAME_OFFSET(PluginTensorDesc, type);
SAME_OFFSET(PluginTensorDesc, format);
SAME_OFFSET(PluginTensorDesc, scale);
SAME_SIZE(DynamicPluginTensorDesc);
SAME_OFFSET(DynamicPluginTensorDesc, desc);
SAME_OFFSET(DynamicPluginTensorDesc, min);
SAME_OFFSET(DynamicPluginTensorDesc, max);
SAME_OFFSET(DynamicPluginTensorDesc, opt);
SAME_SIZE(PluginField);
SAME_OFFSET(PluginField, name);
SAME_OFFSET(PluginField, data);
SAME_OFFSET(PluginField, type);
SAME_OFFSET(PluginField, length);
SAME_SIZE(PluginFieldCollection);
SAME_OFFSET(PluginFieldCollection, nbFields);
SAME_OFFSET(PluginFieldCollection, fields);
SAME_SIZE(InterfaceInfo);
SAME_OFFSET(InterfaceInfo, kind);
SAME_OFFSET(InterfaceInfo, major);
SAME_OFFSET(InterfaceInfo, minor);
SAME_SIZE(DimsExprs);
SAME_OFFSET(DimsExprs, nbDims);
SAME_OFFSET(DimsExprs, d);
SAME_SIZE(IDimensionExpr);
SAME_SIZE(IExprBuilder);

SAME_SIZE(IPluginV3);
SAME_SIZE(IPluginV3OneCore);
SAME_SIZE(IPluginV3OneBuild);
SAME_SIZE(IPluginV3OneRuntime);
SAME_SIZE(IPluginCreatorV3One);
SAME_SIZE(ILogger);
SAME_SIZE(ILoggerFinder);
SAME_VALUE(IPluginV3OneBuild::kDEFAULT_FORMAT_COMBINATION_LIMIT);

namespace {

[[maybe_unused]] constexpr std::ptrdiff_t kVersionedBytes = 4 * sizeof(void*);

int num_differences = 0;

template <typename Function>
std::ptrdiff_t place(Function function) {
  std::ptrdiff_t words[2];
  static_assert(sizeof function == sizeof words);
  std::memcpy(words, &function, sizeof words);
  return words[0];  // 1 + the offset in the virtual table
}

void compare(char const* name, std::ptrdiff_t ours, std::ptrdiff_t theirs) {
  if (ours == theirs && ours % 2 == 1) return;
  std::printf("%s: at %td here, at %td in TensorRT's headers\n", name, ours - 1, theirs - 1);
  ++num_differences;
}

#define SAME_PLACE(function) compare(#function, place(&ours::function), place(&theirs::function))

template <typename Ours, typename Theirs>
void compareInfo(Ours const& ours, Theirs const& theirs) {
  auto const a = ours.getInterfaceInfo();
  auto const b = theirs.getInterfaceInfo();
  if (std::strcmp(a.kind, b.kind) == 0 && a.major == b.major && a.minor == b.minor) return;
  std::printf("interface %s %d.%d here, %s %d.%d in TensorRT's headers\n", a.kind, a.major, a.minor,
              b.kind, b.major, b.minor);
  ++num_differences;
}

// The least that makes an interface an object, for its getInterfaceInfo.
#define STUB(space, name, base, ...)       \
  struct space##name final : space::base { \
    __VA_ARGS__                            \
  }
#define STUBS(name, base, ...)           \
  namespace in_ours {                    \
  using namespace looptrt_abi;           \
  STUB(ours, name, base, __VA_ARGS__);   \
  }                                      \
  namespace in_theirs {                  \
  using namespace nvinfer1;              \
  STUB(theirs, name, base, __VA_ARGS__); \
  }

STUBS(
    Plugin, IPluginV3,
    IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept override {
      return nullptr;
    } IPluginV3* clone() noexcept override { return nullptr; })
STUBS(
    Core, IPluginV3OneCore,
    char const* getPluginName()
        const noexcept override { return ""; } char const* getPluginVersion()
            const noexcept override { return ""; } char const* getPluginNamespace()
                const noexcept override { return ""; })
STUBS(
    Build, IPluginV3OneBuild,
    int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                            int32_t) noexcept override {
      return 0;
    } int32_t getOutputDataTypes(DataType*, int32_t, DataType const*, int32_t)
        const noexcept override {
          return 0;
        } int32_t getOutputShapes(DimsExprs const*, int32_t, DimsExprs const*, int32_t, DimsExprs*,
                                  int32_t, IExprBuilder&) noexcept override {
          return 0;
        } bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t,
                                         int32_t) noexcept override {
          return false;
        } int32_t getNbOutputs() const noexcept override { return 0; })
STUBS(
    Runtime, IPluginV3OneRuntime,
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*,
                          int32_t) noexcept override {
      return 0;
    } int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*,
                      void* const*, void*, cudaStream_t) noexcept override {
      return 0;
    } IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
      return nullptr;
    } PluginFieldCollection const* getFieldsToSerialize() noexcept override { return nullptr; })
STUBS(
    Creator, IPluginCreatorV3One,
    IPluginV3* createPlugin(char const*, PluginFieldCollection const*,
                            TensorRTPhase) noexcept override {
      return nullptr;
    } PluginFieldCollection const* getFieldNames() noexcept override {
      return nullptr;
    } char const* getPluginName()
        const noexcept override { return ""; } char const* getPluginVersion()
            const noexcept override { return ""; } char const* getPluginNamespace()
                const noexcept override { return ""; })

}  // namespace

int main() {
  SAME_PLACE(IPluginV3::getAPILanguage);
  SAME_PLACE(IPluginV3::getInterfaceInfo);
  SAME_PLACE(IPluginV3::getCapabilityInterface);
  SAME_PLACE(IPluginV3::clone);
  SAME_PLACE(IPluginV3OneCore::getPluginName);
  SAME_PLACE(IPluginV3OneCore::getPluginVersion);
  SAME_PLACE(IPluginV3OneCore::getPluginNamespace);
  SAME_PLACE(IPluginV3OneBuild::configurePlugin);
  SAME_PLACE(IPluginV3OneBuild::getOutputDataTypes);
  SAME_PLACE(IPluginV3OneBuild::getOutputShapes);
  SAME_PLACE(IPluginV3OneBuild::supportsFormatCombination);
  SAME_PLACE(IPluginV3OneBuild::getNbOutputs);
  SAME_PLACE(IPluginV3OneBuild::getWorkspaceSize);
  SAME_PLACE(IPluginV3OneBuild::getValidTactics);
  SAME_PLACE(IPluginV3OneBuild::getNbTactics);
  SAME_PLACE(IPluginV3OneBuild::getTimingCacheID);
  SAME_PLACE(IPluginV3OneBuild::getFormatCombinationLimit);
  SAME_PLACE(IPluginV3OneBuild::getMetadataString);
  SAME_PLACE(IPluginV3OneRuntime::setTactic);
  SAME_PLACE(IPluginV3OneRuntime::onShapeChange);
  SAME_PLACE(IPluginV3OneRuntime::enqueue);
  SAME_PLACE(IPluginV3OneRuntime::attachToContext);
  SAME_PLACE(IPluginV3OneRuntime::getFieldsToSerialize);
  SAME_PLACE(IPluginCreatorV3One::createPlugin);
  SAME_PLACE(IPluginCreatorV3One::getFieldNames);
  SAME_PLACE(IPluginCreatorV3One::getPluginName);
  SAME_PLACE(IPluginCreatorV3One::getPluginVersion);
  SAME_PLACE(IPluginCreatorV3One::getPluginNamespace);
#if NV_TENSORRT_MAJOR == 10
  // The plain form, which logger.cpp tells from the other by TensorRT's version.
  compare("ILogger::log", place(&ours::ILogger::log),
          place(&theirs::ILogger::log) + kVersionedBytes);
  compare("ILoggerFinder::findLogger", place(&ours::ILoggerFinder::findLogger),
          place(&theirs::ILoggerFinder::findLogger) + kVersionedBytes);
#else
  SAME_PLACE(ILogger::log);
  SAME_PLACE(ILoggerFinder::findLogger);
#endif
  SAME_PLACE(apiv::VDimensionExpr::isConstant);
  SAME_PLACE(apiv::VDimensionExpr::getConstantValue);
  SAME_PLACE(apiv::VExprBuilder::constant);
  SAME_PLACE(apiv::VExprBuilder::operation);
  compareInfo(in_ours::oursPlugin(), in_theirs::theirsPlugin());
  compareInfo(in_ours::oursCore(), in_theirs::theirsCore());
  compareInfo(in_ours::oursBuild(), in_theirs::theirsBuild());
  compareInfo(in_ours::oursRuntime(), in_theirs::theirsRuntime());
  compareInfo(in_ours::oursCreator(), in_theirs::theirsCreator());
  if (num_differences == 0) {
    std::printf("plugins/trt/abi agrees with TensorRT %d.%d.%d\n", NV_TENSORRT_MAJOR,
                NV_TENSORRT_MINOR, NV_TENSORRT_PATCH);
  }
  return num_differences == 0 ? 0 : 1;
}
