"""The commands of `camserve`."""
