"""Measurements of an engine directory, behind `looptrt bench` and the scripts in benchmarks/.

Owns workloads, arms, the order of runs, their statistics and the form of results; leaves
serving to `runtime` and the terminal to `cli`. Invariant: every arm of a run answers the same
requests, and a request that failed is in the result.
"""
