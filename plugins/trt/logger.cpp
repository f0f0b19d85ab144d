#include "logger.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "looptrt/trt_schema.h"

namespace looptrt::trt {
namespace {

constexpr int32_t kError = 1;  // ILogger::Severity::kERROR

// Where findLogger stands in ILoggerFinder's virtual table, and log in ILogger's. TensorRT 11 and
// TensorRT-RTX 1.7 put the four functions of a versioned interface first; TensorRT 10 does not.
constexpr int kPlainPlace = 0;
constexpr int kVersionedPlace = 4;

std::atomic<void*> logger_finder = nullptr;
std::atomic<int> logger_place = kVersionedPlace;

template <typename Result, typename... Arguments>
Result callVirtual(void* object, int place, Arguments... arguments) {
  void* const* const table = *static_cast<void***>(object);
  return reinterpret_cast<Result (*)(void*, Arguments...)>(table[place])(object, arguments...);
}

// Version of the TensorRT whose library an object's class is in; 0 if it is in none.
int32_t versionOf(void* object) {
  Dl_info info{};
  if (dladdr(*static_cast<void**>(object), &info) == 0) return 0;
  void* const library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  auto const version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  int32_t const result = version == nullptr ? 0 : version();
  dlclose(library);
  return result;
}

}  // namespace

void setLogger(void* finder) noexcept {
  int32_t const version = finder == nullptr ? 0 : versionOf(finder);
  bool const is_plain = version >= 10'00'00 && version < 11'00'00;
  bool const is_old_rtx = version > 0 && version < 1'07'00;
  logger_finder = is_old_rtx ? nullptr : finder;
  logger_place = is_plain ? kPlainPlace : kVersionedPlace;
}

void logError(OpSchema const& op, char const* format, ...) noexcept {
  char text[512];
  int const used = std::snprintf(text, sizeof text, "%s::%s version %s: ", schema::kNamespace,
                                 op.name, op.version);
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + used, sizeof text - used, format, arguments);
  va_end(arguments);
  void* const finder = logger_finder;
  void* const logger = finder == nullptr ? nullptr : callVirtual<void*>(finder, logger_place);
  if (logger != nullptr) {
    callVirtual<void>(logger, logger_place, kError, static_cast<char const*>(text));
  } else {
    std::fprintf(stderr, "%s\n", text);
  }
}

}  // namespace looptrt::trt
