"""Benchmarks: each compares rd2h with a bare baseline in the same run, interleaved.

Run one as ``python -m benchmarks.NAME``, or all with ``make bench``. They print the machine, the
raw figures and the ratio to judge by; ``docs/performance.md`` has what was seen, and the targets.
"""
