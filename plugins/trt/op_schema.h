// An operator of plugins/schema.py as data for the adapters; the generated header fills it in.
#pragma once

#include <cstdint>

namespace looptrt::trt {

constexpr int kMaxRank = 3;
constexpr int kMaxInputs = 8;
constexpr int kMaxOutputs = 2;
constexpr int kMaxAttributes = 8;
constexpr int kMaxSizes = 8;

enum class Kind {
  kFloat,  // the model dtype, one for the whole call
  kTable,  // the model dtype or float32, one for all tables of the call
  kInt32,
  kInt64,
};

enum class AttributeType { kInt, kFloat };

// times * size + plus; times 0 for a plain number.
struct DimSchema {
  int size;
  int64_t times, plus;
};

struct TensorSchema {
  char const* name;
  Kind kind;
  int rank;
  DimSchema dims[kMaxRank];
};

struct AttributeSchema {
  char const* name;
  AttributeType type;
};

// (heads * num_heads + kv_heads * num_kv_heads + plus) * head_dim / by, or, with by 0, a size that
// the operands decide.
struct SizeSchema {
  char const* name;
  int64_t heads, kv_heads, plus, by;
};

struct OpSchema {
  char const* name;
  char const* version;
  TensorSchema const* inputs;
  int num_inputs;
  TensorSchema const* outputs;
  int num_outputs;
  AttributeSchema const* attributes;
  int num_attributes;
  SizeSchema const* sizes;
  int num_sizes;

  // Whether the adapters can serve it: within the bounds above, the first input and every result
  // of the model dtype, every result's dimensions plain sizes.
  constexpr bool isServed() const {
    bool served = num_inputs <= kMaxInputs && num_outputs <= kMaxOutputs &&
                  num_attributes <= kMaxAttributes && num_sizes <= kMaxSizes &&
                  inputs[0].kind == Kind::kFloat;
    for (int i = 0; i < num_outputs; ++i) {
      served = served && outputs[i].kind == Kind::kFloat;
      for (int j = 0; j < outputs[i].rank; ++j) {
        served = served && outputs[i].dims[j].times == 1 && outputs[i].dims[j].plus == 0;
      }
    }
    return served;
  }
};

}  // namespace looptrt::trt
