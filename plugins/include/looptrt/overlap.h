// The process's choice of which kernels may start before their predecessors have ended.
#pragma once

#include <atomic>
#include <cstdint>

namespace looptrt {

inline std::atomic<int32_t> most_overlapping_rows{0};  // of a call; 0: none

}  // namespace looptrt
