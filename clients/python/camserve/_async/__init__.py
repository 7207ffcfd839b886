"""Asynchronous client, one module for each group of calls.

The package ``camserve._sync`` is generated from this one: run ``make sync-client`` after every change.
"""
