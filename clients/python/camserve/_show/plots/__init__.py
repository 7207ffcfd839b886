"""Plots of results, drawn with Pillow: a comparison of explanations, and the norms of layers.

The modules are imported only for a plot, because they load fonts.
"""
