// Division by a number that the host knows: a product and a shift on the device.
//
// Plain C++ but for the qualifiers, so that a host test can call it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LOOPTRT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOOPTRT_HOST_DEVICE inline
#endif

namespace looptrt {

class Divider {
 public:
  // divisor: 1 and up.
  explicit Divider(int32_t divisor) : divisor_(divisor), shift_(31) {
    while (int64_t{1} << (shift_ - 31) < divisor) ++shift_;
    // 2^shift / divisor, rounded up: below 2^32, and too large by less than a part in 2^31, which
    // moves no quotient of a number below 2^31 past a whole one.
    factor_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }
  LOOPTRT_HOST_DEVICE int32_t divisor() const { return divisor_; }
  // number: 0 and up.
  LOOPTRT_HOST_DEVICE int32_t quotient(int32_t number) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(number)) * factor_ >>
                                shift_);
  }
  LOOPTRT_HOST_DEVICE int32_t remainder(int32_t number) const {
    return number - quotient(number) * divisor_;
  }

 private:
  int32_t divisor_, shift_;
  uint32_t factor_;
};

}  // namespace looptrt
