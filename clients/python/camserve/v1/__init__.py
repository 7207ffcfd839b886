"""Generated messages and stubs of the camserve.v1 API; see protos/."""
