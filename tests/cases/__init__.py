"""The multi-rank cases, written once: tests/distributed runs them on CPU processes, tests/gpu on GPUs.

Each module has a class of tests without the prefix that pytest collects by; a test module of a device subclasses it.
The tests run in the parent and send functions of this package to the ranks.
"""
