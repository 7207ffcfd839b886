"""Photos and pictures: decode photos, fit them to a model's input, render maps, and draw tiles.

It may import `core`.
"""
