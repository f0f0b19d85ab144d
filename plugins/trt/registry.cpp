// What TensorRT asks a plugin library for when it loads it, and what the library was built from.
#include <array>
#include <utility>

#include "logger.h"
#include "looptrt/trt_schema.h"
#include "plugin_base.h"

#define LOOPTRT_EXPORT __attribute__((visibility("default")))

namespace {

using looptrt::trt::Creator;

template <size_t... kIndices>
std::array<Creator, sizeof...(kIndices)> makeCreators(std::index_sequence<kIndices...>) {
  return {Creator(looptrt::trt::kAdapters[kIndices])...};
}

}  // namespace

extern "C" {

LOOPTRT_EXPORT void setLoggerFinder(void* finder) { looptrt::trt::setLogger(finder); }

LOOPTRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& num_creators) {
  constexpr size_t kCount = looptrt::trt::schema::kNumOps;
  static std::array<Creator, kCount> creators = makeCreators(std::make_index_sequence<kCount>());
  static std::array<nvinfer1::IPluginCreatorInterface*, kCount> const pointers = [] {
    std::array<nvinfer1::IPluginCreatorInterface*, kCount> result{};
    for (size_t i = 0; i < kCount; ++i) result[i] = &creators[i];
    return result;
  }();
  num_creators = static_cast<int32_t>(kCount);
  return pointers.data();
}

LOOPTRT_EXPORT char const* looptrt_schema_text() { return looptrt::trt::schema::kText; }
}
