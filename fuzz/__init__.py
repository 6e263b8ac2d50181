"""Fuzzers: random programs, compiled and compared with eager PyTorch; findings come out as small tests.

>>> make fuzz SECONDS=600 SEED=1
>>> python -m fuzz fusion --seconds 60 --seed 3 --jobs 2        # or operators, modules, programs, objects, threads
"""
