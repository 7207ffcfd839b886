"""camserve beside TorchServe on the same machine: `make bench-torchserve`."""
