"""Operators of looptrt: one schema each, and its twin in every layer (docs/exactness.md).

Owns the operators' meaning; leaves when they run to `looptrt.models` and `looptrt.runtime`.
Invariant: an operator has one stem in every layer, its name in `schema.OPS`.
"""
