"""Errors, settings, logging, devices, plugins, reloading files and shared values, for every other package.

It imports none of them.
"""
