"""Does a detector's pyramid explain small objects better than one layer? Measured on scenes with known objects."""
