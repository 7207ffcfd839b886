"""Error rates of the rule by which two models are compared: false alarms, and planted changes that it misses."""
