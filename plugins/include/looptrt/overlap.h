// The process's choice whether kernels may start before their predecessors have ended.
#pragma once

#include <atomic>

namespace looptrt {

inline std::atomic<bool> kernels_overlap{false};

}  // namespace looptrt
