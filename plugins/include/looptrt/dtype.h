// Element types of the library, as plain numbers at its border.
#pragma once

#include <cstdint>

namespace looptrt {

// The values are part of the C API.
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t sizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace looptrt
