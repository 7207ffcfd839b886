"""Serve and explain data sets on a Ray cluster.

It may import `app` and the rooms below.
"""
