"""Find photos, and name the files of results."""
