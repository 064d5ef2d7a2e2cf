"""The planner: the bytes of an engine by term, the settings that fit into a budget, and which of them is fastest.

Byte accounts and budgets as in SpecMemo, rows per step as in Scylla; ``docs/planning.md`` has formulas and sources.
"""
