"""Photos and pictures: decode a photo, fit it to a model's input, render maps, draw tiles.

It may import `core`.
"""
