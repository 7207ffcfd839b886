"""Values that callers hold: options, results and descriptions. They know neither the wire nor drawing."""
