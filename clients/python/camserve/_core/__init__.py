"""Foundations of every room: errors, checks of options, safe local files and printable text."""
