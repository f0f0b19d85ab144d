"""The one torch definition of every looped model: executors run it, the builder exports it.

Owns families, their checkpoint names and their arithmetic; leaves operators to
`looptrt.plugins`. Invariant: no model is described a second time by hand.
"""
