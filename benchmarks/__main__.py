"""Run every measurement and print its table."""

import platform

import torch
import torchvision

from benchmarks import capture, company, sharing

print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {torch.get_num_threads()} threads")
print(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}\n")
capture.main()
sharing.main()
company.main()
