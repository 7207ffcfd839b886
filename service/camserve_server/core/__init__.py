"""What every room uses: errors, settings, logging, devices, plugins, reloading files and shared values.

It imports no other room.
"""
