"""Acceleration: a copy of a model that is faster than the module that was loaded.

`accelerate` is the only entry point, and `AccelerationOptions.enabled` (`?accelerate=false` in a model's spec) the only
switch. The copy runs the passes that look at the default layer or at layers after it. Such a pass observes and
differentiates nothing before that layer, so the copy may compute that part in another way:

- `folding`: batch norms are folded into the convolutions before them.
- `copying`: in half precision, weights are converted once instead of in every batch.
- `onednn`: on a CPU, convolutions and linear maps call oneDNN directly.
- `compilation`: on request, `torch.compile` compiles the modules.

After the layer the copy shares the float32 parameters of the model, and computes less:

- `attention`: self-attention without transposed copies in its backward pass.
- `prefix`: only the class token is computed where the output depends on nothing else.

`layout` chooses the memory layout of images and convolution weights. `usage` records which torch functions take which
parameters; the other modules use it to decide where they apply. `trial` compares the copy with the model before it is
used: a copy that fails or gives other numbers is discarded, and the model runs as it was loaded.

This package imports torch, the capture hooks, devices and shared types, and no other module of `models`.
"""

from camserve_server.models.acceleration.layout import TIMED_ROWS
from camserve_server.models.acceleration.model import AcceleratedModel, Acceleration, AccelerationOptions, accelerate

__all__ = ["TIMED_ROWS", "AcceleratedModel", "Acceleration", "AccelerationOptions", "accelerate"]
