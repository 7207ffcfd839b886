"""Encode calls as protobuf messages, and decode replies into values. Nothing here does network I/O."""
