// Sizes of a network that is being built: numbers, sizes that a step decides, and what follows.
//
// Owns the expressions that a plugin makes in getOutputShapes and their value at given sizes.
// Invariant: an expression lives as long as its builder.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "abi/nv_infer.h"

namespace looptrt::host {

class DimExpr final : public nvinfer1::IDimensionExpr, public nvinfer1::apiv::VDimensionExpr {
 public:
  static DimExpr constant(int64_t value);
  static DimExpr symbol(size_t index);
  static DimExpr operation(nvinfer1::DimensionOperation op, DimExpr const& first,
                           DimExpr const& second);
  DimExpr(DimExpr const& other);
  DimExpr& operator=(DimExpr const&) = delete;

  bool isConstant() const override { return form_ == Form::kConstant; }
  int64_t getConstantValue() const override { return value_; }

  // Its value where symbol i is symbols[i]; none where it divides by zero.
  std::optional<int64_t> evaluate(std::vector<int64_t> const& symbols) const;

 private:
  enum class Form { kConstant, kSymbol, kOperation };
  explicit DimExpr(Form form) : form_(form) { mImpl = this; }

  Form form_;
  int64_t value_ = 0;  // of a constant
  size_t index_ = 0;   // of a symbol
  nvinfer1::DimensionOperation op_ = nvinfer1::DimensionOperation::kSUM;
  DimExpr const *first_ = nullptr, *second_ = nullptr;
};

class DimExprBuilder final : public nvinfer1::IExprBuilder, public nvinfer1::apiv::VExprBuilder {
 public:
  DimExprBuilder() { mImpl = this; }

  DimExpr const* constant(int64_t value) override;
  DimExpr const* operation(nvinfer1::DimensionOperation op, nvinfer1::IDimensionExpr const& first,
                           nvinfer1::IDimensionExpr const& second) override;
  DimExpr const* symbol(size_t index);

 private:
  std::deque<DimExpr> exprs_;  // never moves its elements
};

}  // namespace looptrt::host
