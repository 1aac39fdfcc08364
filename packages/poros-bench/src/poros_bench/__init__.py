"""Benchmarks for Poros: the same work by several methods, each in its own process, with receipts."""

__version__ = "0.1.0"
