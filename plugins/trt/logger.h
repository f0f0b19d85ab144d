// Errors of plugins, told through the logger of the TensorRT that loaded them.
#pragma once

#include "op_schema.h"

namespace looptrt::trt {

// Takes TensorRT's ILoggerFinder; null, or one of a version that is not known, leaves stderr.
void setLogger(void* finder) noexcept;

// One line that begins with the operator's full name.
void logError(OpSchema const& op, char const* format, ...) noexcept
    __attribute__((format(printf, 2, 3)));

}  // namespace looptrt::trt
