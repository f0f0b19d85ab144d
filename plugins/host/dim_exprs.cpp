#include "dim_exprs.h"

#include <algorithm>

namespace looptrt::host {

using nvinfer1::DimensionOperation;

namespace {

std::optional<int64_t> apply(DimensionOperation op, int64_t a, int64_t b) {
  bool const divides = op == DimensionOperation::kFLOOR_DIV || op == DimensionOperation::kCEIL_DIV;
  if (divides && b == 0) return std::nullopt;
  switch (op) {
    case DimensionOperation::kSUM:
      return a + b;
    case DimensionOperation::kPROD:
      return a * b;
    case DimensionOperation::kMAX:
      return std::max(a, b);
    case DimensionOperation::kMIN:
      return std::min(a, b);
    case DimensionOperation::kSUB:
      return a - b;
    case DimensionOperation::kEQUAL:
      return a == b;
    case DimensionOperation::kLESS:
      return a < b;
    case DimensionOperation::kFLOOR_DIV:
      return a / b - (a % b != 0 && (a < 0) != (b < 0));
    case DimensionOperation::kCEIL_DIV:
      return a / b + (a % b != 0 && (a < 0) == (b < 0));
  }
  return std::nullopt;
}

}  // namespace

DimExpr::DimExpr(DimExpr const& other)
    : form_(other.form_),
      value_(other.value_),
      index_(other.index_),
      op_(other.op_),
      first_(other.first_),
      second_(other.second_) {
  mImpl = this;
}

DimExpr DimExpr::constant(int64_t value) {
  DimExpr expr(Form::kConstant);
  expr.value_ = value;
  return expr;
}

DimExpr DimExpr::symbol(size_t index) {
  DimExpr expr(Form::kSymbol);
  expr.index_ = index;
  return expr;
}

DimExpr DimExpr::operation(DimensionOperation op, DimExpr const& first, DimExpr const& second) {
  DimExpr expr(Form::kOperation);
  expr.op_ = op;
  expr.first_ = &first;
  expr.second_ = &second;
  return expr;
}

std::optional<int64_t> DimExpr::evaluate(std::vector<int64_t> const& symbols) const {
  if (form_ == Form::kConstant) return value_;
  if (form_ == Form::kSymbol) return symbols.at(index_);
  std::optional<int64_t> const a = first_->evaluate(symbols), b = second_->evaluate(symbols);
  return a && b ? apply(op_, *a, *b) : std::nullopt;
}

DimExpr const* DimExprBuilder::constant(int64_t value) {
  return &exprs_.emplace_back(DimExpr::constant(value));
}

DimExpr const* DimExprBuilder::symbol(size_t index) {
  return &exprs_.emplace_back(DimExpr::symbol(index));
}

DimExpr const* DimExprBuilder::operation(DimensionOperation op,
                                         nvinfer1::IDimensionExpr const& first,
                                         nvinfer1::IDimensionExpr const& second) {
  // Every expression that a plugin can hold is one of ours.
  auto const& a = static_cast<DimExpr const&>(first);
  auto const& b = static_cast<DimExpr const&>(second);
  if (a.isConstant() && b.isConstant()) {
    std::optional<int64_t> const value = apply(op, a.getConstantValue(), b.getConstantValue());
    return value ? constant(*value) : nullptr;
  }
  return &exprs_.emplace_back(DimExpr::operation(op, a, b));
}

}  // namespace looptrt::host
